"""A Bloom filter of the chunks that a replica holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_BITS_PER_ID, _MOST_HASHES = 10, 7  # 0.8 % false positives
_LEAST_BYTES = 64  # small filters hit by chance more often
_WORD = (1 << 64) - 1

Hashed = tuple[int, int]
"""Two 64-bit numbers of an id."""


def hashed(name: str) -> Hashed:
    """Hash an id, once for all filters that it is looked up in."""
    raw = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")


class ChunkFilter:
    """Set of ids in ten bits each: finds all of them, and 0.8 % of others.

    Parameters
    ----------
    bits : bytes
        The filter's bits, at least one byte.
    hashes : int
        Bits that each id sets.
    """

    def __init__(self, bits: bytes, hashes: int) -> None:
        self._bits, self._hashes = bits, hashes

    @classmethod
    def of(cls, ids: Iterable[str], most_bytes: int = 64 << 10) -> ChunkFilter:
        """The filter of ``ids``; with more than fit into ``most_bytes``, false positives become frequent."""
        raw = b"".join(hashlib.sha256(one.encode()).digest()[:16] for one in ids)
        words = np.frombuffer(raw, "<u8").reshape(-1, 2)
        count = max(len(words), 1)
        size = 8 * min(max(-(-_BITS_PER_ID * count // 8), _LEAST_BYTES), most_bytes)
        hashes = min(_MOST_HASHES, max(1, round(size / count * math.log(2))))
        bits = np.zeros(size, bool)
        for number in range(hashes):
            bits[(words[:, 0] + np.uint64(number) * words[:, 1]) % np.uint64(size)] = True
        return cls(np.packbits(bits, bitorder="little").tobytes(), hashes)

    def holds(self, one: Hashed) -> bool:
        """Whether the id with these hashes is probably among those of the filter."""
        size = 8 * len(self._bits)
        for number in range(self._hashes):
            at = ((one[0] + number * one[1]) & _WORD) % size
            if not self._bits[at >> 3] >> (at & 7) & 1:
                return False
        return True

    def __contains__(self, one: str) -> bool:
        return self.holds(hashed(one))

    def stats(self) -> dict[str, Any]:
        """The filter as routing stats of Ray Serve."""
        return {"chunk_bits": self._bits, "chunk_hashes": self._hashes}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> ChunkFilter | None:
        """The filter in routing stats; None where there is none, or it is of another form."""
        bits, hashes = stats.get("chunk_bits"), stats.get("chunk_hashes")
        if not isinstance(bits, bytes) or not bits or not isinstance(hashes, int):
            return None
        return cls(bits, hashes)
