"""The rows of one forward, and where a request's keys and values lie, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Ascending positions on a device, with room for more.

    A captured CUDA graph keeps these very tensors and is replayed after writing other rows into them, so
    kernels read ``count`` from memory and leave the rows from there on alone.

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
        """Rows that there is room for: what grids are sized by."""
        return self.positions.shape[0]


@dataclass(frozen=True, eq=False)
class Rows(Sequence[int]):
    """Ascending positions of the rows of one forward, checked once, put on a device at most once.

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
        """These rows on ``device``; copied there at the first call. There must be at least one."""
        placed = self._placed.get(device)
        if placed is None:
            positions = torch.tensor(self.positions, dtype=torch.int32).to(device, non_blocking=True)
            count = torch.full((1,), len(self.positions), dtype=torch.int32, device=device)
            placed = self._placed[device] = DeviceRows(positions, count)
        return placed


@dataclass(frozen=True, eq=False)
class KVTable:
    """Where each layer's keys and values of one request lie, for kernels of a captured graph.

    The graph keeps this table and not the buffers: another request's addresses are written into it before
    a replay.

    Attributes
    ----------
    entries : torch.Tensor
        ``[layers, 4]`` int64 on the device: address of the keys, address of the values, and how many
        elements lie between two KV heads of either. Buffers are ``[kv_heads, slots, dim]`` with
        contiguous rows and addresses and strides that are multiples of 16 bytes.
    dtype : torch.dtype
        Of keys and values.
    """

    entries: torch.Tensor
    dtype: torch.dtype
