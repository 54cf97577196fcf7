"""What an approximate link computes, against an oracle that steps row by row over plain transformers.

Kept columns come from running the chunk alone at its new positions (for ``sinks`` and ``system``
behind its context, shifted with it: rotations compose), never from our encoder.
"""

import pytest

from families import ALWAYS, FAMILIES, columns, off, oracle, prefill, stepwise, tokens
from link_kit import BOS, ids_of, linked, planned, segments
from soak_kit import soaked

TOLERANCE = 3e-5
SYSTEM, FIRST, SECOND, MIDDLE, QUESTION = (tokens(n, 10 + n) for n in (11, 33, 40, 3, 6))
PARTS = segments(("text", SYSTEM), ("chunk", FIRST), ("text", MIDDLE), ("chunk", SECOND), ("text", QUESTION))
IDS = ids_of(PARTS)
AT_FIRST, AT_SECOND = len(SYSTEM), len(SYSTEM) + len(FIRST) + len(MIDDLE)


def kept_columns(model, policy, encoder):
    """Exact prefix, and both chunks as encoded, without the rows that ``policy`` recomputes."""
    behind = {"standalone": (), "sinks:4": (BOS,) * 4, "system": SYSTEM}[encoder]
    kept = columns(prefill(model, SYSTEM), range(len(SYSTEM)), 0)
    for at, chunk in ((AT_FIRST, FIRST), (AT_SECOND, SECOND)):
        start = at - len(behind)
        run = prefill(model, behind + chunk, range(start, at + len(chunk)))
        kept |= columns(run, range(len(behind), len(behind) + len(chunk)), at)
    if policy.startswith("lego:"):
        count = int(policy.removeprefix("lego:"))
        chunks = [AT_SECOND] if encoder == "system" else [AT_FIRST, AT_SECOND]
        for at in chunks:
            for position in range(at, at + count):
                del kept[position]
    return kept


WAYS = [("lego:5", "standalone"), ("lego0", "sinks:4"), ("lego:5", "system")]
"""For every family, in `make soak`; that all rows of a chunk are kept depends on none."""


@pytest.mark.parametrize(
    ("name", "policy", "encoder"),
    soaked(
        [(name, *way) for name in FAMILIES for way in WAYS],
        *((name, *WAYS[number % 3]) for number, name in enumerate(ALWAYS)),
        *(("gemma3", *way) for way in WAYS),
    )
    + [(name, "reuse", by) for name in ("llama", "gemma3", "gpt-oss") for by in ("standalone", "system")],
)
def test_linked_forward_is_the_row_by_row_computation(name, policy, encoder):
    model = oracle(name, len(IDS))
    want = stepwise(model, IDS, kept_columns(model, policy, encoder))
    plan = planned(name, PARTS, policy, encoder=encoder)
    ours = linked(name, plan)
    rows = list(plan.rows)
    assert not want.logits[rows].isnan().any()
    assert want.logits.isnan().any(-1).sum() == plan.kept, "both keep the same rows"
    assert off(ours.logits[rows], want.logits[rows]) <= TOLERANCE
    for index in range(3):
        assert off(ours.keys[index], want.keys[index]) <= TOLERANCE, index
        assert off(ours.values[index], want.values[index]) <= TOLERANCE, index


@pytest.mark.parametrize("name", FAMILIES)
def test_reuse_is_an_approximation_and_not_the_ordinary_prefill(name):
    """Else the tests above would pass with nothing linked at all."""
    ordinary = prefill(oracle(name, len(IDS)), IDS)
    ours = linked(name, planned(name, PARTS, "reuse"))
    assert off(ours.values[2], ordinary.values[2]) > 1e-3
