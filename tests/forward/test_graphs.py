"""Linked forwards captured once and replayed for other requests: the same as eager ones, or not used."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from benchmarks.families.families import build as build_family
from benchmarks.families.families import families
from engine_kit import FOLDER, RecordingStore, chunk, text
from families import build, off, tokens, wrapped
from graph_kit import Rerun, graphed, plain_tables
from link_kit import described, planned, segments
from ragcachekit import GraphConfig, Prompt, RagCache
from ragcachekit.forward.attention import install
from ragcachekit.forward.cuda_graphs.captured_cache import GraphInputs, room_for, tokens_for
from ragcachekit.forward.cuda_graphs.graphed_forward import use_graphs
from ragcachekit.forward.linker import link

ASKED = {"max_new_tokens": 5, "do_sample": False}
NAMES = ["llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "glm4"]
"""Plain; with normed keys; soft-capped with windows; windows and two RoPEs; sinks; partial rotary."""

SMALL = [
    Prompt([text(3, 1), chunk(12, 2), chunk(7, 3), text(4, 4)]),
    Prompt([text(2, 8), chunk(7, 3), chunk(12, 2), text(5, 30)]),
    Prompt([text(2, 8), chunk(12, 2), text(3, 31)]),
]
"""Interpreted kernels are slow. The same chunks at other places, other rows, other lengths."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
    plain_tables(monkeypatch)


@pytest.fixture
def interpreted(monkeypatch, _fast):
    """The kernels themselves, where a test wants them."""
    monkeypatch.undo()
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")


@pytest.fixture(scope="module", autouse=True)
def _shared_models_stay_plain():
    yield
    for name in NAMES:
        use_graphs(wrapped(name), "off")


def rag_around(model, capture=None, **options):
    graphs = GraphConfig(capture=capture) if capture is not None else "off"
    return RagCache(
        model, cache_dir=FOLDER.name, **{"policy": "lego:16", "cold": "now", "graphs": graphs, **options}
    )


def plan_with(name, first, *chunks, policy="lego:4"):
    parts = [("text", first), *(("chunk", ids) for ids in chunks), ("text", tokens(5, 77))]
    return planned(name, segments(*parts), policy)


def inputs_of(name, plan):
    made = link(plan, described(name), torch.device("cpu"))
    rows = len(plan.rows)
    return {
        "input_ids": made.input_ids[:, -rows:],
        "position_ids": made.position_ids[:, -rows:],
        "attention_mask": made.attention_mask,
        "past_key_values": made.cache,
        "use_cache": True,
        "logits_to_keep": 1,
    }


def next_logits(model, cache, position):
    given = {"input_ids": torch.tensor([[9]]), "position_ids": torch.tensor([[position]])}
    return model(**given, past_key_values=cache, use_cache=True).logits


class TestSameAsEager:
    @pytest.mark.parametrize("name", NAMES)
    @torch.no_grad()
    def test_logits_kv_and_what_follows(self, name):
        plans = [
            plan_with(name, tokens(9, 1), tokens(33, 2), tokens(25, 3)),
            plan_with(name, tokens(4, 6), tokens(25, 3), tokens(14, 7), tokens(33, 2), policy="reuse"),
        ]
        model = wrapped(name)
        install(model)
        expected = []
        for plan in plans:
            given = inputs_of(name, plan)
            logits = model(**given).logits
            expected.append((logits, given["past_key_values"]))
        capture = graphed(model)
        for plan, (logits, eager) in zip(plans, expected, strict=True):
            given = inputs_of(name, plan)
            out, cache = model(**given), given["past_key_values"]
            assert cache.forward == "graph"
            assert out.past_key_values is cache
            assert not any(layer.rows for layer in cache.layers)
            assert cache.get_seq_length() == len(plan.token_ids)
            assert off(out.logits, logits) < 1e-5
            for ours, theirs in zip(cache.layers, eager.layers, strict=True):
                assert off(ours.keys, theirs.keys) < 1e-5
                assert off(ours.values, theirs.values) < 1e-5
            after = [next_logits(model, c, len(plan.token_ids)) for c in (cache, eager)]
            assert off(*after) < 1e-5
        assert capture.captured == len({room_for(len(plan.rows)) for plan in plans})
        use_graphs(model, "off")

    @pytest.mark.parametrize("policy", ["reuse", "lego:4", "query:0.2", "cacheblend:0.3", "full"])
    def test_the_engine_chooses_the_same_tokens(self, policy):
        plain = rag_around(build("llama"), policy=policy)
        expected = [_warm(plain, prompt).generate(prompt, **ASKED) for prompt in SMALL[:2]]
        rag = rag_around(build("llama"), Rerun(), policy=policy)
        answers = [_warm(rag, prompt).generate(prompt, **ASKED) for prompt in SMALL[:2]]
        assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
        assert {e.report.link.forward for e in expected} == {"" if policy == "full" else "eager"}
        how = {answer.report.link.forward for answer in answers}
        if policy == "cacheblend:0.3":
            assert how == {"eager: the policy watches the forward or narrows its rows"}
        else:
            assert how == ({""} if policy == "full" else {"graph"})

    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
    @torch.no_grad()
    def test_with_the_kernels_themselves(self, name, interpreted):
        model = build(name)
        install(model)
        plans = [
            plan_with(name, tokens(3, 1), tokens(12, 2)),
            plan_with(name, tokens(2, 8), tokens(7, 3), tokens(12, 2)),
        ][: 2 if name == "llama" else 1]
        expected = [inputs_of(name, plan) for plan in plans]
        logits = [model(**given).logits for given in expected]
        capture = graphed(model)
        for plan, eager, own in zip(plans, expected, logits, strict=True):
            given = inputs_of(name, plan)
            assert off(model(**given).logits, own) < 1e-5
            cache = given["past_key_values"]
            assert (cache.forward, cache.kernels) == ("graph", "triton")
            for ours, theirs in zip(cache.layers, eager["past_key_values"].layers, strict=True):
                assert off(ours.keys, theirs.keys) < 1e-5
                assert off(ours.values, theirs.values) < 1e-5
        assert capture.captured == 1

    def test_shared_kv_is_not_written(self):
        store = RecordingStore()
        rag = rag_around(build("llama"), Rerun(), policy="lego:4", store=store)
        for prompt in SMALL * 2:
            last = rag.generate(prompt, **ASKED).report.link
        assert last.forward == "graph"
        assert store.originals
        assert store.unchanged()

    def test_requests_at_once(self):
        capture = Rerun()
        rag = rag_around(build("qwen3"), capture, policy="lego:4")
        expected = [_warm(rag, prompt).generate(prompt, **ASKED).token_ids for prompt in SMALL]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda i: rag.generate(SMALL[i % 3], **ASKED), range(18)))
        assert [a.token_ids for a in answers] == [expected[i % 3] for i in range(18)]
        assert {a.report.link.forward for a in answers} == {"graph"}
        assert capture.captured == 1


def _warm(rag, prompt):
    rag.generate(prompt, max_new_tokens=1)
    return rag


class TestEagerInstead:
    """What cannot go through a captured forward runs as it always did, and the report says why."""

    def answer(self, model, capture, **options):
        rag = rag_around(model, capture, policy="lego:4")
        return _warm(rag, SMALL[0]).generate(SMALL[0], **{**ASKED, **options})

    def expected(self, model):
        return self.answer(copy.deepcopy(model), None).token_ids

    def test_attention_over_something_else_than_the_cache(self, caplog):
        (family,) = (f for f in families() if f.name == "deepseek_v3")
        model, capture = build_family(family), Rerun()
        answer = self.answer(model, capture)
        assert answer.token_ids == self.expected(model)
        assert "attention does not read the cached keys and values as they are" in answer.report.link.forward
        before = capture.captured
        again = self.answer(model, capture)
        assert again.report.link.forward == answer.report.link.forward
        assert capture.captured == before == 1, "once is enough"
        assert len([r for r in caplog.records if "without graphs" in r.message]) == 1

    def test_a_capture_that_computes_something_else(self):
        class Wrong(Rerun):
            def __call__(self, run):
                replay = super().__call__(run)
                return lambda: replay() + torch.linspace(0, 9, 101)

        model = build("llama")
        answer = self.answer(model, Wrong())
        assert answer.token_ids == self.expected(model)
        assert "the logits differ from the model's own by" in answer.report.link.forward

    def test_a_capture_that_writes_elsewhere(self):
        class Elsewhere(Rerun):
            """Rows go one position too far."""

            def __call__(self, run):
                positions = run._inputs.rows.positions
                replay = super().__call__(run)

                def late():
                    positions.add_(1)
                    return replay()

                return late

        model = build("llama")
        answer = self.answer(model, Elsewhere())
        assert answer.token_ids == self.expected(model)
        assert answer.report.link.forward.startswith("eager: a forward over 16 rows cannot be captured")

    def test_a_capture_that_fails(self):
        def capture(run):
            raise RuntimeError("operation not permitted when stream is capturing")

        model = build("llama")
        answer = self.answer(model, capture)
        assert answer.token_ids == self.expected(model)
        assert "operation not permitted when stream is capturing" in answer.report.link.forward
        assert "operation not permitted" in str(answer.report)

    def test_layers_with_hooks(self):
        model, seen = build("llama"), []
        model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
        answer = self.answer(model, Rerun())
        assert answer.report.link.forward == "eager: a layer has forward hooks, which a graph would not run"
        assert seen

    def test_a_hook_that_comes_later(self):
        model, seen = build("llama"), []
        rag = rag_around(model, Rerun(), policy="lego:4")
        assert _warm(rag, SMALL[0]).generate(SMALL[0], **ASKED).report.link.forward == "graph"
        handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
        assert "hooks" in rag.generate(SMALL[0], **ASKED).report.link.forward
        assert seen
        handle.remove()
        assert rag.generate(SMALL[0], **ASKED).report.link.forward == "graph"

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"repetition_penalty": 1.0, "bad_words_ids": [[3, 4]]}, "eager"),
            ({"num_beams": 2}, "eager"),
        ],
    )
    def test_options_that_are_linked_ahead(self, options, why):
        assert self.answer(build("llama"), Rerun(), **options).report.link.forward == why

    def test_but_prompts_of_a_batch_are_linked_one_by_one(self):
        rag = rag_around(build("llama"), Rerun(), policy="lego:4")
        _warm(_warm(rag, SMALL[0]), SMALL[1])
        answers = rag.generate_batch(SMALL[:2], **ASKED)
        assert {a.report.link.forward for a in answers} == {"graph"}
        assert answers[1].token_ids == rag.generate(SMALL[1], **ASKED).token_ids

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"logits_to_keep": 0}, "more than the last row's logits is asked for"),
            ({"logits_to_keep": torch.tensor([1])}, "more than the last row's logits is asked for"),
            ({"output_hidden_states": True}, "the forward is given output_hidden_states"),
            ({"position_ids": None}, "it is not one prompt's ids and positions"),
        ],
    )
    @torch.no_grad()
    def test_calls_that_ask_for_more(self, change, why):
        model, plan = build("llama"), plan_with("llama", tokens(3, 1), tokens(12, 2))
        install(model)
        capture = graphed(model)
        given = inputs_of("llama", plan) | change
        if change.get("position_ids", ()) is None:
            given["input_ids"] = given["input_ids"][:, :-1]  # whatever it does, not by graph
            with pytest.raises((RuntimeError, ValueError)):
                model(**given)
        else:
            model(**given)
        assert given["past_key_values"].forward == f"eager: {why}"
        assert capture.captured == 0

    def test_gradients_and_too_many_rows(self):
        model, plan = build("llama"), plan_with("llama", tokens(3, 1), tokens(12, 2))
        install(model)
        capture = graphed(model, max_rows=8)
        given = inputs_of("llama", plan)
        with torch.no_grad():
            model(**given)
        assert given["past_key_values"].forward == "eager: more than 8 rows"
        graphed(model, max_rows=16)
        given = inputs_of("llama", plan)
        model(**given)
        assert given["past_key_values"].forward == "eager: gradients or autocast are on"
        assert capture.captured == 0

    @torch.no_grad()
    def test_kv_that_is_still_on_its_way(self):
        class OnTheWay:
            coming, settling = 1 << 20, None

        model, plan = build("llama"), plan_with("llama", tokens(3, 1), tokens(12, 2))
        install(model)
        for most, forward in (
            (1 << 19, "eager: its KV is still on its way to the device"),
            (1 << 20, "graph"),
        ):
            graphed(model, max_coming=most)
            given = inputs_of("llama", plan)
            given["past_key_values"]._placing = OnTheWay()
            model(**given)
            assert given["past_key_values"].forward == forward


class TestTheModelStaysItself:
    def test_weights_changed_later_count(self):
        model, capture = build("llama"), Rerun()
        plan = plan_with("llama", tokens(3, 1), tokens(12, 2))
        install(model)
        use_graphs(model, GraphConfig(capture=capture))
        with torch.no_grad():
            before = model(**inputs_of("llama", plan)).logits
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
            given = inputs_of("llama", plan)
            after = model(**given).logits
        assert given["past_key_values"].forward == "graph"
        assert capture.captured == 2
        assert off(after, before.flip(-1)) < 1e-5

    def test_a_copy_has_its_own_forward(self):
        model = build("llama")
        install(model)
        graphed(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                other.lm_head.weight.zero_()
                assert not other(torch.tensor([[5, 6]])).logits.any()
                assert model(torch.tensor([[5, 6]])).logits.any()

    def test_signature_and_removal(self):
        model = build("llama")
        before = inspect.signature(model.forward)
        install(model)
        graphed(model)
        assert inspect.signature(model.forward) == before
        first = model.forward
        graphed(model)
        assert vars(model)["forward"] is not first
        use_graphs(model, "off")
        assert "forward" not in vars(model)

    def test_somebody_else_s_forward_is_given_back(self):
        model = build("llama")
        own = model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
        install(model)
        graphed(model)
        assert model(torch.tensor([[5]])).logits.shape == (1, 1, 101)
        use_graphs(model, "off")
        assert vars(model)["forward"] is own

    def test_no_graphs_on_a_cpu_by_itself(self):
        model = build("llama")
        rag_around(model)
        RagCache(model, cache_dir=FOLDER.name)
        assert "forward" not in vars(model)

    def test_it_does_not_keep_the_model(self):
        model = build("llama")
        install(model)
        graphed(model)
        plan = plan_with("llama", tokens(3, 1), tokens(12, 2))
        with torch.no_grad():
            model(**inputs_of("llama", plan))
        gone = weakref.ref(model)
        del model
        assert gone() is None

    def test_bad_settings(self):
        with pytest.raises(ValueError, match="graphs must be 'auto', 'off'"):
            use_graphs(build("llama"), "on")
        with pytest.raises(ValueError, match="graphs='off'"):
            GraphConfig(max_rows=0)
        with pytest.raises(ValueError, match="max_coming"):
            GraphConfig(max_coming=-1)


class TestMasks:
    def test_none_is_made_in_a_linked_forward(self):
        name = install(build("llama"))
        ours, theirs = ALL_MASK_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        sizes = {"batch_size": 1, "q_length": 3, "kv_offset": 0, "allow_is_causal_skip": False}
        assert ours(kv_length=0, **sizes) is None
        made = ours(kv_length=3, **sizes)
        assert made.shape == (1, 1, 3, 3)
        assert torch.equal(made, theirs(kv_length=3, **sizes))

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    @torch.no_grad()
    def test_layers_get_none_and_share_one_copy_of_the_rows(self, name, monkeypatch):
        model, seen = build(name), []
        plan = plan_with(name, tokens(3, 1), tokens(12, 2))
        install(model)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
            )
        given = inputs_of(name, plan)
        rows = [layer.rows.positions for layer in given["past_key_values"].layers]
        model(**given)
        assert seen == [None] * 3
        assert len({id(r) for r in rows}) == 1


class TestInputs:
    def test_rooms(self):
        rooms = [room_for(rows) for rows in range(1, 1025)]
        assert all(room >= rows and room % 16 == 0 for rows, room in enumerate(rooms, 1))
        assert rooms == sorted(rooms)
        assert sorted(set(rooms)) == [16, 32, *range(64, 513, 64), *range(640, 1025, 128)]

    def test_keys_that_few_rows_are_captured_for(self):
        assert [tokens_for(64, slots) for slots in (1, 2048, 2049, 32768)] == [2048, 2048, 8192, 32768]
        assert len({tokens_for(320, slots) for slots in (1, 2049, 1 << 20)}) == 1

    def test_what_kernels_find(self):
        inputs = GraphInputs(16, 2, torch.float32, torch.device("cpu"))
        for positions in ((3, 7, 9), (0,), tuple(range(1, 17))):
            rows = len(positions)
            ids = torch.arange(rows)[None] + 40
            inputs.write(ids, torch.tensor([positions]), positions, range(100, 108))
            assert inputs.rows.positions.tolist() == [*positions, *[positions[-1]] * (16 - rows)]
            assert inputs.rows.positions.dtype == inputs.rows.count.dtype == torch.int32
            assert inputs.rows.count.tolist() == [rows]
            assert inputs.last.tolist() == [rows - 1]
            assert inputs.table.entries.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]
            padded_ids, padded_positions = inputs.padded()
            assert padded_ids.tolist() == [[*range(40, 40 + rows), *[39 + rows] * (16 - rows)]]
            assert padded_positions[0].tolist() == inputs.rows.positions.tolist()
        assert inputs.rows.positions.data_ptr() % 16 == 0


def test_reports():
    answer = _warm(rag_around(build("llama"), Rerun(), policy="lego:4"), SMALL[0]).generate(SMALL[0], **ASKED)
    report = answer.report.link
    assert (report.forward, report.kernels) == ("graph", "torch (cpu)")
    assert "forward graph, kernels torch (cpu)" in str(report)
    assert "kernels</th><td style='text-align:left'>torch (cpu)</td>" in report._repr_html_()
    assert answer.report.to_dict()["link"]["forward"] == "graph"
