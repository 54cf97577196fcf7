"""Sources of neighbours for ``similar:n`` and ``average:n``: an index, a document, or a log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_DECIMALS = 6  # of similarities: rounding of a matrix product must not reorder equal texts


@runtime_checkable
class Neighbours(Protocol):
    """Chunks that are likely to be retrieved along with a chunk. Implementations promise:

    - ``of`` is thread safe and fast: it is called for every chunk of every prompt;
    - neighbours and their order stay the same until chunks are to be encoded anew. They are part of the KV
      key: other neighbours are a miss, never a wrong answer.
    """

    def of(self, text: str) -> Sequence[str]:
        """Texts of the chunks most similar to ``text``, most similar first; empty for an unknown text.

        ``text`` itself may be among them. The caller drops it and takes as many as it needs.
        """
        ...


class SimilarChunks:
    """The most similar chunks by cosine of their embeddings (FusionRAG section 3.1), by brute force.

    Parameters
    ----------
    texts : iterable of str
        The corpus. A text that occurs twice is one chunk; outer whitespace does not count.
    embeddings : array_like or callable
        ``[texts, dimensions]``, one row per text (a row of zeros is similar to nothing); or a function
        from the list of texts to it, such as ``embed_documents`` of LangChain embeddings.
    most : int
        Maximal number of neighbours of a chunk.

    Raises
    ------
    ValueError
        If there is not one finite row per text.
    """

    def __init__(
        self, texts: Iterable[str], embeddings: Any | Callable[[list[str]], Any], *, most: int = 50
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        given = checked_texts(texts)
        rows = np.asarray(embeddings(given) if callable(embeddings) else embeddings, dtype=np.float32)
        rows = rows if given else rows.reshape(0, 1)
        if rows.ndim != 2 or len(rows) != len(given):
            raise ValueError(f"embeddings must be one row per text ({len(given)}), got shape {rows.shape}")
        if not np.isfinite(rows).all():
            raise ValueError("embeddings must be finite; a row has NaN or infinity")
        first: dict[str, int] = {}
        for row, text in enumerate(given):
            first.setdefault(text.strip(), row)
        kept = list(first.values())
        self._texts = [given[row] for row in kept]
        self._unit = _unit(rows[kept])
        self._at = {text: index for index, text in enumerate(first)}
        self._most = most
        self._found: dict[int, tuple[str, ...]] = {}

    def of(self, text: str) -> Sequence[str]:
        """The most similar chunks first; equal similarities in the order of the corpus."""
        at = self._at.get(text.strip())
        if at is None:
            return ()
        if at not in self._found:
            self._found[at] = self._search(at)
        return self._found[at]

    def _search(self, at: int) -> tuple[str, ...]:
        if not self._unit[at].any():
            return ()
        scores = np.round(self._unit @ self._unit[at], _DECIMALS)
        scores[~self._unit.any(axis=1)] = -np.inf
        scores[at] = -np.inf
        order = np.argsort(-scores, kind="stable")[: self._most]
        return tuple(self._texts[int(index)] for index in order if scores[index] > -np.inf)


class PrecedingChunks:
    """The chunks before a chunk in its own document, nearest first.

    The graph of FusionRAG section 3.1 (discussion) with one kind of edge, for chunks that refer to a name
    in an earlier chunk.

    ``documents`` are each document's chunks in order. Of a repeated text the first place counts.
    """

    def __init__(self, documents: Iterable[Sequence[str]]) -> None:
        self._documents: list[list[str]] = []
        self._at: dict[str, tuple[int, int]] = {}
        for number, document in enumerate(documents):
            chunks = checked_texts(document)
            self._documents.append(chunks)
            for place, text in enumerate(chunks):
                self._at.setdefault(text.strip(), (number, place))

    def of(self, text: str) -> Sequence[str]:
        """The chunks before it, nearest first."""
        number, place = self._at.get(text.strip(), (0, 0))
        return self._documents[number][:place][::-1] if place else ()


class CoRetrieved:
    """Chunks that were retrieved together with a chunk, most frequent first, equals by first occurrence.

    Neighbours are part of the KV keys, so every change of them is a miss. Until :meth:`settle` is called,
    :meth:`of` follows every observation; afterwards only another ``settle`` changes its results. Observe all
    the time, and settle before encoding again.

    ``log`` are earlier retrievals.
    """

    def __init__(self, log: Iterable[Sequence[str]] = ()) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self._settled: Mapping[str, tuple[str, ...]] | None = None
        for texts in log:
            self.observe(texts)

    def observe(self, texts: Sequence[str]) -> None:
        """Count chunks that were retrieved for one question."""
        unique = list({text.strip(): text for text in checked_texts(texts)}.values())
        with self._lock:
            for text in unique:
                counts = self._counts.setdefault(text.strip(), Counter())
                counts.update(other for other in unique if other != text)

    def settle(self) -> None:
        """Fix the present counts; later observations have no effect until the next call."""
        with self._lock:
            self._settled = {text: _ranked(counts) for text, counts in self._counts.items()}

    def of(self, text: str) -> Sequence[str]:
        """The chunks most often retrieved with ``text`` first."""
        with self._lock:
            if self._settled is not None:
                return self._settled.get(text.strip(), ())
            return _ranked(self._counts.get(text.strip(), Counter()))


def by_namespace(
    neighbours: Neighbours | Mapping[str, Neighbours] | None, namespace: str
) -> Mapping[str, Neighbours]:
    """A mapping from namespaces; a single source belongs to ``namespace``."""
    if neighbours is None or isinstance(neighbours, Mapping):
        return neighbours or {}
    return {namespace: neighbours}


def _ranked(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(text for text, _ in counts.most_common())


def checked_texts(texts: Iterable[str]) -> list[str]:
    """A list of them; TypeError for a single string, which would be taken for its letters."""
    listed = list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise TypeError("chunks must be given as a list of strings")
    return listed


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; rows of zeros unchanged."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    unit: NDArray[np.float32] = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit
