"""Which source each chunk is of, for ``companions="same-source"``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from ragcachekit.types import KVKey


class ChunkSources:
    """The source of each chunk, as a retriever or the user named it; thread safe.

    A text of two sources is of none that could be trusted: whoever may add a document could copy a chunk of
    another one into it. It stays so until it is forgotten.

    ``name_of`` gives the chunk id of a text in a namespace.
    """

    def __init__(self, name_of: Callable[[str, str], str]) -> None:
        self._lock, self._name_of = threading.Lock(), name_of
        self._by_text: dict[str, dict[str, str | None]] = {}
        self._by_id: dict[str, dict[str, str | None]] = {}

    def add(self, namespace: str, texts: Iterable[str], source: str) -> None:
        """Note that these chunks are of ``source``."""
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
        """Whether the chunk of a stored entry, and all it was encoded behind but the first text, are of one
        source.
        """
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
