"""Key ranges, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


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

    @property
    def longest(self) -> int:
        """Length of the longest span, 0 without spans."""
        return max((stop - start for start, stop in self.ranges), default=0)

    def on(self, device: torch.device) -> torch.Tensor:
        """``[spans, 2]`` int32 on ``device``; copied there at the first call."""
        placed = self._placed.get(device)
        if placed is None:
            table = torch.tensor(self.ranges, dtype=torch.int32).reshape(-1, 2)
            placed = self._placed[device] = table.to(device, non_blocking=True)
        return placed
