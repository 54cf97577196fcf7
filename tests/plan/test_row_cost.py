"""What the planner is told of a policy: rows spared, rows recomputed, and the pass before the forward."""

from __future__ import annotations

import pytest

from engine_kit import PROMPT, rag_for, warmed
from loading_kit import SlowStore
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.row_cost import RowCost, row_cost_of, scoring_pass_of
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy

LAYERS = 4
OPEN, EXACT = PlacedChunk("open", 7, 40, False), PlacedChunk("exact", 0, 40, True)


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        ("reuse", 0),
        ("lego:16", 16),
        ("lego:99", 40),
        ("query:0.15", 6),
        ("deep:0.5", 20),
        ("cacheblend:0.2", 0),
    ],
)
def test_rows_spared_and_recomputed(policy, recomputed):
    policy = open_policy(policy)
    assert row_cost_of(policy, OPEN, LAYERS) == RowCost(40 - recomputed, recomputed)
    assert row_cost_of(policy, EXACT, LAYERS) == RowCost(40, is_exact=True)


def test_only_policies_that_watch_the_question_need_a_pass():
    assert scoring_pass_of(open_policy("lego:4"), 10, [OPEN]) is None
    assert scoring_pass_of(open_policy("cacheblend:0.2"), 10, [OPEN]) is None
    query, deep = (
        scoring_pass_of(open_policy(name), 10, known)
        for name, known in (("query:0.2", ()), ("deep:0.2", [OPEN]))
    )
    assert (query.rows, query.always, query.layers(LAYERS)) == (10, False, LAYERS)
    assert (deep.rows, deep.always, deep.layers(LAYERS)) == (10, True, LAYERS)
    assert not scoring_pass_of(open_policy("query:0.2"), 10, [EXACT]).always


@pytest.mark.parametrize("policy", ["query:0.2", "deep:0.4", "lego:4"])
@pytest.mark.parametrize("there", ["disk", "half in memory"])
def test_what_the_planner_expects_is_what_runs(policy, there):
    """The oracle is how many rows reach the model, pass by pass."""
    store = SlowStore()
    warmed("llama", PROMPT, policy=policy, store=store)
    rag = rag_for("llama", policy=policy, store=store, load="auto", cold="never")
    if there != "disk":
        keep_in_memory(store, 25)
    planner, told, ran = rag.components.loads.planner, [], []
    for _ in range(10):
        planner.observe_read("disk", 1000, 1e-9)
    planner.profile = PrefillProfile([0, 512], [1, 512], [[1.0, 512.0]] * 2)
    choose = planner.choose

    def listen(candidates, total, computed, guide=None):
        told.append((candidates, total, computed, guide))
        return choose(candidates, total, computed, guide)

    planner.choose = listen
    hook = rag.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: ran.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        link = rag.generate(PROMPT, max_new_tokens=1, do_sample=False).report.link
    finally:
        hook.remove()
    ((candidates, total, computed, guide),) = told
    forward = computed + sum(candidate.recomputed for candidate in candidates)
    assert total == link.prompt_tokens
    assert len(candidates) == (3 if there == "disk" else 2)
    if guide is None:
        assert ran == [forward]
    else:
        assert ran[0] == guide.rows
        # Each chunk's share is rounded up by itself, what is chosen from all of them only once.
        assert ran[1] <= forward <= ran[1] + 3
        assert guide.always is (there != "disk")
    rag.close()


def keep_in_memory(store, tokens):
    """Have the entries of so many tokens come from memory."""
    opened = store.open

    def open(key, weight=1.0):
        found = store.inner.get(key, weight)
        return found if found is not None and found.kv.tokens == tokens else opened(key, weight)

    store.open = open
