"""Keys of the entries that a future prompt will look up, for prefetching."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ragcachekit.model.encoding import Encoding
from ragcachekit.plan.encodings import IN_PROMPT, Encodings, system_encoding
from ragcachekit.plan.variants import VariantPool
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, chunk_id

MAX_NAMESPACES = 1024

WINDOW = 16
"""Prompts of a namespace that :meth:`LastPrompts.changing` is about."""

_ID = re.compile(r"[0-9a-f]{64}")


@dataclass
class _Texts:
    """The last text before a first chunk; hashes of the last ones, and whether each was new then."""

    last: Ids
    hashes: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))


class LastPrompts:
    """The last system text of each namespace, for the most recent :data:`MAX_NAMESPACES`."""

    def __init__(self) -> None:
        self._last: dict[str, _Texts] = {}
        self._lock = threading.Lock()

    def observe(self, namespace: str, segments: Sequence[TokenSegment]) -> None:
        """Record a prompt; one without chunks has no text before the first."""
        if not any(segment.is_chunk for segment in segments):
            return
        text = Encodings.system_of(segments)
        with self._lock:
            known = self._put(namespace, text)
            known.new.append(hash(text) not in known.hashes)
            known.hashes.append(hash(text))

    def suggest(self, namespace: str, system: Ids) -> None:
        """Take a system text for the last one where no prompt was observed."""
        with self._lock:
            if namespace not in self._last:
                self._put(namespace, system)

    def last(self, namespace: str) -> Ids | None:
        """Token ids of the system text; None before any prompt."""
        with self._lock:
            known = self._last.get(namespace)
            return None if known is None else known.last

    def changing(self, namespace: str) -> bool:
        """Whether more than half of the last :data:`WINDOW` prompts had a text that none before them had."""
        with self._lock:
            known = self._last.get(namespace)
            return known is not None and sum(known.new) > WINDOW // 2

    def _put(self, namespace: str, text: Ids) -> _Texts:
        known = self._last.pop(namespace, None) or _Texts(text)
        known.last = text
        self._last[namespace] = known
        if len(self._last) > MAX_NAMESPACES:
            del self._last[next(iter(self._last))]
        return known

    def forget(self, namespace: str) -> None:
        """Forget the namespace's system text."""
        with self._lock:
            self._last.pop(namespace, None)


def is_chunk_id(chunk: str) -> bool:
    """Whether a string is a chunk id, and not text."""
    return _ID.fullmatch(chunk) is not None


def prefetch_keys(
    chunks: Sequence[Ids | str],
    encodings: Encodings,
    system: Ids,
    fingerprint: str,
    namespace: str,
    variants: VariantPool,
) -> list[KVKey]:
    """Keys of the system text and of chunks (token ids, or chunk ids) in this order after it.

    A chunk given by id has no known neighbours. Under ``in-prompt`` the best variant is taken, under
    ``average:n`` the stored mean, if there is one and the chunk is not the first.
    """
    length = max(1, len(system) + sum(len(chunk) for chunk in chunks if not isinstance(chunk, str)))
    keys, before = list[KVKey](), list[str]()
    if system:
        keys.append(encodings.key(system, Encoding(ENCODING_PREFIX), (), fingerprint, namespace, length))
        before.append(chunk_id(system, namespace))
    for chunk in chunks:
        ids = () if isinstance(chunk, str) else chunk
        encoding, context = encodings.encoding(ids, system)
        key = encodings.key(ids, encoding, context, fingerprint, namespace, length)
        if isinstance(chunk, str):
            key = KVKey(fingerprint, namespace, chunk, key.encoding, key.context)
        fits = variants.ranked(key, before) if encodings.name == IN_PROMPT else []
        if encodings.averages:
            behind = (chunk_id(system, namespace),)
            mean = variants.averages.find(replace(key, context=behind))
            is_first = len(before) == bool(system)
            plain = replace(key, encoding=system_encoding(system).name, context=behind if system else ())
            key = plain if mean is None or is_first else mean
        keys.append(fits[0].key if fits else key)
        before.append(key.chunk_id)
    return keys
