"""``RagCache(encoder="average:n")`` from text to text: what is encoded when, and what serves meanwhile."""

from functools import partial
from itertools import permutations

import pytest
import torch

from families import off
from ragcachekit import Chunk, Prompt, StoreConfig, Text
from speaking import ONE, THREE, TWO, speaker

FACTS = [ONE, TWO, THREE]
BEFORE = "Answer from the context.\n\nContext:\n"
PROMPT = f"{BEFORE}{THREE}\n\n{TWO}\n\n{ONE}\n\nWhere does the river flow?"
ASKED = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def make(opened):
    return partial(opened, **{"policy": "reuse", "encoder": "average:3", "cold": "never"})


def stored(rag):
    return [key.encoding for key in list(rag.components.store.keys())]


def used(answer):
    return [(use.source, use.exact) for use in answer.report.link.chunks]


@torch.no_grad()
def test_what_is_linked_is_the_mean_over_contexts(make):
    rag = make()
    rag.encode([ONE, TWO], system=BEFORE)  # one companion each
    segments = [Text(BEFORE), Chunk(ONE), Text("\n\n"), Chunk(TWO), Text("\nWhere?")]
    linked = rag.link(Prompt(segments))
    assert linked.report.approximate_tokens > 0
    prompts = rag.components.parser
    before, joint = prompts.system_ids(BEFORE), prompts.tokens.text("\n\n", first=False)
    one, two = prompts.chunk_ids(ONE), prompts.chunk_ids(TWO)
    first, start = len(before), len(before) + len(one) + len(joint)
    behind, alone = values_of((*before, *one, *joint, *two)), values_of((*before, *two))
    for ours, after_one, after_none in zip(linked.cache.layers, behind, alone, strict=True):
        mean = (after_one[:, start:] + after_none[:, first:]) / 2
        assert off(ours.values[0, :, start : start + len(two)], mean) < 1e-5
        assert off(ours.values[0, :, : start - len(joint)], after_one[:, : start - len(joint)]) < 1e-5, (
            "exact"
        )


@torch.no_grad()
def values_of(ids):
    cache = speaker()(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    return [layer.values[0] for layer in cache.layers]


def test_what_a_prompt_computes_serves_the_next_ones(make):
    rag = make(cold="background", encode_after=2)
    rag.register(FACTS)
    first = rag.generate(PROMPT, **ASKED)
    assert {source for source, _ in used(first)} == {"computed"}
    rag.flush()
    assert rag.encoding_stats().encoded_tokens == 0, "its rows were kept"
    held = kv_of(rag, TWO)
    theirs = values_of(ids_of(rag, BEFORE, THREE, TWO))
    for ours, layer in zip(held.values, theirs, strict=True):
        assert off(ours, layer[:, -held.tokens :]) < 1e-5
    second = rag.generate(PROMPT, **ASKED)
    assert used(second) == [("host", True), ("host", False), ("host", False)]
    assert second.token_ids == first.token_ids, "the same prompt again: what it computed is right for it"
    for _ in range(2):
        rag.flush()
        assert rag.encoding_stats().encoded_tokens == 0, "means cost no forward"
        assert used(rag.generate(PROMPT, **ASKED)) == used(second)
    assert stored(rag).count("average:3") == 2
    assert stored(rag).count("system") == 1, "the first chunk, which is exact"


def test_what_is_encoded_ahead_is_neither_computed_nor_encoded_again(make):
    rag, facts = make(cold="now", encoder="average:2"), [*FACTS, f"{TWO} {ONE}"]
    rag.encode(facts, system=BEFORE)
    before = rag.encoding_stats().encoded_tokens
    for order in permutations(facts):
        uses = rag.generate(f"{BEFORE}{chr(10).join(order)}\n\nWhere?", **ASKED).report.link.chunks
        assert [use.source for use in uses] == ["host"] * 4
        assert [use.contexts for use in uses[1:]] == [2] * 3
    rag.encode(facts, system=BEFORE)
    assert rag.encoding_stats().encoded_tokens == before


def kv_of(rag, text):
    """What the prompt would find for a chunk that is not its first."""
    name = names(rag, text)[0].key.chunk_id
    (key,) = [k for k in list(rag.components.store.keys()) if (k.chunk_id, k.encoding) == (name, "average:3")]
    return rag.components.store.get(key).kv


def names(rag, text):
    return rag.components.planner.missing([text], "default", rag.components.policy, BEFORE)


def ids_of(rag, before, *chunks):
    prompts = rag.components.parser
    joint = prompts.tokens.text("\n\n", first=False)
    parts = [(*prompts.chunk_ids(chunk), *joint) for chunk in chunks]
    whole = (*prompts.system_ids(before), *(i for part in parts for i in part))
    return whole[: len(whole) - len(joint)]


def test_after_a_restart_the_means_on_disk_serve_whatever_comes_together_then(make, tmp_path):
    store = StoreConfig(host_bytes=0, disk_path=tmp_path / "kv")
    with make(store=store, load="always") as rag:
        rag.encode(FACTS, system=BEFORE)
        before = rag.generate(PROMPT, **ASKED)
    again = make(store=store, load="always")
    again.register([TWO])
    again.register([ONE])
    again.register([THREE])
    answer = again.generate(PROMPT, **ASKED)
    assert used(answer) == [("disk", True), ("disk", False), ("disk", False)]
    assert answer.token_ids == before.token_ids
    assert answer.report.link.recomputed_tokens == before.report.link.recomputed_tokens


def test_a_forgotten_chunk_is_behind_no_other_again(make):
    rag = make(cold="now")
    rag.encode(FACTS, system=BEFORE)
    (gone,) = rag.encode([TWO], system=BEFORE)
    rag.forget(texts=[TWO])
    for _ in range(3):
        rag.generate(f"{BEFORE}{THREE}\n\n{ONE}\n\nWhere does the river flow?", **ASKED)
    keys = list(rag.components.store.keys())
    assert "average:3" in [key.encoding for key in keys], "behind the one that is left"
    assert not any(gone in (key.chunk_id, *key.context) for key in keys)
