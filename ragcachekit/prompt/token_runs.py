"""The token runs of chunks inside a prompt that was tokenised as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragcachekit.types import Ids

Span = tuple[int, int]

MAX_SHIFT = 8
"""Tokens by which a boundary may shift the rest of a chunk: ``"\\n\\n" + "The"`` or ``" The"``, ..."""

ANCHOR = 8
"""Tokens of a chunk's middle that are searched for where the tokenizer gives no offsets."""


class Run(NamedTuple):
    """Prompt tokens ``start`` to ``stop`` equal the chunk's own tokens from number ``first`` on."""

    start: int
    stop: int
    first: int


def find_runs(
    ids: Ids, offsets: Sequence[Span] | None, spans: Sequence[Span], own: Sequence[Ids]
) -> list[Run | None]:
    """For each chunk, the longest run of prompt tokens that equals tokens of its own, in order.

    A token that spans a chunk's boundary (``".\\n\\n"``, a leading space) is in no run. None where less than
    half of a chunk's tokens are found: they are computed.

    Parameters
    ----------
    ids : tuple of int
        The whole prompt.
    offsets : sequence of (start, end), optional
        Characters of each token. Without (slow tokenizers), the chunk's middle is searched for.
    spans : sequence of (start, end)
        Characters of each chunk, ascending and apart.
    own : sequence of tuple of int
        Each chunk's own tokens.
    """
    runs: list[Run | None] = []
    # Special tokens that the tokenizer adds have (0, 0), also at the end: offsets must not go back.
    edges = np.maximum.accumulate(np.asarray(offsets or [], np.int64).reshape(-1, 2), axis=0)
    end = 0
    for span, chunk in zip(spans, own, strict=True):
        if offsets is None:
            at, stop = _around_middle(ids, chunk, end)
        else:  # tokens with a character in the chunk
            at = int(np.searchsorted(edges[:, 1], span[0], "right"))
            stop = int(np.searchsorted(edges[:, 0], span[1], "left"))
        at = max(at, end)
        found = _longest_equal(ids[at:stop], chunk) if at < stop and chunk else None
        if found is None or 2 * (found.stop - found.start) < len(chunk):
            runs.append(None)
            continue
        end = at + found.stop
        runs.append(Run(at + found.start, end, found.first))
    return runs


def _around_middle(ids: Ids, chunk: Ids, after: int) -> Span:
    """Tokens around the next place that has the chunk's middle; empty if there is none."""
    middle = max(0, (len(chunk) - ANCHOR) // 2)
    anchor = chunk[middle : middle + ANCHOR]
    for at in range(after, len(ids) - len(anchor) + 1):
        if ids[at] == anchor[0] and ids[at : at + len(anchor)] == anchor:
            return max(after, at - middle - MAX_SHIFT), at - middle + len(chunk) + MAX_SHIFT
    return after, after


def _longest_equal(found: Ids, own: Ids) -> Run | None:
    """The longest run of ``found`` that equals a run of ``own``, shifted by at most :data:`MAX_SHIFT`."""
    if found == own:
        return Run(0, len(own), 0)
    best: Run | None = None
    prompt, chunk = np.asarray(found), np.asarray(own)
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        # found[i] is compared with own[i + shift].
        low, high = max(0, -shift), min(len(prompt), len(chunk) - shift)
        if high - low <= (best.stop - best.start if best else 0):
            continue
        start, stop = _longest_true(prompt[low:high] == chunk[low + shift : high + shift])
        if stop - start > (best.stop - best.start if best else 0):
            best = Run(low + start, low + stop, low + start + shift)
    return best


def _longest_true(equal: npt.NDArray[np.bool_]) -> Span:
    """The longest stretch of True."""
    breaks = np.flatnonzero(~equal)
    starts = np.concatenate(([0], breaks + 1))
    stops = np.concatenate((breaks, [equal.size]))
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])
