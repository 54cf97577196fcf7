"""KV rounded to eight bits at rest: half (of bf16) or a quarter (of float32) of the bytes.

Keys without RoPE vary most between channels, values between tokens: keys have one scale per head and channel,
values one per head and token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ragcachekit.model.kv import SCALE_OF_KEYS, SCALE_OF_VALUES, ChunkKV
from ragcachekit.model.packed import (
    LIKE,
    PackedKV,
    is_well_packed,
    own_sums,
    unpack,
    unpacked_layer,
    unpacked_shapes,
)
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, Tier, WrappedSource
from ragcachekit.types import ENCODING_PREFIX, KVKey
from ragcachekit_kernels.dispatch import uses_triton

KINDS: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Eight-bit kinds: torch dtype and largest number."""

EXACT_ONLY = (ENCODING_PREFIX, "path")
"""Encodings that are only reused exactly, and never rounded."""

_OVER_TOKENS, _OVER_CHANNELS = 1, 2


def pack(kv: ChunkKV, kind: str) -> ChunkKV:
    """``kv`` in eight bits, its scales among the ``sums``; ValueError for values that are not finite.

    With s = max|x| / largest over what shares a scale, the error of an element x after
    :func:`~ragcachekit.model.packed.unpack` (before the rounding to its own dtype) is at most

    - ``int8``: s / 2 = max|x| / 254;
    - ``fp8`` (e4m3, 3 bits of mantissa): |x| / 16, and s / 1024 where x is below the normal numbers.
    """
    keys, key_scales = zip(*(_round(x, kind, _OVER_TOKENS) for x in kv.keys), strict=True)
    values, value_scales = zip(*(_round(x, kind, _OVER_CHANNELS) for x in kv.values), strict=True)
    scales = {f"{SCALE_OF_KEYS}{layer}": scale for layer, scale in enumerate(key_scales)}
    scales |= {f"{SCALE_OF_VALUES}{layer}": scale for layer, scale in enumerate(value_scales)}
    like = torch.empty(0, dtype=kv.keys[0].dtype)
    return ChunkKV(keys, values, kv.start, {**kv.sums, **scales, LIKE: like})


def _round(x: torch.Tensor, kind: str, over: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight bits and the float32 scale along dimension ``over`` of ``[kv_heads, tokens, head_dim]``."""
    dtype, largest = KINDS[kind]
    wide = x.float()
    scale = wide.abs().amax(over, keepdim=True) / largest
    if not torch.isfinite(scale).all():
        raise ValueError("KV with infinities or NaN cannot be quantised")
    scaled = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(-largest, largest)
    return (scaled.round() if kind == "int8" else scaled).to(dtype), scale


class QuantisedStore(Tier):
    """A :class:`Tier` that rounds KV to eight bits, and returns it marked as rounded.

    Rounded KV has its own keys (encoding ``+int8``), so a tier without rounding, or of another kind, does not
    find it. KV that is only reused exactly passes through. Where kernels link, entries stay in eight bits
    until a kernel puts them in place.

    Parameters
    ----------
    tier : Tier
        Its budget counts rounded bytes.
    kind : {"int8", "fp8"}
    """

    def __init__(self, tier: Tier, kind: str) -> None:
        self._tier, self._kind = tier, kind
        self._device = torch.device(
            "cuda" if torch.cuda.is_available() else "cpu"
        )  # where prompts are linked
        self.shared, self.remote = tier.shared, tier.remote

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        found = self._tier.get(self._key(key), weight)
        if found is None or _exact(key):
            return found
        if not is_well_packed(found.kv.shapes, found.kv.sums):
            self.discard(key)
            return None
        return Found(self._handed_out(found.kv), found.tier)

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        opened = self._tier.open(self._key(key), weight)
        if opened is None or _exact(key):
            return opened
        if isinstance(opened, Found):
            if is_well_packed(opened.kv.shapes, opened.kv.sums):
                return Found(self._handed_out(opened.kv), opened.tier)
        elif is_well_packed(opened.shapes, opened.sums):
            return (_Packed if uses_triton(self._device) else _Unpacking)(opened, self._kind)
        else:
            opened.close()
        self.discard(key)
        return None

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """Store ``kv`` rounded; KV that cannot be rounded is refused."""
        if not _exact(key):
            try:
                kv = pack(kv, self._kind)
            except ValueError:
                return False, ()
        kept, evicted = self._tier.admit(self._key(key), kv)
        return kept, [(_plain(k), kv if _exact(k) else unpack(kv, self._kind)) for k, kv in evicted]

    def __contains__(self, key: KVKey) -> bool:
        return self._key(key) in self._tier

    def in_memory(self, key: KVKey) -> bool:
        return self._tier.in_memory(self._key(key))

    def discard(self, key: KVKey) -> None:
        self._tier.discard(self._key(key))

    def keys(self) -> Iterator[KVKey]:
        """As the tier, for entries of this kind."""
        return self._own(self._tier.keys())

    def memory_keys(self) -> Iterator[KVKey]:
        return self._own(self._tier.memory_keys())

    def _own(self, keys: Iterator[KVKey]) -> Iterator[KVKey]:
        return (_plain(key) for key in keys if self._key(_plain(key)) == key)

    def evict(self, key: KVKey) -> None:
        self._tier.evict(self._key(key))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        return self._tier.drop(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        return self._tier.stats()

    def close(self) -> None:
        self._tier.close()

    def _handed_out(self, packed: ChunkKV) -> ChunkKV:
        return (PackedKV.of if uses_triton(self._device) else unpack)(packed, self._kind)

    def _key(self, key: KVKey) -> KVKey:
        return key if _exact(key) else replace(key, encoding=f"{key.encoding}+{self._kind}")


def _exact(key: KVKey) -> bool:
    return key.encoding.partition("@")[0] in EXACT_ONLY


def _plain(key: KVKey) -> KVKey:
    return key if _exact(key) else replace(key, encoding=key.encoding.rpartition("+")[0])


class _Packed(WrappedSource):
    """A rounded entry, read layer by layer."""

    def __init__(self, source: LayerSource, kind: str) -> None:
        super().__init__(source)
        self.quantised = kind


class _Unpacking(_Packed):
    """A rounded entry, unpacked as it is read."""

    def __init__(self, source: LayerSource, kind: str) -> None:
        super().__init__(source, kind)
        self.sums = own_sums(source.sums)
        self.shapes = unpacked_shapes(source.shapes, source.sums)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return unpacked_layer(number, *super().layer(number), self._source.sums)
