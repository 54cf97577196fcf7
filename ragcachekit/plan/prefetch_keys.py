"""Keys of the entries that a future prompt will look up, for prefetching."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ragcachekit.model.encoding import Encoding
from ragcachekit.plan.encodings import IN_PROMPT, Encodings, system_encoding
from ragcachekit.plan.variants import VariantPool
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, chunk_id

_ID = re.compile(r"[0-9a-f]{64}")


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
