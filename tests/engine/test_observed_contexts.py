"""Rows of a chunk in later prompts join its mean under ``average:n``, once those are answered."""

from itertools import permutations

import pytest
import torch
import transformers as tf

from engine_kit import checked
from families import SIZES, VOCAB, off, plain, prefill, sharpened, tokens, wrapped
from link_kit import described
from ragcachekit import Chunk, Prompt, RagCache, Text, TreeConfig
from ragcachekit.encode.in_prompt import observe
from ragcachekit.plan.link_plan import CONTEXTS_TO_OBSERVE

SYSTEM, QUESTION = tokens(9, 1), tokens(6, 9)
CHUNKS = {name: tokens(16 + number, 2 + number) for number, name in enumerate("abcde")}


def prompt(names):
    body = (Chunk(token_ids=CHUNKS[name]) for name in names)
    return Prompt([Text(token_ids=SYSTEM), *body, Text(token_ids=QUESTION)])


@pytest.fixture
def rag(tmp_path):
    with RagCache(wrapped("llama"), cache_dir=checked(tmp_path), encoder="average:3", cold="now") as rag:
        yield rag


def ask(rag, names):
    """The uses of the chunks, in order."""
    return rag.generate(prompt(names), max_new_tokens=1).report.link.chunks


def sources(uses):
    return ["computed" if use.source == "computed" else "cached" for use in uses]


def rows_after(before, chunk):
    """Keys without RoPE and values of a chunk, from an ordinary prefill of plain transformers."""
    whole = (*SYSTEM, *(i for name in before for i in CHUNKS[name]), *CHUNKS[chunk])
    run, start = prefill(plain("llama"), whole), len(whole) - len(CHUNKS[chunk])
    rope = described("llama")
    angles = rope.angles(torch.arange(start, len(whole)), len(whole))
    keys = [rope.strip(i, k[:, start:], k[:, start:], angles)[0] for i, k in enumerate(run.keys)]
    return keys, [values[:, start:] for values in run.values]


def means_of(rag, name):
    """The stored means of a chunk."""
    store = rag.components.store
    keys = [key for key in list(store.keys()) if key.encoding == "average:3"]
    found = [(key, store.get(key).kv) for key in keys]
    return [(key, kv) for key, kv in found if kv.tokens == len(CHUNKS[name])]


def test_the_second_context_of_a_chunk_joins_the_first(rag):
    ask(rag, "ab")
    ((_, one),) = means_of(rag, "b")
    assert "sensitivity" not in one.sums
    assert rag.encoding_stats().encoded_tokens == 0
    assert sources(ask(rag, "cb")) == ["computed", "cached"], "its answer waits for no second context"
    ((key, two),) = means_of(rag, "b")
    runs = [rows_after("a", "b"), rows_after("c", "b")]
    for layer in range(two.layers):
        keys, values = [run[0][layer] for run in runs], [run[1][layer] for run in runs]
        assert off(two.keys[layer], sum(keys) / 2) <= 1e-5
        assert off(two.values[layer], sum(values) / 2) <= 1e-5
        moved = (values[0] - values[1]).square().sum((0, 2)).sqrt()
        assert off(two.sums["sensitivity"][layer], moved) <= 1e-4
    assert len(key.context) == 3, "the system text and both chunks"
    assert rag.encoding_stats().encoded_tokens == len(CHUNKS["b"])


def test_every_chunk_gets_the_contexts_that_it_needs_and_no_more(rag):
    orders = list(permutations("abcd"))
    assert sources(ask(rag, orders[0])) == ["computed"] * 4
    for order in orders[1:]:
        uses = ask(rag, order)
        assert sources(uses) == ["cached"] * 4
    assert [use.contexts for use in uses] == [1, *[CONTEXTS_TO_OBSERVE] * 3]
    assert f"mean of {CONTEXTS_TO_OBSERVE} contexts" in str(uses[1])
    assert uses[0].exact
    # Of three entries each, the first prompt computed one.
    assert rag.encoding_stats().encoded_tokens == 2 * sum(len(CHUNKS[name]) for name in "abcd")


@pytest.mark.parametrize("after", [1, 2])
def test_a_chunk_is_observed_when_it_has_served_once_more_than_a_miss_must_return(tmp_path, after):
    options = {"encoder": "average:3", "encode_after": after, "cache_dir": checked(tmp_path)}
    with RagCache(wrapped("llama"), **options) as rag:
        ask(rag, "abcd")
        rag.flush()
        for number, order in enumerate(("acbd", "acdb", "adcb")):
            assert rag.encoding_stats().encoded_tokens == 0
            assert sources(ask(rag, order)) == ["cached"] * 4
            rag.flush()
            if number == after:
                break
        assert rag.encoding_stats().encoded_tokens == sum(len(CHUNKS[name]) for name in "bcd")


def test_the_same_prompt_again_adds_nothing(rag):
    for _ in range(4):
        uses = ask(rag, "abcd")
    assert sources(uses) == ["cached"] * 4
    assert {use.contexts for use in uses} == {1}


def test_rows_after_approximate_rows_are_kept(rag):
    ask(rag, "abc")
    uses = ask(rag, "cbd")
    assert uses[2].source == "computed"
    ((_, kv),) = means_of(rag, "d")
    _, values = rows_after("cb", "d")
    moved = max(off(kv.values[layer], values[layer]) for layer in range(kv.layers))
    assert 0 < moved < 0.3, "near an ordinary prefill"


@pytest.mark.parametrize("gone", ["a", "c"])
def test_a_forgotten_chunk_takes_the_means_that_it_is_in_along(rag, gone):
    for names in ("ab", "cb"):
        ask(rag, names)
    ((key, _),) = means_of(rag, "b")
    known = {use.tokens: use.chunk_id for use in ask(rag, "ac")}
    assert known[len(CHUNKS[gone])] in key.context
    rag.forget([known[len(CHUNKS[gone])]])
    assert means_of(rag, "b") == []


def test_a_link_without_an_answer_computes_no_known_chunk(rag):
    ask(rag, "abcd")
    assert rag.link(prompt("badc")).report.computed_tokens == len(QUESTION)
    assert rag.encoding_stats().encoded_tokens == 0
    ask(rag, "badc")
    assert rag.encoding_stats().encoded_tokens > 0


def test_nothing_is_computed_for_a_mean_where_nothing_is_kept(tmp_path):
    with RagCache(wrapped("llama"), cache_dir=checked(tmp_path), encoder="average:3", cold="now") as first:
        for names in ("abcd", "badc"):
            ask(first, names)
        store = first.components.store
        with RagCache(wrapped("llama"), store=store, encoder="average:3", cold="never") as rag:
            assert sources(ask(rag, "cadb")) == ["cached"] * 4
            assert rag.encoding_stats().encoded_tokens == 0
        known = first.encoding_stats().encoded_tokens
        ask(first, "cadb")
        assert first.encoding_stats().encoded_tokens > known


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "reuse"}, {"policy": "cacheblend:0.15"}, {"num_beams": 2}, {"policy": "impact:0.1"}],
)
def test_the_same_prompt_is_soon_served_whole(rag, options):
    """Also where its chunks are together what an earlier mean was made of, or its rows cannot be kept."""
    for names in ("ab", "cd", "cbd"):
        ask(rag, names)
    for _ in range(5):
        report = rag.generate(prompt("acbd"), max_new_tokens=1, **options).report.link
    assert sources(report.chunks) == ["cached"] * 4


def test_encode_computes_what_prompts_have_not(opened):
    """A mean that prompts made complete says nothing of the chunk as a prompt's first."""
    rag = opened(encoder="average:2", cold="now")
    texts = [f"{place} lies on the river of number {place * 7}." for place in range(4)]
    rag.register(texts)

    def ask(*places):
        body = "\n\n".join(texts[place] for place in places)
        return rag.generate(f"Answer from the context.\n{body}\nWhere?", max_new_tokens=1).report.link.chunks

    orders = [order for order in permutations(range(4)) if order[0] in (0, 2)]
    uses = [ask(*order) for order in orders][-1]
    assert [use.contexts for use in uses] == [1, *[CONTEXTS_TO_OBSERVE] * 3]
    assert sorted(rag.encode(texts).kept) == sorted(rag.encode(texts))
    assert [sources(ask(*places))[0] for places in ([1, 0, 2, 3], [3, 0, 2, 1])] == ["cached"] * 2


def shared_layers():
    """The last layers have no KV of their own: generate runs them for the last row alone."""
    of_layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    heads = {"head_dim": 16, "global_head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 2}
    per_layer = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    torch.manual_seed(0)
    config = tf.Gemma4TextConfig(**{**SIZES, **of_layers, **heads, **per_layer})
    return sharpened(tf.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("model", "options"),
    [(lambda: wrapped("llama"), {"tree": TreeConfig(turns_bytes=1 << 24)}), (shared_layers, {})],
    ids=["turns", "shared layers"],
)
def test_second_contexts_are_observed(tmp_path, model, options):
    """Where the prompt is in the tree as a turn by then, and where layers attend that store nothing."""
    options |= {"encoder": "average:3", "cold": "now", "cache_dir": checked(tmp_path)}
    with RagCache(model(), **options) as rag:
        for names in ("abcd", "acbd", "adcb"):
            ask(rag, names)
        assert {use.contexts for use in ask(rag, "abdc")[1:]} - {0} == {CONTEXTS_TO_OBSERVE}, "0: of the tree"


def test_nothing_is_kept_of_a_model_that_changes_meanwhile(rag, monkeypatch):
    ask(rag, "abcd")
    unchanged, calls = rag.components.planner.unchanged, []
    observing = "ragcachekit.engine.runner.observe"
    monkeypatch.setattr(observing, lambda *parts: calls.append(1) or observe(*parts))
    monkeypatch.setattr(rag.components.planner, "unchanged", lambda: unchanged() and not calls)
    ask(rag, "acbd")
    assert calls == [1]
    assert rag.encoding_stats().encoded_tokens == 0


def test_too_long_a_prompt_is_not_observed_and_later_ones_are(rag, monkeypatch):
    ask(rag, "abcd")
    with monkeypatch.context() as patch:
        patch.setattr("ragcachekit.forward.rows.MAX_HELD_BYTES", 100)
        patch.setattr("ragcachekit.encode.in_prompt.MAX_HELD_BYTES", 100)
        ask(rag, "acbd")
    assert rag.encoding_stats().encoded_tokens == 0
    ask(rag, "adcb")
    assert rag.encoding_stats().encoded_tokens == sum(len(CHUNKS[name]) for name in "bcd")
