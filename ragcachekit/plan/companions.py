"""Which chunks a chunk is encoded after: neighbours as token ids, by namespace, without forgotten ones."""

from __future__ import annotations

import threading
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ragcachekit.plan.neighbours import Neighbours, checked_texts
from ragcachekit.types import Ids, KVKey, chunk_id

MAX_TOKENISED = 4096
"""Texts whose token ids are cached: a prompt needs ten neighbours per chunk."""

GIVEN, DOCUMENT, TOGETHER = "neighbours=", "document order", "registered together"
"""Where neighbours come from, as reports name it."""

BLOCK = 4  # chunks of one block of companions
MAX_COMPANIONS = 65_536  # chunks per namespace
NEAR = 4  # chunks of a document on either side

NameOf = Callable[[str, str], str]
"""The chunk id of a text in a namespace."""


class TokenNeighbours:
    """Neighbours as token ids, by namespace, without forgotten ones; TypeError for a source without ``of``.

    A namespace without a source has the order of its documents (:class:`DocumentOrder`) and its chunks that
    were registered together (:class:`Companions`): one tenant's chunks must not affect another's KV.

    With ``same_source`` a chunk's neighbours are those of its own source, whoever proposed them.
    """

    def __init__(
        self, sources: Mapping[str, Neighbours], tokenise: Callable[[str], Ids], same_source: bool = False
    ) -> None:
        for source in sources.values():
            if not isinstance(source, Neighbours):
                raise TypeError(f"neighbours need a method of(text), and {type(source).__name__} has none")
        self._sources = dict(sources)
        self._tokenise = lru_cache(MAX_TOKENISED)(tokenise)
        self._orders: dict[str, DocumentOrder] = {}
        self._companions = Companions(self._name_of)
        self.chunk_sources = ChunkSources(self._name_of) if same_source else None
        self._lock = threading.Lock()
        self._forgotten: dict[str, set[str]] = {}
        self._returned: dict[str, set[str]] = {}  # since all chunks of the namespace were forgotten

    def __bool__(self) -> bool:
        return bool(self._sources)

    def _name_of(self, text: str, namespace: str) -> str:
        return chunk_id(self._tokenise(text), namespace)

    def of(self, text: str, namespace: str, by_document: bool = False) -> tuple[str, tuple[Ids, ...]]:
        """Where the neighbours of ``text`` come from, and their token ids, most similar first.

        Without a source those are the chunks that were registered with it, or those of its document. With
        ``by_document`` the latter count more, and only chunks before it.
        """
        origin, near = self._texts_near(text, namespace, by_document)
        if self.chunk_sources is not None:
            near = self.chunk_sources.near(namespace, text, checked_texts(near))
        found = [self._tokenise(one) for one in checked_texts(near)]
        return (origin if found else ""), self._not_forgotten(found, namespace)

    def _texts_near(self, text: str, namespace: str, by_document: bool) -> tuple[str, Sequence[str]]:
        if (source := self._sources.get(namespace)) is not None:
            return GIVEN, source.of(text)
        order, together = self._orders.get(namespace), self._companions.of(namespace, text)
        if order is None or text not in order or (together and not by_document):
            return TOGETHER, together
        return DOCUMENT, order.of(text, following=not by_document)

    def _not_forgotten(self, found: Sequence[Ids], namespace: str) -> tuple[Ids, ...]:
        with self._lock:
            forgotten, returned = self._forgotten.get(namespace, set()), self._returned.get(namespace)
            if not forgotten and returned is None:
                return tuple(found)
            names = [chunk_id(ids, namespace) for ids in found]
            kept = (name not in forgotten and (returned is None or name in returned) for name in names)
            return tuple(ids for ids, keep in zip(found, kept, strict=True) if keep)

    def observe(self, namespace: str, texts: Sequence[str]) -> None:
        """Note chunks that belong together."""
        if namespace not in self._sources:
            known = self.chunk_sources
            for group in [texts] if known is None else known.groups(namespace, texts):
                self._companions.observe(namespace, group)

    def register(self, namespace: str, texts: Iterable[str]) -> None:
        """Note chunks that belong together; those that were forgotten before are found again."""
        texts = list(texts)
        self.observe(namespace, texts)
        self._return(namespace, texts)

    def order(
        self, namespace: str, document: str, texts: Sequence[str], starts: Sequence[int] | None
    ) -> None:
        """Note the order of a document's chunks; they are not forgotten any more."""
        self.note_source(document, namespace, texts)
        if namespace not in self._sources:
            self._orders.setdefault(namespace, DocumentOrder()).add(document, texts, starts)
            self._return(namespace, texts)

    def drop_order(self, namespace: str, texts: Iterable[str]) -> None:
        """Take chunks out of the order of their documents."""
        if (order := self._orders.get(namespace)) is not None:
            order.discard(texts)

    def note_source(self, source: str, namespace: str, texts: Iterable[str]) -> None:
        """Note that chunks are of ``source``."""
        if self.chunk_sources is not None:
            self.chunk_sources.add(namespace, texts, source)

    def forget(self, namespace: str, ids: frozenset[str] | None = None, texts: Iterable[str] = ()) -> None:
        """Drop these chunks (None: all) from results until :meth:`register`; ``texts`` in every form."""
        with self._lock:
            if ids is None:
                self._returned[namespace] = set()
                self._forgotten.pop(namespace, None)
                self._orders.pop(namespace, None)
            else:
                self._forgotten.setdefault(namespace, set()).update(ids)
                self._returned.get(namespace, set()).difference_update(ids)
        self.drop_order(namespace, texts)
        self._companions.forget(namespace, ids)
        if self.chunk_sources is not None:
            self.chunk_sources.forget(namespace, ids, texts)

    def _return(self, namespace: str, texts: Iterable[str]) -> None:
        if not self._forgotten.get(namespace) and namespace not in self._returned:
            return
        ids = {self._name_of(text, namespace) for text in texts}
        with self._lock:
            self._forgotten.get(namespace, set()).difference_update(ids)
            if namespace in self._returned:
                self._returned[namespace] |= ids


class _Named(NamedTuple):
    text: str
    name: str  # the chunk id


_Near = OrderedDict[str, tuple[_Named, tuple[_Named, ...]]]  # by text: the chunk, and the others of its block


class Companions:
    """For each chunk the others of its block, in the first list that it was registered in; thread safe.

    A list is what a retriever found for one question, or what :meth:`RagCache.encode` was given. It is cut
    into blocks of at most :data:`BLOCK` chunks; those of one block are encoded after each other, and share
    the forwards that encode them. The least recently registered chunks are dropped first. Blanks at the end
    of a text do not count; those at its beginning are part of the chunk, and of its id.

    ``name_of`` tokenises: it is called once per text, and never while a forget waits.
    """

    def __init__(self, name_of: NameOf) -> None:
        self._lock, self._name_of = threading.Lock(), name_of
        self._near: dict[str, _Near] = {}

    def observe(self, namespace: str, texts: Sequence[str]) -> None:
        """Note a list of chunks, in the order of a document or of a search."""
        known, chunks = self._near.get(namespace, _Near()), list[_Named]()
        for text in dict.fromkeys(text.rstrip() for text in texts):
            found = known.get(text)
            chunks.append(found[0] if found else _Named(text, self._name_of(text, namespace)))
        with self._lock:
            near = self._near.setdefault(namespace, _Near())
            new = [chunk for chunk in chunks if not near.get(chunk.text, (chunk, ()))[1]]
            for block in _blocks(new if len(new) > 1 else [*new, *(c for c in chunks if c not in new)]):
                for at, chunk in enumerate(block):
                    _, others = near.get(chunk.text, (chunk, ()))
                    near[chunk.text] = chunk, others or (*block[at + 1 :], *block[:at])
            for chunk in chunks:
                near.setdefault(chunk.text, (chunk, ()))
                near.move_to_end(chunk.text)
            # A longer list is encoded after all of it was noted.
            while len(near) > max(MAX_COMPANIONS, len(chunks)):
                near.popitem(last=False)

    def of(self, namespace: str, text: str) -> tuple[str, ...]:
        """The other chunks of its block, those that follow it first."""
        with self._lock:
            found = self._near.get(namespace, _Near()).get(text.rstrip())
            return tuple(other.text for other in found[1]) if found else ()

    def forget(self, namespace: str, ids: Collection[str] | None) -> None:
        """Drop chunks by their ids (None: all) from the namespace, as companions too."""
        with self._lock:
            near = self._near.pop(namespace, _Near())
            if ids is not None:
                self._near[namespace] = _Near(
                    (text, (chunk, tuple(other for other in others if other.name not in ids)))
                    for text, (chunk, others) in near.items()
                    if chunk.name not in ids
                )


def _blocks(chunks: Sequence[_Named]) -> list[Sequence[_Named]]:
    """Blocks of nearly equal size."""
    count = -(-len(chunks) // BLOCK)
    cuts = [len(chunks) * number // count for number in range(count + 1)] if count else [0]
    return [chunks[start:stop] for start, stop in pairwise(cuts)]


class _Place(NamedTuple):
    start: int  # in characters where the splitter gives them, else by arrival
    text: str


class DocumentOrder:
    """Chunks of documents by their start; one namespace. Thread safe.

    A chunk belongs to the document that it was first added with. Adding or removing one document changes no
    neighbour of a chunk of another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, list[_Place]] = {}  # by document
        self._at: dict[str, tuple[str, _Place]] = {}  # by text without outer blanks

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, text: str) -> bool:
        return text.strip() in self._at

    def add(self, document: str, texts: Sequence[str], starts: Sequence[int] | None = None) -> None:
        """Note chunks of a document; without ``starts`` they follow those that are known already."""
        with self._lock:
            places = self._places.setdefault(document, [])
            after = places[-1].start + 1 if places else 0
            for number, text in enumerate(text.rstrip() for text in texts):
                if not text or text.strip() in self._at:
                    continue
                place = _Place(after + number if starts is None else starts[number], text)
                insort(places, place)
                self._at[text.strip()] = document, place
            if not places:
                del self._places[document]

    def discard(self, texts: Iterable[str]) -> None:
        """Drop chunks, as neighbours too."""
        with self._lock:
            for text in texts:
                document, place = self._at.pop(text.strip(), ("", None))
                if place is not None:
                    self._places[document].remove(place)
                    if not self._places[document]:
                        del self._places[document]

    def of(self, text: str, following: bool = False) -> tuple[str, ...]:
        """The chunks before it, nearest first, then those that follow; none for an unknown text."""
        with self._lock:
            document, place = self._at.get(text.strip(), ("", None))
            if place is None:
                return ()
            places = self._places[document]
            at = places.index(place)
            near = places[max(at - NEAR, 0) : at][::-1] + (places[at + 1 :][:NEAR] if following else [])
            return tuple(one.text for one in near)


class ChunkSources:
    """The source of each chunk, for ``companions="same-source"``; thread safe.

    A text of two sources is of none that could be trusted: whoever may add a document could copy a chunk of
    another one into it. It stays so until it is forgotten.
    """

    def __init__(self, name_of: NameOf) -> None:
        self._lock, self._name_of = threading.Lock(), name_of
        self._by_text: dict[str, dict[str, str | None]] = {}
        self._by_id: dict[str, dict[str, str | None]] = {}

    def add(self, namespace: str, texts: Iterable[str], source: str) -> None:
        """Note that these chunks are of ``source``, as a retriever or the user named it."""
        for text in texts:
            bare = text.strip()
            if self._by_text.get(namespace, {}).get(bare, "") == source:
                continue
            names = [self._name_of(form, namespace) for form in (text, bare)]  # chains may strip it
            with self._lock:
                by_text = self._by_text.setdefault(namespace, {})
                held = source if by_text.get(bare, source) == source else None
                by_text[bare] = held
                self._by_id.setdefault(namespace, {}).update(dict.fromkeys(names, held))

    def near(self, namespace: str, text: str, others: Iterable[str]) -> list[str]:
        """Those of ``others`` that are of the source of ``text``; none where that is not known."""
        known = self._by_text.get(namespace, {})
        source = known.get(text.strip())
        return [other for other in others if source is not None and known.get(other.strip()) == source]

    def groups(self, namespace: str, texts: Iterable[str]) -> Sequence[Sequence[str]]:
        """The texts by their source, without those of none."""
        known, groups = self._by_text.get(namespace, {}), dict[str, list[str]]()
        for text in texts:
            if (source := known.get(text.strip())) is not None:
                groups.setdefault(source, []).append(text)
        return list(groups.values())

    def allow(self, key: KVKey) -> bool:
        """Whether a stored chunk and all that it was encoded after, but the first text, have one source."""
        known = self._by_id.get(key.namespace, {})
        sources = {known.get(name) for name in (key.chunk_id, *key.context[1:])}
        return len(sources) == 1 and None not in sources

    def forget(self, namespace: str, ids: Collection[str] | None, texts: Iterable[str]) -> None:
        """Forget chunks by their ids and texts; without ids, all of the namespace."""
        with self._lock:
            if ids is None:
                self._by_text.pop(namespace, None)
                self._by_id.pop(namespace, None)
                return
            gone = {text.strip() for text in texts}
            for known, names in ((self._by_text, gone), (self._by_id, ids)):
                held = known.get(namespace, {})
                known[namespace] = {name: source for name, source in held.items() if name not in names}
