"""Cache-Craft's baseline ``set`` (section 5): what began a past prompt, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ragcachekit.policies.base import PlacedChunk, Variants, WantedChunk, open_positions
from ragcachekit.types import KVKey


@dataclass(frozen=True)
class SetMatch:
    """Takes the most chunks from the prompt's start on that were, in any order, the first of one prompt.

    Their ``in-prompt`` KV is used as it is, permuted to the present order; everything behind them is
    recomputed. The texts between must match too, and what stands at the very start must stand there.
    """

    encoder: str | None = "in-prompt"
    reads_cache = True
    name = "set"

    def choose_variants(self, wanted: Sequence[WantedChunk], pool: Variants) -> Mapping[int, KVKey]:
        """For the chunks of the longest match (indices into ``wanted``), their entries of that prompt."""
        for count in range(len(wanted), 1, -1):
            last = wanted[count - 1]
            now = (*last.before, last.key.chunk_id)
            for path in sorted(pool.paths(last.key, len(now)), key=lambda path: path != now):
                if path[0] == now[0] and Counter(path) == Counter(now):
                    keys = _along(path, wanted[:count])
                    if all(key == wanted[i].key or key in pool for i, key in keys.items()):
                        return keys
        return {}

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """All that is not part of the match."""
        return open_positions(chunks[matched(chunks) :])


def matched(chunks: Sequence[PlacedChunk]) -> int:
    """How many of the first cached stretches are entries of one past prompt's beginning."""
    for count in range(len(chunks), 1, -1):
        first = chunks[:count]
        deepest = max(first, key=lambda chunk: len(chunk.behind))
        path = (*deepest.behind, deepest.chunk_id)
        now = (*chunks[count - 1].before, chunks[count - 1].chunk_id)
        places = {len(chunk.behind) for chunk in first}
        along = all((*c.behind, c.chunk_id) == path[: len(c.behind) + 1] for c in first)
        if along and len(places) == count and path[0] == now[0] and Counter(path) == Counter(now):
            return count
    return 0


def _along(path: tuple[str, ...], wanted: Sequence[WantedChunk]) -> dict[int, KVKey]:
    """Each wanted chunk's entry behind what stood before it on ``path``."""
    places: dict[str, list[int]] = {}
    for place, id in enumerate(path):
        places.setdefault(id, []).append(place)
    out = {}
    for number, want in enumerate(wanted):
        place = places[want.key.chunk_id].pop(0)
        # What stands at the start stays there, whatever it is encoded as.
        out[number] = replace(want.key, context=path[:place]) if place else want.key
    return out
