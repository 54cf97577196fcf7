"""Which documents of an index the engine has the order of, so that each change is noted once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from ragcachekit.retrieval.documents import DocumentIndex

log = logging.getLogger(__name__)

Document = TypeVar("Document")


class NotedOrder(Generic[Document]):
    """What of an index was given to an engine in one namespace. Thread safe.

    ``version`` changes with the index, ``ids`` lists its documents, ``get`` reads those of these ids,
    ``text`` is the text of one, and ``note`` gives the order of documents to the engine. With
    ``may_replace``, a text may change under its id without a call of :meth:`forget`.
    """

    def __init__(
        self,
        engine: Any,
        namespace: str,
        text: Callable[[Document], str],
        note: Callable[[Any, str, Iterable[Document]], None],
        *,
        version: Callable[[], Hashable],
        ids: Callable[[], Iterable[Hashable]],
        get: Callable[[Sequence[Any]], Iterable[tuple[Hashable, Document]]],
        may_replace: bool = False,
    ) -> None:
        self._engine, self._namespace = engine, namespace
        self._version_of, self._ids, self._get, self._text, self._note = version, ids, get, text, note
        self._may_replace = may_replace
        self._lock = threading.Lock()
        self._version: Hashable = object()
        self._texts: dict[Hashable, str] = {}

    @classmethod
    def of_index(
        cls,
        engine: Any,
        namespace: str,
        text: Callable[[Document], str],
        note: Callable[[Any, str, Iterable[Document]], None],
        index: DocumentIndex,
        convert: Callable[[Any], Document],
    ) -> Self:
        """That of an index of one's own; ``convert`` makes a document of one of its records."""

        def get(ids: Sequence[Any]) -> list[tuple[Hashable, Document]]:
            return [(one.id, convert(one)) for one in index.get(ids)]

        return cls(
            engine, namespace, text, note, version=lambda: index.version, ids=lambda: index.ids, get=get
        )

    @classmethod
    def of_mapping(
        cls,
        engine: Any,
        namespace: str,
        text: Callable[[Document], str],
        note: Callable[[Any, str, Iterable[Document]], None],
        held: Callable[[], Mapping[Any, Any]],
        convert: Callable[[Any], Document],
        version: Callable[[], Hashable],
    ) -> Self:
        """That of a store which holds its documents by id."""

        def get(ids: Sequence[Any]) -> list[tuple[Hashable, Document]]:
            documents = held()
            return [(one, convert(documents[one])) for one in ids if one in documents]

        ids = lambda: list(held())  # noqa: E731
        return cls(engine, namespace, text, note, version=version, ids=ids, get=get, may_replace=True)

    def update(self) -> None:
        """Note what came and what went since the last call; a failing index costs the order, no answer."""
        try:
            with self._lock:
                version = self._version_of()
                if version != self._version:
                    self._follow()
                    self._version = version
        except Exception:
            log.warning("the order of chunks in their documents could not be read", exc_info=True)

    def forget(self, ids: Iterable[Hashable] | None) -> None:
        """Take documents that were deleted or replaced (None: any) out of the order until the next update."""
        with self._lock:
            self._drop([one for one in (self._texts if ids is None else ids) if one in self._texts])
            self._version = object()

    def _drop(self, gone: Iterable[Hashable]) -> None:
        texts = {self._texts.pop(one) for one in gone}
        # Another document with such a text takes its place.
        for one in [one for one, text in self._texts.items() if text in texts]:
            del self._texts[one]
        if texts:
            self._engine.drop_order(sorted(texts), namespace=self._namespace)

    def _follow(self) -> None:
        present = dict.fromkeys(self._ids())
        gone = [one for one in self._texts if one not in present]
        if self._may_replace:
            read = {one: self._text(document) for one, document in self._get(list(self._texts))}
            gone += [one for one, text in self._texts.items() if one in present and read.get(one) != text]
        self._drop(gone)
        new = [one for one in present if one not in self._texts]
        found = list(self._get(new))
        self._note(self._engine, self._namespace, [document for _, document in found])
        self._texts |= {one: self._text(document) for one, document in found}
