"""Which entries a prompt will look up, before there is a prompt: for prefetching."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from ragcachekit.model.encoding import Encoding, Ids
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.plan.segments import TokenSegment
from ragcachekit.plan.variants import VariantPool
from ragcachekit.types import ENCODING_PREFIX, KVKey, chunk_id

MOST_NAMESPACES = 1024

_ID = re.compile(r"[0-9a-f]{64}")


class LastPrompts:
    """The system text last seen in each namespace; those seen least recently are forgotten."""

    def __init__(self) -> None:
        self._last: dict[str, Ids] = {}
        self._lock = threading.Lock()

    def observe(self, namespace: str, segments: Sequence[TokenSegment]) -> None:
        """A prompt came."""
        with self._lock:
            self._last.pop(namespace, None)
            self._last[namespace] = Encodings.system_of(segments)
            if len(self._last) > MOST_NAMESPACES:
                del self._last[next(iter(self._last))]

    def last(self, namespace: str) -> Ids:
        """Its ids; empty before any."""
        with self._lock:
            return self._last.get(namespace, ())

    def forget(self, namespace: str) -> None:
        """Forget a namespace's."""
        with self._lock:
            self._last.pop(namespace, None)


def is_chunk_id(chunk: str) -> bool:
    """Whether a string is a chunk id and not a chunk's text."""
    return _ID.fullmatch(chunk) is not None


def prefetch_keys(
    chunks: Sequence[Ids | str],
    encodings: Encodings,
    system: Ids,
    fingerprint: str,
    namespace: str,
    variants: VariantPool,
) -> list[KVKey]:
    """Keys of the system text and of chunks (token ids, or chunk ids) in this order behind it.

    Of a chunk that is known by its id alone, neighbours are not known. Where chunks are encoded behind
    all that stands before them, the variant that fits best is taken.
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
        keys.append(fits[0].key if fits else key)
        before.append(key.chunk_id)
    return keys
