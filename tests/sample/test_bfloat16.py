"""The invariants of reuse in bfloat16 on the CPU, against the model's own forwards in bfloat16 and float32.

The tolerance is derived from the model: two bfloat16 computations of one quantity that each lie E from its
value lie 2 E apart at most. E is measured: the model's own bfloat16 forward against the same weights in
float32.
"""

import copy

import pytest
import torch
from test_exactness import last_logits, own, prompt_of
from texts import DOCUMENTS, QUESTIONS, SYSTEM

from ragcachekit import Chunk, Prompt, RagCache, StoreConfig, Text

ASKED = {"max_new_tokens": 1, "do_sample": False}
EPSILON = 2**-8  # greatest relative error of one rounding to bfloat16
ROUNDINGS = 9  # per layer on the way of a row: two norms, values, attention, two products, the MLP, two sums


@pytest.fixture(scope="module", params=[3, pytest.param(30, marks=pytest.mark.soak)], ids="{} layers".format)
def make(request, folder, tmp_path_factory):
    """Engines around one bfloat16 model, loaded as users load it; admission is checked at the first."""
    made, cache = [], tmp_path_factory.mktemp("bfloat16")
    layers = {"num_hidden_layers": request.param}

    def new(**options):
        if not made:
            engine = RagCache.from_pretrained(
                folder, device="cpu", dtype=torch.bfloat16, cache_dir=cache, cold="now", **layers, **options
            )
        else:
            first = made[0]
            engine = RagCache(first.model, first.tokenizer, cache_dir=cache, cold="now", **options)
        made.append(engine)
        return engine

    yield new
    for rag in made:
        rag.close()


@pytest.fixture(scope="module")
def wide(make):
    """The same weights in float32, which no engine has touched."""
    from ragcachekit.forward.attention import uninstall

    model = copy.deepcopy(make().model).float()
    uninstall(model)
    return model


def apart(ours, theirs):
    return float((ours.float() - theirs.float()).abs().max())


def rounding(model, wide, ids):
    """The last row's logits and their E, which is what independent roundings add up to, and no more."""
    theirs, value = own(model, ids)[0][-1], own(wide, ids)[0][-1]
    error = apart(theirs, value)
    assert (
        0 < error <= EPSILON * (ROUNDINGS * model.config.num_hidden_layers) ** 0.5 * float(value.abs().max())
    )
    return theirs, error


@pytest.mark.parametrize("question", QUESTIONS[:2])
@pytest.mark.soak
@pytest.mark.parametrize("encoder", ["standalone", "system"])
def test_everything_recomputed_is_an_ordinary_prefill(make, wide, question, encoder):
    rag = make(policy="lego:100000", encoder=encoder)
    rag.encode(list(DOCUMENTS), system=SYSTEM)
    linked = rag.link(prompt_of((2, 0, 1), question))
    assert linked.report.approximate_tokens == 0
    theirs, error = rounding(rag.model, wide, linked.input_ids)
    assert apart(last_logits(rag.model, linked), theirs) <= 2 * error


@pytest.mark.soak
def test_a_chunk_behind_its_encoding_context_needs_nothing_recomputed(make, wide):
    """Whether its rows are kept as the request computed them, or encoded."""
    for encodes_first in (True, False):
        rag = make(policy="reuse", encoder="system")
        prompt = prompt_of((0,), QUESTIONS[0])
        if encodes_first:
            rag.encode([DOCUMENTS[0]], system=SYSTEM)
        rag.generate(prompt, **ASKED)
        assert (rag.encoding_stats().encoded_tokens > 0) is encodes_first
        linked = rag.link(prompt)
        assert linked.report.exact_tokens == linked.report.reused_tokens > rag.count_tokens(DOCUMENTS[0])
        theirs, error = rounding(rag.model, wide, linked.input_ids)
        assert apart(last_logits(rag.model, linked), theirs) <= 2 * error


@pytest.mark.soak
@pytest.mark.parametrize("ahead", [1, 57, 900])
def test_a_linked_chunk_is_the_chunk_run_at_those_positions(make, wide, ahead):
    rag = make(policy="reuse")
    rag.encode([DOCUMENTS[1]])
    filler = tuple(rag.tokenizer("the sea ").input_ids * ahead)[:ahead]
    linked = rag.link(Prompt([Text(token_ids=filler), Chunk(DOCUMENTS[1]), Text(f"\n\n{QUESTIONS[1]}")]))
    stop = ahead + len(rag.tokenizer(DOCUMENTS[1]).input_ids)
    ids, positions = linked.input_ids[:, ahead:stop], torch.arange(ahead, stop)
    layers = (cache.layers for cache in (own(rag.model, ids, positions)[1], own(wide, ids, positions)[1]))
    for ours, theirs, value in zip(linked.cache.layers, *layers, strict=True):
        for side in ("keys", "values"):
            kept = getattr(ours, side)[0, :, ahead:stop]
            error = apart(getattr(theirs, side)[0], getattr(value, side)[0])
            assert apart(kept, getattr(theirs, side)[0]) <= 2 * error + 2 * EPSILON * float(
                getattr(value, side).abs().max()
            ), "keys are rounded twice more: without rotation, and rotated to their place"


def test_stores_keep_two_bytes_per_number(make, tmp_path):
    rag = make(policy="reuse", store=StoreConfig(host_bytes=0, disk_path=tmp_path))
    rag.encode([DOCUMENTS[2]])
    settings = rag.model.config
    width = settings.hidden_size // settings.num_attention_heads * settings.num_key_value_heads
    kv = rag.count_tokens(DOCUMENTS[2]) * settings.num_hidden_layers * 2 * width * 2
    (key,) = rag.components.store.keys()
    found = rag.components.store.get(key)
    assert {t.dtype for t in (*found.kv.keys, *found.kv.values)} == {torch.bfloat16}
    (stats,) = rag.stats()
    assert kv <= stats.nbytes <= 1.1 * kv


def divergence(full, other):
    """KL of the first token's distribution, in nats."""
    full, other = full.float().log_softmax(0), other.float().log_softmax(0)
    return float((full.exp() * (full - other)).sum())


@pytest.mark.soak
@pytest.mark.parametrize("make", [30], indirect=True, ids=["whole"])
def test_impact_recomputes_a_tenth_and_comes_nearer_to_full(make, wide):
    rag = make(policy="impact:0.1", encoder="system")
    sums = {"impact:0.1": 0.0, "reuse": 0.0}
    for question in QUESTIONS:
        prompt = prompt_of((2, 0, 1), question)
        rag.generate(prompt, **ASKED)
        report = rag.generate(prompt, **ASKED).report.link
        recomputed, kept = report.recomputed_tokens, report.approximate_tokens
        assert recomputed == pytest.approx(0.1 * (recomputed + kept), abs=1)
        full = own(wide, rag.link(prompt).input_ids)[0][-1]
        for policy in sums:
            linked = rag.link(prompt, policy=policy)
            sums[policy] += divergence(full, last_logits(rag.model, linked))
    assert 0 < sums["impact:0.1"] < 0.75 * sums["reuse"]
