"""Two queues of work on one device: kernels, and copies to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Move = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy."""


class Event:
    """A point in a queue, reached when all work enqueued before it is done. This one is reached already."""

    def query(self) -> bool:
        """Whether it is reached."""
        return True

    def synchronize(self) -> None:
        """Wait for it on the host."""


class Streams:
    """A queue of kernels and a queue of copies; each runs in its order.

    Only the events given as ``after`` order one queue against the other. Memory from :meth:`new` belongs to
    the compute queue, which may use it again as soon as it is released: wait first for copies into it.
    This class, for devices without streams, does everything at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on the device."""
        at = tensor.device
        return at.type == self._device.type and self._device.index in (None, at.index)

    def new(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory of the device, uint8, beginning at a multiple of 16 bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, moves: Sequence[Move], after: Event | None = None) -> Event:
        """Enqueue copies to the device behind ``after``; the event is reached when they have landed.

        Sources have to stay unchanged until then.
        """
        for into, source in moves:
            into.copy_(source)
        return Event()

    def compute(self, work: Callable[[], object], after: Event | None = None) -> Event:
        """Enqueue the kernels that ``work`` launches behind ``after``; the event is reached after them."""
        work()
        return Event()

    def mark(self) -> Event:
        """An event at the present end of the compute queue."""
        return Event()

    def seconds(self, first: Event, last: Event) -> float | None:
        """Device time between two events of the compute queue; None where unknown or not yet known."""
        return None


class CudaStreams(Streams):
    """The caller's current stream, and one for copies.

    Copies from page-locked memory return at once. From other memory the driver keeps the host busy until it
    has read the source; the order is the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, moves: Sequence[Move], after: Any = None) -> Event:
        """On the stream for copies."""
        if after is not None:
            self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            for into, source in moves:
                into.copy_(source, non_blocking=True)
        return _recorded(self._copies, timed=False)

    def compute(self, work: Callable[[], object], after: Any = None) -> Event:
        """On the current stream."""
        if after is not None:
            torch.cuda.current_stream(self._device).wait_event(after)
        work()
        return self.mark()

    def mark(self) -> Event:
        """A timed event on the current stream."""
        return _recorded(torch.cuda.current_stream(self._device), timed=True)

    def seconds(self, first: Any, last: Any) -> float | None:
        """By the GPU's clock, once both are reached."""
        return float(first.elapsed_time(last)) / 1e3 if first.query() and last.query() else None


def _recorded(stream: Any, timed: bool) -> Event:
    event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event  # type: ignore[no-any-return]


def streams_of(device: torch.device) -> Streams:
    """Queues for one request."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)
