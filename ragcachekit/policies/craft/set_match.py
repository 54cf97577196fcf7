"""Cache-Craft's baseline ``set`` (section 5): the first chunks of a past prompt, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ragcachekit.policies.base import PlacedChunk, Variants, WantedChunk, open_positions
from ragcachekit.types import KVKey


@dataclass(frozen=True)
class SetMatch:
    """Reuses the longest beginning whose segments, in any order, began one past prompt.

    Their ``in-prompt`` KV is permuted to the present order; all that follows is recomputed. The first segment
    must be the same.
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
        """All chunks after the match."""
        return open_positions(chunks[matched(chunks) :])


def matched(chunks: Sequence[PlacedChunk]) -> int:
    """Number of first cached chunks that are entries of one past prompt's beginning."""
    for count in range(len(chunks), 1, -1):
        first = chunks[:count]
        deepest = max(first, key=lambda chunk: len(chunk.context))
        path = (*deepest.context, deepest.chunk_id)
        now = (*chunks[count - 1].before, chunks[count - 1].chunk_id)
        places = {len(chunk.context) for chunk in first}
        along = all((*c.context, c.chunk_id) == path[: len(c.context) + 1] for c in first)
        if along and len(places) == count and path[0] == now[0] and Counter(path) == Counter(now):
            return count
    return 0


def _along(path: tuple[str, ...], wanted: Sequence[WantedChunk]) -> dict[int, KVKey]:
    """Each wanted chunk's entry in its context on ``path``."""
    places: dict[str, list[int]] = {}
    for place, id in enumerate(path):
        places.setdefault(id, []).append(place)
    out = {}
    for number, want in enumerate(wanted):
        place = places[want.key.chunk_id].pop(0)
        # The first segment stays first, whatever its encoding.
        out[number] = replace(want.key, context=path[:place]) if place else want.key
    return out
