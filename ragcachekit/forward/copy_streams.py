"""Two queues of work on one device: what is computed, and what is copied to it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Move = tuple[torch.Tensor, torch.Tensor]
"""Where to, and from where."""


class Event(Protocol):
    """A point in one of the queues, reached when all that was enqueued before it is done."""

    def query(self) -> bool:
        """Whether it is reached."""
        ...

    def synchronize(self) -> Any:
        """Wait for it on the host."""
        ...


class Streams(Protocol):
    """A queue of kernels and a queue of copies. What is enqueued runs later, each queue in its order.

    Nothing but the events given as ``after`` orders one queue against the other. Memory from :meth:`new`
    belongs to the compute queue: let go of it, it may be used again by whatever is enqueued there next,
    so a copy that is still on its way into it has to be waited for first.
    """

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether kernels read it where it lies."""
        ...

    def new(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, uint8 of any content, beginning at a multiple of 16 bytes."""
        ...

    def copy(self, moves: Sequence[Move], after: Event | None = None) -> Event:
        """Enqueue copies to the device behind ``after``; the event is reached when they have landed.

        Sources have to stay as they are until then.
        """
        ...

    def compute(self, work: Callable[[], object], after: Event | None = None) -> Event:
        """Enqueue what ``work`` launches behind ``after``; the event is reached when that is done."""
        ...

    def mark(self) -> Event:
        """The compute queue as it is now."""
        ...

    def seconds(self, first: Event, last: Event) -> float | None:
        """Time of the device between two events of the compute queue; None where it is not known (yet)."""
        ...


class CudaStreams:
    """The caller's current stream, and one for copies.

    Copies from page-locked memory return at once. From other memory the driver copies through a
    page-locked buffer of its own: the host is busy until it has read the source, the copy as such is
    ordered just the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on this GPU."""
        at = tensor.device
        return at.type == self._device.type and self._device.index in (None, at.index)

    def new(self, nbytes: int) -> torch.Tensor:
        """From torch's allocator, for the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

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
        """An event that knows the time."""
        return _recorded(torch.cuda.current_stream(self._device), timed=True)

    def seconds(self, first: Any, last: Any) -> float | None:
        """By the GPU's clock, once both are reached."""
        return float(first.elapsed_time(last)) / 1e3 if first.query() and last.query() else None


def _recorded(stream: Any, timed: bool) -> Event:
    event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event  # type: ignore[no-any-return]


class _Reached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class OneQueue:
    """Everything at once and in the order in which it is asked for: devices without streams of ours."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on the device."""
        at = tensor.device
        return at.type == self._device.type and self._device.index in (None, at.index)

    def new(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, moves: Sequence[Move], after: Event | None = None) -> Event:
        """Now."""
        for into, source in moves:
            into.copy_(source)
        return _Reached()

    def compute(self, work: Callable[[], object], after: Event | None = None) -> Event:
        """Now."""
        work()
        return _Reached()

    def mark(self) -> Event:
        """Reached."""
        return _Reached()

    def seconds(self, first: Event, last: Event) -> float | None:
        """Not known: the host's clock has it."""
        return None


def streams_of(device: torch.device) -> Streams:
    """Queues for one request."""
    return CudaStreams(device) if device.type == "cuda" else OneQueue(device)
