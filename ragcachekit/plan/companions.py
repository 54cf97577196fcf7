"""What a chunk is encoded after: chunks of a source of neighbours, or chunks registered together."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np

from ragcachekit.types import Ids, KVKey, chunk_id, strings

MAX_TOKENISED = 4096  # texts whose token ids are cached: a prompt needs ten neighbours per chunk
MAX_COMPANIONS = 65_536  # chunks per namespace
_DECIMALS = 6  # of similarities: rounding of a matrix product must not reorder equal texts


@runtime_checkable
class Neighbours(Protocol):
    """Chunks that are likely to be retrieved along with a chunk.

    ``of`` is thread safe and fast: it is called for every chunk of every prompt. Neighbours and their order
    are part of the KV key: others are a miss, never a wrong answer.
    """

    def of(self, text: str) -> Sequence[str]:
        """Texts of the chunks most similar to ``text``, most similar first; empty for an unknown text."""


class SimilarChunks:
    """The most similar chunks by cosine of their embeddings (FusionRAG section 3.1), by brute force.

    ``embeddings`` is ``[texts, dimensions]``, one row per text (a row of zeros is similar to nothing), or a
    function from the list of texts to it, such as ``embed_documents`` of LangChain embeddings. A text that
    occurs twice is one chunk; outer whitespace does not count. ``most`` limits the neighbours of a chunk.
    ValueError if there is not one finite row per text.
    """

    def __init__(
        self, texts: Iterable[str], embeddings: Any | Callable[[list[str]], Any], *, most: int = 50
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        given = strings(texts, "chunks")
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
        lengths = np.linalg.norm(rows[kept].astype(np.float64), axis=1, keepdims=True)
        self._unit = (rows[kept] / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        self._texts = [given[row] for row in kept]
        self._at = {text: index for index, text in enumerate(first)}
        self._most = most
        self._found: dict[int, tuple[str, ...]] = {}

    def of(self, text: str) -> Sequence[str]:
        """The most similar chunks first; equal similarities in the order of the corpus."""
        at = self._at.get(text.strip())
        if at is None or not self._unit[at].any():
            return ()
        if at not in self._found:
            scores = np.round(self._unit @ self._unit[at], _DECIMALS)
            scores[~self._unit.any(axis=1)] = -np.inf
            scores[at] = -np.inf
            order = np.argsort(-scores, kind="stable")[: self._most]
            self._found[at] = tuple(self._texts[int(i)] for i in order if scores[i] > -np.inf)
        return self._found[at]


class PrecedingChunks:
    """The chunks before a chunk in its own document, nearest first.

    The graph of FusionRAG section 3.1 (discussion) with one kind of edge, for chunks that refer to a name in
    an earlier one. ``documents`` has each document's chunks in order; a repeated text counts once.
    """

    def __init__(self, documents: Iterable[Sequence[str]]) -> None:
        self._places: dict[str, tuple[list[str], int]] = {}
        for document in documents:
            chunks = strings(document, "chunks")
            for place, text in enumerate(chunks):
                self._places.setdefault(text.strip(), (chunks, place))

    def of(self, text: str) -> Sequence[str]:
        """The chunks before it, nearest first."""
        chunks, place = self._places.get(text.strip(), ([], 0))
        return chunks[:place][::-1] if place else ()


class _Named(NamedTuple):
    text: str
    name: str  # the chunk id


_Near = OrderedDict[str, tuple[_Named, tuple[_Named, ...]]]  # by text: the chunk, and the others of its block


class Companions:
    """The chunks that each chunk is encoded after, by namespace, without forgotten ones. Thread safe.

    A namespace's source of neighbours lists them, else a retriever's store: twice ``nearest`` chunks. Without
    these they are the other chunks of its block: a list of chunks that were registered together is cut into
    blocks of ``block`` chunks or a few more, and a chunk belongs to the first one.

    With ``same_source`` a chunk's companions are those of its own source, whoever proposed them. A text of
    two sources is of none until it is forgotten: whoever may add a document could copy a chunk of another
    one into it. TypeError for a source of neighbours without ``of``.
    """

    def __init__(
        self,
        sources: Mapping[str, Neighbours],
        tokenise: Callable[[str], Ids],
        same_source: bool = False,
        block: int = 3,
        nearest: int = 0,
    ) -> None:
        for source in sources.values():
            if not isinstance(source, Neighbours):
                raise TypeError(f"neighbours need a method of(text), and {type(source).__name__} has none")
        self._given, self.same_source, self._block = dict(sources), same_source, block
        self._nearest, self._followed = nearest, WeakSet[Any]()
        self._tokenise = lru_cache(MAX_TOKENISED)(tokenise)
        self._lock = threading.Lock()
        self._near: defaultdict[str, _Near] = defaultdict(_Near)
        self._all_forgotten: set[str] = set()  # namespaces
        self._exceptions: defaultdict[str, set[str]] = defaultdict(set)  # ids to which the opposite applies
        self._sources: defaultdict[str, dict[str, str | None]] = defaultdict(dict)  # by chunk id

    def __bool__(self) -> bool:
        return bool(self._given)

    def of(self, text: str, namespace: str) -> tuple[Ids, ...]:
        """Token ids of the companions of ``text``, most similar first, or those that follow it first."""
        if (given := self._given.get(namespace)) is not None:
            near = strings(given.of(text), "neighbours")
        elif not (near := self._of_stores(text, namespace)):
            with self._lock:
                found = self._near.get(namespace, _Near()).get(text.rstrip())
            near = [other.text for other in found[1]] if found else []
        if self.same_source:
            near = self._of_source(self._source(text, namespace), near, namespace)
        ids = tuple(self._tokenise(one) for one in near)
        with self._lock:
            everything, exceptions = namespace in self._all_forgotten, self._exceptions.get(namespace, set())
            if not everything and not exceptions:
                return ids
            return tuple(one for one in ids if (chunk_id(one, namespace) in exceptions) == everything)

    def follow(self, cache: Any) -> None:
        """Take neighbours from the store of a retriever, if its query cache has ``neighbours_of``."""
        if self._nearest and hasattr(cache, "neighbours_of"):
            self._followed.add(cache)

    def observe(self, namespace: str, texts: Sequence[str]) -> None:
        """Note a list of chunks, in the order of a document or of a search."""
        if namespace in self._given:
            return
        if self.same_source:
            sources = {text: self._source(text, namespace) for text in texts}
            for source in dict.fromkeys(sources.values()):
                self._note(namespace, self._of_source(source, texts, namespace))
        else:
            self._note(namespace, texts)

    def register(self, namespace: str, texts: Sequence[str]) -> None:
        """Note a list of chunks; those that were forgotten before are found again."""
        self.observe(namespace, texts)
        if namespace in self._all_forgotten or self._exceptions.get(namespace):
            ids = {self._name_of(text, namespace) for text in texts}
            with self._lock:
                self._except(namespace, ids, namespace in self._all_forgotten)

    def note_source(self, source: str, namespace: str, texts: Iterable[str]) -> None:
        """Note that these chunks are of ``source``, as a retriever or the user named it."""
        if self.same_source:
            # Chains may strip it.
            names = {self._name_of(form, namespace) for text in texts for form in (text, text.strip())}
            with self._lock:
                known = self._sources[namespace]
                known.update({name: source if known.get(name, source) == source else None for name in names})

    def allow(self, key: KVKey) -> bool:
        """Whether a stored chunk and all that it was encoded after, but the first text, may be together."""
        known = self._sources.get(key.namespace, {})
        sources = {known.get(name) for name in (key.chunk_id, *key.context[1:])}
        return not self.same_source or (len(sources) == 1 and None not in sources)

    def forget(self, namespace: str, ids: frozenset[str] | None = None) -> None:
        """Drop these chunks (None: all) from results until :meth:`register`."""
        with self._lock:
            near, known = self._near.pop(namespace, _Near()), self._sources.pop(namespace, {})
            if ids is None:
                self._all_forgotten.add(namespace)
                self._exceptions.pop(namespace, None)
                return
            self._except(namespace, ids, namespace not in self._all_forgotten)
            self._sources[namespace] = {name: one for name, one in known.items() if name not in ids}
            self._near[namespace] = _Near(
                (text, (chunk, tuple(other for other in others if other.name not in ids)))
                for text, (chunk, others) in near.items()
                if chunk.name not in ids
            )

    def _except(self, namespace: str, ids: Iterable[str], add: bool) -> None:
        exceptions = self._exceptions[namespace]
        (exceptions.update if add else exceptions.difference_update)(ids)

    def _of_stores(self, text: str, namespace: str) -> list[str]:
        most = 2 * self._nearest  # some may be forgotten, or too long
        found = (cache.neighbours_of(text, namespace, most) for cache in list(self._followed))
        return list(next(filter(None, found), ()))

    def _name_of(self, text: str, namespace: str) -> str:
        return chunk_id(self._tokenise(text), namespace)

    def _source(self, text: str, namespace: str) -> str | None:
        return self._sources.get(namespace, {}).get(self._name_of(text, namespace))

    def _of_source(self, source: str | None, texts: Iterable[str], namespace: str) -> list[str]:
        return [t for t in texts if source is not None and self._source(t, namespace) == source]

    def _note(self, namespace: str, texts: Sequence[str]) -> None:
        # Tokenised once per text, and not while a forget waits.
        known, chunks = self._near.get(namespace, _Near()), list[_Named]()
        for text in dict.fromkeys(text.rstrip() for text in texts):
            found = known.get(text)
            chunks.append(found[0] if found else _Named(text, self._name_of(text, namespace)))
        with self._lock:
            near = self._near[namespace]
            new = [chunk for chunk in chunks if not near.get(chunk.text, (chunk, ()))[1]]
            listed = new if len(new) > 1 else [*new, *(c for c in chunks if c not in new)]
            for block in _blocks(listed, self._block):
                for at, chunk in enumerate(block):
                    _, others = near.get(chunk.text, (chunk, ()))
                    if not others:  # the last of them first, then those before these
                        others = (*block[at + 1 :], *block[:at])
                        others = (*others[1 - self._block :], *others[: 1 - self._block])
                    near[chunk.text] = chunk, others
            for chunk in chunks:
                near.setdefault(chunk.text, (chunk, ()))
                near.move_to_end(chunk.text)
            # A longer list is encoded after all of it was noted.
            while len(near) > max(MAX_COMPANIONS, len(chunks)):
                near.popitem(last=False)


def _blocks(chunks: Sequence[_Named], least: int) -> list[Sequence[_Named]]:
    """Blocks of nearly equal size, at least ``least`` if there are so many."""
    count = min(len(chunks), max(1, len(chunks) // least))
    cuts = [len(chunks) * number // count for number in range(count + 1)] if count else [0]
    return [chunks[start:stop] for start, stop in pairwise(cuts)]
