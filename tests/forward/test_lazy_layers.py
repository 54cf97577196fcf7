"""Layers are put in place when the forward reaches them; what cannot come is computed instead."""

from itertools import chain, product

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from engine_kit import PROMPT, chunk, ids, rag_for, text, warmed
from families import ALWAYS, FAMILIES, greedy, plain, wrapped
from link_kit import BOS, described, plan_from, segments
from loading_kit import Gate, SlowStore, Spoil
from ragcachekit import LoadConfig, Prompt
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.forward.linker import link
from ragcachekit.plan.encodings import Encodings, Fetch
from ragcachekit.policies.registry import open_policy
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.loader import Loader
from ragcachekit.store.memory import HostStore
from soak_kit import soaked

ASKED = {"max_new_tokens": 6, "do_sample": False}
LAYERS = 3
POLICIES = ["reuse", "lego:4", "query:0.2", "deep:0.2", "cacheblend:0.3", "lego:1000"]
OTHER = Prompt([text(9, 1), chunk(21, 7), chunk(33, 2), text(4, 8)])


def slow_rag(name, policy, store, **options):
    """Over a store that is read layer by layer, with everything of PROMPT and OTHER in it."""
    for prompt in (PROMPT, OTHER):
        warmed(name, prompt, policy=policy, store=store)
    store.log.clear()
    store.sources.clear()
    return rag_for(name, policy=policy, store=store, load="always", **options)


class KeyedStore(SlowStore):
    """Knows the keys by the number of their tokens."""

    def __init__(self, before_read=lambda *_: None):
        super().__init__(before_read)
        self.of_tokens = {}

    def put(self, key, kv):
        self.of_tokens[kv.tokens] = key
        return super().put(key, kv)


@pytest.mark.parametrize(
    ("name", "policy"),
    soaked(
        [(name, policy) for name in ("llama", "gemma3", "gpt-oss") for policy in POLICIES],
        *(("llama", policy) for policy in ("reuse", "lego:4", "query:0.2")),
        *(("gemma3", "cacheblend:0.3"), ("gpt-oss", "lego:4")),
    ),
)
def test_answers_over_a_loading_store_are_those_over_memory(name, policy):
    expected = warmed(name, PROMPT, policy=policy).generate(PROMPT, **ASKED)
    store = KeyedStore()
    with slow_rag(name, policy, store) as rag:
        answer = rag.generate(PROMPT, **ASKED)
        linked = rag.link(PROMPT)
        output = rag.model.generate(**linked.inputs, **ASKED, pad_token_id=0)
    link = answer.report.link
    assert answer.token_ids == expected.token_ids
    assert {use.source for use in link.uses} == {"disk"}
    assert link.recomputed_tokens == expected.report.link.recomputed_tokens
    assert link.loaded_bytes == sum(source.nbytes for source in store.sources[:3]) > 0
    assert 0 < link.wait_ms <= link.load_ms
    assert link.overlap == pytest.approx(1 - link.wait_ms / link.load_ms)
    assert "loaded in" in str(answer.report)
    own = warmed(name, PROMPT, policy=policy).link(PROMPT)
    assert torch.equal(output, rag.model.generate(**own.inputs, **ASKED, pad_token_id=0))


def test_layer_0_computes_while_layer_1_is_being_read():
    """Layer 1 comes only after layer 0 of the forward has run: whoever waits for all layers hangs."""
    gate = Gate(lambda key, layer: layer == 1)
    store = KeyedStore()
    rag = slow_rag(
        "llama",
        "lego:4",
        store,
    )
    expected = rag.generate(PROMPT, **ASKED).token_ids
    store.before_read = gate
    through = rag.model.base_model.layers[0].register_forward_hook(lambda *_: gate.open())
    try:
        assert rag.generate(PROMPT, **ASKED).token_ids == expected
    finally:
        through.remove()
        rag.close()
    assert gate.reached.is_set()


def plan_over(name, store, policy="lego:4"):
    rope, chosen = described(name), open_policy(policy)
    parts = segments(
        ("text", ids(PROMPT)[:9]),
        ("chunk", ids(PROMPT)[9:42]),
        ("chunk", ids(PROMPT)[42:67]),
        ("text", ids(PROMPT)[67:]),
    )
    return plan_from(parts, chosen, Encodings("standalone", rope, BOS), store, "model", "space")


def test_nothing_is_waited_for_before_it_is_asked_for():
    name = "llama"
    store = SlowStore()
    for item in plan_over(name, store).missing:
        for _, kv in ChunkEncoder(wrapped(name), described(name)).encode([item.token_ids], item.encoding):
            store.put(item.key, kv)
    expected = link(plan_over(name, store.inner), described(name), torch.device("cpu")).cache
    gate = Gate()
    store.before_read = gate
    loader = Loader(store)
    plan = plan_over(name, Fetch(loader))
    cache = link(plan, described(name), torch.device("cpu")).cache
    assert cache.get_seq_length() == plan.kept
    assert cache.layers[1].get_mask_sizes(3) == (0, 0)
    gate.open()
    kept = sorted(set(range(len(plan.token_ids))) - set(plan.rows))
    for layer in (2, 0, 1):
        assert torch.equal(cache.layers[layer].keys[:, :, kept], expected.layers[layer].keys[:, :, kept])
        assert torch.equal(cache.layers[layer].values[:, :, kept], expected.layers[layer].values[:, :, kept])
    loader.close()


@pytest.mark.parametrize(
    "change", ["crop", "batch_repeat_interleave", "batch_select_indices", "reorder_cache"]
)
def test_what_is_done_to_a_cache_waits_for_it(change):
    arguments = {"crop": -3, "batch_repeat_interleave": 2}.get(change, torch.tensor([0]))
    caches = []
    for store in (HostStore(1 << 26), SlowStore()):
        with rag_for("llama", policy="reuse", store=store) as rag:
            rag.generate(PROMPT, max_new_tokens=1)
            plan = rag.plan(rag.prepare(PROMPT))
            caches.append(link(plan, described("llama"), torch.device("cpu")).cache)
            for layer in caches[-1].layers:
                layer.narrow(None)  # as after the forward
            getattr(caches[-1], change)(arguments)
    rows = slice(0, 60)  # those of the chunks; the others were never computed
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        assert torch.equal(ours.keys[:, :, rows], theirs.keys[:, :, rows])
        assert torch.equal(ours.values[:, :, rows], theirs.values[:, :, rows])


class Heard(BaseStreamer):
    def __init__(self):
        self.calls, self.ended = [], 0

    def put(self, value):
        self.calls.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def spoiled(name, layer, error, tokens=33, policy="lego:4", **options):
    """An engine whose chunk of ``tokens`` tokens cannot be read from ``layer`` on, and one without it."""
    store = KeyedStore()
    rag = slow_rag(name, policy, store, cold="never", **options)
    without = HostStore(1 << 28)
    for size, key in store.of_tokens.items():
        if size != tokens:
            without.put(key, store.inner.get(key).kv)
    alone = rag_for(name, policy=policy, store=without, cold="never")
    spoil = Spoil(layer, error, lambda key: key == store.of_tokens[tokens])
    store.before_read = spoil
    return rag, alone, spoil


@pytest.mark.parametrize(
    ("policy", "layer"),
    soaked(
        product(("lego:4", "query:0.2", "cacheblend:0.3"), range(LAYERS)),
        *(("lego:4", 1), ("query:0.2", 2), ("cacheblend:0.3", 0), ("cacheblend:0.3", 1)),
    ),
)
def test_an_entry_that_fails_in_the_middle_is_computed(policy, layer):
    error = OSError(5, "Input/output error") if layer == 1 else EntryDamaged("flipped")
    rag, alone, spoil = spoiled("llama", layer, error, policy=policy)
    answer, expected = rag.generate(PROMPT, **ASKED), alone.generate(PROMPT, **ASKED)
    assert len(spoil.spoiled) == 1
    assert answer.token_ids == expected.token_ids
    assert [use.source for use in answer.report.link.uses] == ["disk", "computed", "disk"]
    (note,) = answer.report.link.notes
    assert str(error) in note
    assert "computed" in note
    assert answer.report.link.computed_tokens == expected.report.link.computed_tokens
    rag.close()


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 3}, {"num_beams": 2}])
def test_a_streamer_sees_prompt_and_tokens_once(options):
    rag, alone, spoil = spoiled("llama", 1, EntryDamaged("flipped"))
    calls = []

    def processor(input_ids, scores):
        calls.append(input_ids[0].tolist())
        return scores

    heard, quiet = Heard(), Heard()
    streamer = {} if "num_beams" in options else {"streamer": heard}
    answer = rag.generate(PROMPT, **ASKED, **options, **streamer, logits_processor=[processor])
    ours, calls = calls, []
    streamer = {} if "num_beams" in options else {"streamer": quiet}
    expected = alone.generate(PROMPT, **ASKED, **options, **streamer, logits_processor=[processor])
    assert spoil.spoiled
    assert answer.token_ids == expected.token_ids
    assert (heard.calls, heard.ended) == (quiet.calls, quiet.ended)
    if streamer:
        assert heard.calls[0] == list(ids(PROMPT))
        assert list(chain(*heard.calls[1:])) == list(answer.token_ids)
    assert ours == calls != []
    rag.close()


def test_all_that_is_late_is_given_up_at_once():
    gate = Gate(lambda key, layer: layer == 1)
    store = KeyedStore()
    rag = slow_rag("llama", "reuse", store)
    rag.close()
    store.before_read = gate
    rag = rag_for(
        "llama", policy="reuse", store=store, load=LoadConfig("always", deadline=0.05), cold="never"
    )
    answer = rag.generate(PROMPT, **ASKED)
    assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 6)
    assert {use.source for use in answer.report.link.uses} == {"computed"}
    (note,) = answer.report.link.notes  # one second attempt, not one per entry
    assert note.startswith("3 of its entries")
    gate.open()
    rag.close()


@pytest.mark.parametrize("layer", soaked(range(LAYERS), 0, 2))
@pytest.mark.parametrize("cold", ["now", "never"])
def test_a_file_damaged_between_opening_and_reading(tmp_path, layer, cold):
    name = "llama"
    warmed(name, PROMPT, policy="lego:1000", store=(disk := DiskStore(tmp_path, 1 << 26)))
    real = disk.open

    def open_and_damage(key, weight=1.0):
        source = real(key, weight)
        if source is not None and source.tokens == 33:
            file = next(tmp_path.glob(f"*-{key.digest()}.safetensors"))
            size, per_layer = file.stat().st_size, source.nbytes // source.layers
            sums = sum(t.numel() * t.element_size() for t in source.sums.values())
            with file.open("r+b") as stream:
                stream.seek(size - sums - (LAYERS - layer) * per_layer + 5)
                byte = stream.read(1)[0]
                stream.seek(-1, 1)
                stream.write(bytes([byte ^ 0x40]))
        return source

    disk.open = open_and_damage
    rag = rag_for(name, policy="lego:1000", store=disk, cold=cold, load="always")
    answer = rag.generate(PROMPT, **ASKED)
    assert answer.token_ids == greedy(plain(name), ids(PROMPT), 6)
    assert [use.source for use in answer.report.link.uses] == ["disk", "computed", "disk"]
    assert disk.stats()[0].damaged == 1
    assert disk.stats()[0].entries == (3 if cold == "now" else 2)  # encoded again, or gone
    disk.open = real
    again = rag.generate(PROMPT, **ASKED)
    assert again.token_ids == answer.token_ids
    assert [use.source == "disk" for use in again.report.link.uses] == [True, cold == "now", True]
    rag.close()
    disk.close()


@pytest.mark.parametrize("name", soaked([n for n in FAMILIES if n != "phi3-longrope"], *ALWAYS))
def test_every_family_over_files(name, tmp_path):
    warmed(name, PROMPT, policy="lego:1000", store=(disk := DiskStore(tmp_path, 1 << 28)))
    with rag_for(name, policy="lego:1000", store=disk, load="always") as rag:
        answer = rag.generate(PROMPT, **ASKED)
    assert answer.token_ids == greedy(plain(name), ids(PROMPT), 6)
    assert {use.source for use in answer.report.link.uses} == {"disk"}
    disk.close()
