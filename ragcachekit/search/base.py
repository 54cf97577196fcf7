"""The contract of every vector index, and what a search returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import ArrayLike

DocumentId: TypeAlias = str | int
METRICS = ("cosine", "ip", "l2")


class SearchResult(NamedTuple):
    """Ids of the nearest documents, nearest first, and their distances.

    ``scores`` are distances, so smaller is nearer: ``l2`` ||q - x|| (not squared), ``cosine``
    1 - q.x / (||q|| ||x||), ``ip`` -q.x. They are computed in float64 from the stored vectors;
    equal ones are ordered by id (ints before strings).
    """

    ids: tuple[DocumentId, ...]
    scores: tuple[float, ...]


@runtime_checkable
class VectorIndex(Protocol):
    """Vectors by id. Implementations promise:

    - ``search`` returns min(k, len) distinct ids of added and not removed vectors, nearest first;
      an approximate index may miss some and return fewer, never an id it does not hold.
    - A call that raises has changed nothing.
    - All methods are thread safe: searches may run together, never beside a change.
    - What ``save`` wrote loads as the same index or raises RetrievalError, if one bit was changed.
    """

    @property
    def kind(self) -> str:
        """The name under which the registry knows this implementation."""
        ...

    @property
    def metric(self) -> str:
        """``cosine``, ``l2`` or ``ip``."""
        ...

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        ...

    def __len__(self) -> int:
        """Number of vectors."""
        ...

    def add(self, ids: Sequence[DocumentId], embeddings: ArrayLike) -> None:
        """Add vectors ``[n, dim]`` under new ids.

        Raises
        ------
        ValueError
            An id occurs twice or is held already, or ids and rows differ in number.
        RetrievalError
            NaN or infinite numbers, another width, or a zero vector under cosine.
        """
        ...

    def search(self, embedding: ArrayLike, k: int) -> SearchResult:
        """The k nearest documents.

        Raises
        ------
        ValueError, TypeError
            ``k`` is not a positive int.
        RetrievalError
            The index is empty, or the embedding cannot be used (as in :meth:`add`).
        """
        ...

    def remove(self, ids: Sequence[DocumentId]) -> int:
        """Drop the vectors of these ids, unknown ones aside; returns how many were dropped.

        Raises
        ------
        RetrievalError
            This kind of index cannot remove.
        """
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index: a manifest at ``path``, and beside it a data file named by its SHA-256."""
        ...
