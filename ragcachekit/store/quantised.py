"""KV rounded to eight bits at rest: half (of bf16) or a quarter (of float32) of the bytes.

Keys without RoPE vary most between channels, values between tokens: keys have one scale per head and channel,
values one per head and token. Packed KV has these scales among its ``sums``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ragcachekit.model.kv import SCALE_OF_KEYS, SCALE_OF_VALUES, ChunkKV, Shapes, TensorShape
from ragcachekit.store.base import Evicted, Found, KVStore, LayerSource, Pair, StoreStats
from ragcachekit.types import ENCODING_PREFIX, KVKey

KINDS: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Eight-bit kinds: torch dtype and largest number."""

EXACT_ONLY = (ENCODING_PREFIX, "path")
"""Encodings that are only reused exactly, and never rounded."""

LIKE = "like"  # name in the sums of packed KV: an empty tensor of the original dtype

_OVER_TOKENS, _OVER_CHANNELS = 1, 2

Sums = Mapping[str, torch.Tensor]


def pack(kv: ChunkKV, kind: str) -> ChunkKV:
    """``kv`` in eight bits, its scales among the ``sums``; ValueError for values that are not finite.

    With s = max|x| / largest over what shares a scale, the error of an element x after :func:`unpack` (before
    the rounding to its own dtype) is at most

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


def own_sums(sums: Sums) -> Sums:
    """Sums without scales and dtype."""
    scales = (SCALE_OF_KEYS, SCALE_OF_VALUES)
    return {name: t for name, t in sums.items() if not name.startswith(scales) and name != LIKE}


def unpacked_layer(number: int, keys: torch.Tensor, values: torch.Tensor, sums: Sums) -> Pair:
    """One layer in its original dtype."""
    dtype = sums[LIKE].dtype
    of_keys, of_values = sums[f"{SCALE_OF_KEYS}{number}"], sums[f"{SCALE_OF_VALUES}{number}"]
    return (keys.float() * of_keys).to(dtype), (values.float() * of_values).to(dtype)


def unpacked_shapes(shapes: Sequence[tuple[TensorShape, TensorShape]], sums: Sums) -> Shapes:
    """Dtype and shape of unpacked keys and values, per layer."""
    dtype = sums[LIKE].dtype
    return tuple(((dtype, keys), (dtype, values)) for (_, keys), (_, values) in shapes)


def unpack(packed: ChunkKV, kind: str) -> ChunkKV:
    """Unpacked KV in its original dtype, marked as ``quantised``."""
    layers = [unpacked_layer(i, packed.keys[i], packed.values[i], packed.sums) for i in range(packed.layers)]
    keys, values = zip(*layers, strict=True)
    return ChunkKV(keys, values, packed.start, own_sums(packed.sums), kind)


class QuantisedStore(KVStore):
    """A ``tier`` that rounds KV to eight bits (``int8``, ``fp8``), and returns it marked as rounded.

    Rounded KV has its own keys (encoding ``+int8``), so a tier without rounding, or of another kind, does not
    find it. KV that is only reused exactly passes through.
    """

    def __init__(self, tier: KVStore, kind: str) -> None:
        self._tier, self._kind, self.tiers = tier, kind, (tier,)
        self.shared, self.remote = tier.shared, tier.remote

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        opened = self._tier.open(self._key(key), weight)
        if opened is None or _exact(key):
            return opened
        if isinstance(opened, Found):
            return self._unpacked(opened)
        packed = opened
        return replace(
            packed,
            layer=lambda number: unpacked_layer(number, *packed.layer(number), packed.sums),
            shapes=unpacked_shapes(packed.shapes, packed.sums),
            sums=own_sums(packed.sums),
            quantised=self._kind,
        )

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

    def retain(self, key: KVKey, seconds: float) -> None:
        self._tier.retain(self._key(key), seconds)

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        self._tier.discard(self._key(key), damaged=damaged)

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """As the tier, for entries of this kind."""
        keys = self._tier.keys(in_memory=in_memory)
        return (_plain(key) for key in keys if self._key(_plain(key)) == key)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        return self._tier.drop(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        return self._tier.stats()

    def close(self) -> None:
        self._tier.close()

    def _unpacked(self, found: Found) -> Found:
        return Found(unpack(found.kv, self._kind), found.tier)

    def _key(self, key: KVKey) -> KVKey:
        return key if _exact(key) else replace(key, encoding=f"{key.encoding}+{self._kind}")


def _exact(key: KVKey) -> bool:
    return key.encoding.partition("@")[0] in EXACT_ONLY


def _plain(key: KVKey) -> KVKey:
    return key if _exact(key) else replace(key, encoding=key.encoding.rpartition("+")[0])
