"""Take the exact beginning of a prompt out of the cache that computed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.prefix_tree.conversations import Turn


def exact_rows(plan: LinkPlan) -> int:
    """How many rows from the start are what an ordinary prefill of the same tokens computes.

    Those that were computed behind exact rows alone, and exact pieces whose keys nobody turned back and
    forth. A cached row that a policy recomputes is computed like any other, unless the policy's rows get
    fewer from layer to layer.
    """
    computed = set(plan.rows)
    layerwise = plan.request is not None and isinstance(plan.request.policy, LayerwisePolicy)
    for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
        if chunk.is_exact and piece.kv.start is not None and not piece.kv.quantised:
            continue
        for row in range(piece.start, piece.stop):
            if layerwise or row not in computed:
                return row
    return len(plan.token_ids)


def captured(plan: LinkPlan, cache: Any, item: int, offset: int, rope: Rope) -> list[ChunkKV]:
    """KV of the steps behind what the tree had, as far as it is exact; copies.

    ``plan`` is as it ran and ``cache`` as generate left it: one that the model did not fill (Phi-3 drops it
    where its frequencies change) gives nothing. ``item`` and ``offset`` are the prompt's place in the batch
    and the column of its first row.
    """
    if plan.beginning is None or _between_frequencies(len(plan.token_ids), rope):
        return []
    match = plan.beginning.match
    last, start = exact_rows(plan), match.tokens
    stretches: list[Stretch] = []
    for step in match.path[len(match) :]:
        stop = start + step.tokens
        if stop > last or not _holds(cache, offset + stop):
            break
        stretches.append(Stretch(item, offset + start, offset + stop))
        start = stop
    if not stretches:
        return []
    sides = extract(cache.layers, stretches, host=False)
    return [ChunkKV(*kv, at.start - offset) for kv, at in zip(sides, stretches, strict=True)]


def turn_of(
    plan: LinkPlan, answer: Sequence[int], cache: Any, item: int, offset: int, rope: Rope, most: int
) -> Turn | None:
    """The prompt with its answer as the next turn may reuse it, a copy in host memory; None if there is none.

    ``answer`` are the generated ids, the last of which no forward has seen. ``most`` are the bytes that it
    may take. What follows an approximate row is approximate.
    """
    beginning = plan.beginning
    rows = (*plan.token_ids, *answer[:-1])
    if beginning is None or rope.depends_on_length or not _holds(cache, offset + len(rows)):
        return None
    sides = [side[item, :, : len(rows)] for layer in cache.layers for side in (layer.keys, layer.values)]
    if sum(t.numel() * t.element_size() for t in sides) > most:
        return None
    exact = exact_rows(plan)
    traces = (id for chunk in plan.placed for id in chunk.context)
    (copied,) = extract(cache.layers, [Stretch(item, offset, offset + len(rows))], locked=False)
    return Turn(
        beginning.match.root,
        rows,
        ChunkKV(*copied, 0),
        len(rows) if exact == len(plan.token_ids) else exact,
        beginning.members.union(traces),
    )


def _between_frequencies(tokens: int, rope: Rope) -> bool:
    """Whether a prefill without the prompt's last token turns its keys by other frequencies."""
    return rope.depends_on_length and rope.regime(tokens) != rope.regime(tokens - 1)


def _holds(cache: Any, columns: int) -> bool:
    layers = getattr(cache, "layers", None) or ()
    return len(layers) > 0 and all(
        getattr(layer, "keys", None) is not None and layer.keys.shape[-2] >= columns for layer in layers
    )
