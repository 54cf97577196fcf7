"""Chunk KV that has every size and no content: what a replay puts into real stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ragcachekit.link.observed import ObservedCache
from ragcachekit.model.encoder import ChunkEncoder
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats
from ragcachekit.types import KVKey

EVERYTHING = 1 << 62
"""The budget of a tier from which nothing is evicted."""


class PhantomEncoder(ChunkEncoder):
    """Encodes one token of each kind for its shapes; after that a chunk is that token, so many times.

    Its one tensor repeats a row without storing it again, so its bytes count as the model's would and
    take no memory. The order of what is encoded is that of the real encoder.
    """

    def __init__(self, model: Any, rope: Rope) -> None:
        super().__init__(model, rope, ObservedCache)
        self._tokens: dict[str, ChunkKV] = {}
        self._made: dict[tuple[str, int], ChunkKV] = {}

    def _forward(self, chunks: Sequence[Sequence[int]], encoding: Encoding) -> list[ChunkKV]:
        return [self.kv(encoding, len(chunk)) for chunk in chunks]

    def kv(self, encoding: Encoding, tokens: int) -> ChunkKV:
        """KV of as many tokens under an encoding."""
        at = (encoding.name, tokens)
        if at not in self._made:
            self._made[at] = _repeated(self.token(encoding), tokens)
        return self._made[at]

    def token(self, encoding: Encoding) -> ChunkKV:
        """KV of one token, as the model gives it."""
        if encoding.name not in self._tokens:
            (self._tokens[encoding.name],) = super()._forward([[1]], encoding)
        return self._tokens[encoding.name]


def _repeated(one: ChunkKV, tokens: int) -> ChunkKV:
    """All layers as one of bytes: stores count bytes often, and tensor by tensor."""
    width = sum(tensor.nbytes for tensor in (*one.keys, *one.values))
    row = torch.zeros(1, 1, width, dtype=torch.uint8)
    sums = {name: tensor.expand(tokens) for name, tensor in one.sums.items()}
    keys, values = row.expand(-1, tokens, -1), row[:, :, :0].expand(-1, tokens, -1)
    return ChunkKV((keys,), (values,), one.start, sums)


class PhantomDisk:
    """A slow tier that holds everything: an entry is opened first, and there when its reading ends.

    As the disk does it, so that what is copied into faster tiers is copied at the same moment.
    """

    shared = True
    remote = False

    def __init__(self) -> None:
        self._entries: dict[KVKey, ChunkKV] = {}

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The entry under ``key``, or None."""
        kv = self._entries.get(key)
        return Found(kv, "disk") if kv is not None else None

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`, still to be read."""
        kv = self._entries.get(key)
        return PhantomSource(kv) if kv is not None else None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep it."""
        self._entries[key] = kv
        return True

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; nobody has to go."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return key in self._entries

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Nothing is ever forgotten in a replay."""
        return frozenset()

    def discard(self, key: KVKey) -> None:
        """Nothing here is ever damaged."""

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """As :meth:`drop`."""
        return 0

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; uses are counted by the replay."""
        nbytes = sum(kv.nbytes for kv in self._entries.values())
        return (StoreStats("disk", len(self._entries), nbytes, EVERYTHING, 0, 0, 0, 0, 0),)

    def close(self) -> None:
        """Nothing to let go of."""


class PhantomSource:
    """An opened entry of :class:`PhantomDisk`."""

    tier = "disk"

    def __init__(self, kv: ChunkKV) -> None:
        self.kv = kv
        self.nbytes, self.tokens, self.layers, self.start = kv.nbytes, kv.tokens, kv.layers, kv.start
        self.sums: Mapping[str, torch.Tensor] = kv.sums
        self.quantised = kv.quantised
        self.shapes = tuple(
            ((k.dtype, tuple(k.shape)), (v.dtype, tuple(v.shape)))
            for k, v in zip(kv.keys, kv.values, strict=True)
        )

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer."""
        return self.kv.keys[number], self.kv.values[number]

    def finished(self, kv: ChunkKV) -> None:
        """Nothing to count."""

    def close(self) -> None:
        """Nothing to let go of."""
