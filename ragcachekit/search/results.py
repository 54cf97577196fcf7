"""Results of a search, and the distances that decide them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ragcachekit.search.checks import DocumentId, Float32

SPARE = 8  # candidates beyond k, so that float32 rounding does not decide who is among the k


class SearchResult(NamedTuple):
    """Ids of the nearest documents, nearest first, and their distances.

    ``scores`` are ``l2`` ||q - x|| (not squared), ``cosine`` 1 - q.x / (||q|| ||x||) or ``ip`` -q.x, in
    float64. Equal ones are ordered by id (ints before strings).
    """

    ids: tuple[DocumentId, ...]
    scores: tuple[float, ...]


def ordered(ids: tuple[DocumentId, ...], scores: tuple[float, ...], wanted: int) -> SearchResult:
    """The first ``wanted`` by distance and id."""
    order = sorted(range(len(ids)), key=lambda i: (scores[i], isinstance(ids[i], str), ids[i]))[:wanted]
    return SearchResult(tuple(ids[i] for i in order), tuple(scores[i] for i in order))


def distances(query: Float32, rows: Float32, metric: str) -> list[float]:
    """Distances of ``rows`` ``[n, dim]`` to ``query`` ``[dim]``, in float64; unit rows for cosine."""
    wide, keys = query.astype(np.float64), rows.astype(np.float64)
    if metric == "l2":
        gaps = keys - wide
        found = np.sqrt(np.einsum("ij,ij->i", gaps, gaps))
    else:
        found = (0.0 if metric == "ip" else 1.0) - np.einsum("ij,j->i", keys, wide)
    return list(found.tolist())


def rounding(query: Float32, rows: Float32, metric: str) -> float:
    """By how much two float32 distances to ``rows`` may be wrong together, however they are summed."""
    vectors = rows - query if metric == "l2" else rows
    factor = 1.0 if metric == "l2" else float(np.linalg.norm(query))
    lengths = np.linalg.norm(vectors, axis=1)
    return (len(query) + SPARE) * 2.0**-23 * factor * float(lengths.max())
