"""Row positions of one forward and the addresses of a request's KV, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch


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


def checked_rows(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> Rows:
    """Rows at ``positions``; ValueError unless they fit the query and the keys."""
    if len(positions) != query.shape[1]:
        raise ValueError(f"{query.shape[1]} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    known = isinstance(positions, Rows) or all(a < b for a, b in pairwise(positions))
    if not known or (len(positions) and not 0 <= positions[0] <= positions[-1] < key.shape[1]):
        raise ValueError(f"positions must be ascending within 0..{key.shape[1] - 1}")
    return positions if isinstance(positions, Rows) else Rows(tuple(positions))


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
