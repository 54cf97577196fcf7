"""The prefill of a model whose chunks cannot be linked: it goes on from a snapshot, and makes new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.snapshots import PAST, run
from ragcachekit.plan.prefix_match import PrefixMatch


class Continued(NamedTuple):
    """A cache of the first ``known`` tokens of a prompt, and copies for the tree, in the order of its steps.

    ``argument`` is the name under which the model takes the cache.
    """

    cache: Any
    argument: str
    known: int
    snapshots: tuple[ChunkKV, ...]


def continue_snapshot(
    model: Any, match: PrefixMatch, ids: Tensor, *, ahead: bool = False
) -> Continued | None:
    """Go on after the snapshot that was found, to the last step of the prompt ``ids`` ``[1, tokens]``.

    One forward per part that ends in a state, which is copied: the copies are all that it costs. ``ahead``
    runs all tokens but the last. Models without state stop where the snapshot ends: their rows are copied
    after the answer. None if no cache is needed. Raises Cancelled before a layer or a part.
    """
    layout, known, taken = match.snapshots, match.match.tokens, list[ChunkKV]()
    assert layout is not None
    found, argument = [reused.kv for reused in match.match.found], layout.argument
    cache = layout.restored(found) if found or not layout.has_state else None
    parts = list(_parts(match)) if layout.has_state else []
    if ahead or argument != PAST:
        parts.append(([], ids.shape[1] - 1))
    for steps, stop in parts:
        raise_if_cancelled()
        if stop > known:
            ran = run(model, ids[:, :stop], known, argument if cache is not None else "", cache)
            cache, known = ran.cache, stop
        if steps:
            taken += layout.captured(cache, steps, stop, state=True)
    return None if cache is None else Continued(cache, argument, known, tuple(taken))


def _parts(match: PrefixMatch) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """The steps after a match, cut where a state is copied, each with the tokens up to its end.

    After the first text, every chunk and the last step, and where an earlier prompt began to differ.
    """
    path, stop, steps = match.match.path, match.match.tokens, list[tuple[int, int]]()
    for number, step in enumerate(path[len(match.match) :], len(match.match) + 1):
        start, stop = stop, stop + step.tokens
        steps.append((start, stop))
        ends = number == len(path) or path[number].document
        # At least two tokens: some models compute a single one by other code, with other rounding.
        if (step.document or ends or stop == match.shared) and stop - steps[0][0] > 1:
            yield steps, stop
            steps = []
