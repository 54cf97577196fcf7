"""How a forward is captured on a GPU, and how its replays keep out of each other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch


class Capture(Protocol):
    """Makes a function over fixed memory repeatable without its Python code."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What does ``run``'s work again, on whatever its memory holds then, and gives its result.

        The result's memory is overwritten by the next call.
        """
        ...


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory: they must not run at the same time.

    Parameters
    ----------
    device : torch.device
    warmups : int
        Runs on a side stream before the capture: libraries choose their algorithms and allocate their
        workspaces there, kernels are compiled and tuned.
    """

    def __init__(self, device: torch.device, warmups: int = 3) -> None:
        self._device, self._warmups = device, warmups
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """As :meth:`Capture.__call__`."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                for _ in range(self._warmups):
                    run()
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate and copy meanwhile: only what this one does is captured.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def capture_for(device: torch.device) -> Capture | None:
    """CUDA graphs, where there are any."""
    return CudaGraphs(device) if device.type == "cuda" else None


class DeviceLock:
    """One at a time, on the host and on the device, whatever streams the holders work on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._device.type == "cuda":
                self._done = self._done or torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()
