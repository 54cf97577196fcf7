"""Row positions, key ranges and KV addresses of one forward, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ragcachekit_kernels.backend import DTYPES, uses_triton


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Ascending positions on a device, with room for more.

    A captured CUDA graph reads these tensors, and other rows are written into them before a replay. Kernels
    therefore read ``count`` from memory and do not write rows from there on.

    Attributes
    ----------
    positions : torch.Tensor
        ``[room]`` int32; entries from ``count`` on repeat the last position.
    count : torch.Tensor
        ``[1]`` int32, at least 1.
    """

    positions: torch.Tensor
    count: torch.Tensor

    @property
    def room(self) -> int:
        """Number of rows that fit, which sizes launch grids."""
        return self.positions.shape[0]


@dataclass(frozen=True, eq=False)
class Rows(Sequence[int]):
    """Ascending positions of one forward's rows, checked once and copied to a device at most once.

    Raises
    ------
    ValueError
        If the positions are not ascending or negative.
    """

    positions: tuple[int, ...]
    _placed: dict[torch.device, DeviceRows] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.positions and (self.positions[0] < 0 or any(a >= b for a, b in pairwise(self.positions))):
            raise ValueError("positions must be ascending and not negative")

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.positions[index]

    def on(self, device: torch.device) -> DeviceRows:
        """Rows on ``device``, copied there at the first call; at least one row is needed."""
        placed = self._placed.get(device)
        if placed is None:
            positions = torch.tensor(self.positions, dtype=torch.int32).to(device, non_blocking=True)
            count = torch.full((1,), len(self.positions), dtype=torch.int32, device=device)
            placed = self._placed[device] = DeviceRows(positions, count)
        return placed


def rows_within(positions: Sequence[int], tokens: int) -> Rows:
    """Rows at ``positions``; ValueError unless these are ascending within ``0..tokens - 1``."""
    rows = positions if isinstance(positions, Rows) else Rows(tuple(positions))
    if rows and rows[-1] >= tokens:
        raise ValueError(f"positions must be ascending within 0..{tokens - 1}: {rows[-1]} lies outside")
    return rows


def checked_rows(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> Rows:
    """Rows at ``positions``; ValueError unless they fit the query and the keys."""
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    return rows_within(positions, key.shape[1])


@dataclass(frozen=True, eq=False)
class Spans(Sequence[tuple[int, int]]):
    """Half-open key ranges, copied to a device at most once.

    Raises
    ------
    ValueError
        If one of them starts below 0 or ends before it starts.
    """

    ranges: tuple[tuple[int, int], ...]
    _placed: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for start, stop in self.ranges:
            if not 0 <= start <= stop:
                raise ValueError(f"the span {start}..{stop} does not go forward from 0 or later")

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.ranges[index]

    def on(self, device: torch.device) -> torch.Tensor:
        """``[spans, 2]`` int32 on ``device``; copied there at the first call."""
        placed = self._placed.get(device)
        if placed is None:
            table = torch.tensor(self.ranges, dtype=torch.int32).reshape(-1, 2)
            placed = self._placed[device] = table.to(device, non_blocking=True)
        return placed


def spans_within(spans: Sequence[tuple[int, int]], tokens: int) -> Spans:
    """Spans; ValueError unless each goes forward within ``0..tokens``."""
    checked = spans if isinstance(spans, Spans) else Spans(tuple(spans))
    for start, stop in checked:
        if stop > tokens:
            raise ValueError(f"the span {start}..{stop} does not lie within {tokens} keys")
    return checked


@dataclass(frozen=True, eq=False)
class KVTable:
    """Addresses of one request's keys and values per layer, for kernels of a captured graph.

    The graph reads this table: another request's addresses are written into it before a replay.

    Attributes
    ----------
    entries : torch.Tensor
        ``[layers, 4]`` int64 on the device: address of the keys and of the values, and the head strides of
        both, in elements. Buffers are ``[kv_heads, slots, dim]`` with contiguous rows; addresses and
        strides are multiples of 16 bytes.
    dtype : torch.dtype
        Of keys and values.
    """

    entries: torch.Tensor
    dtype: torch.dtype

    def check(self, *tensors: torch.Tensor) -> None:
        """ValueError unless kernels run on ``tensors``: torch cannot read addresses from memory."""
        if not uses_triton(tensors[0].device):
            raise ValueError(f"a KV table needs Triton, which does not run on {tensors[0].device}")
        types = [self.dtype, *(tensor.dtype for tensor in tensors)]
        if set(types) - set(DTYPES):
            raise ValueError(f"a KV table is for bfloat16, float16 or float32, not for {types}")
