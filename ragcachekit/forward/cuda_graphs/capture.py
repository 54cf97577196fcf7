"""Capture of forwards on a GPU, and a lock under which they are replayed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ragcachekit.forward.cuda_graphs.host_waits import RefuseWaits

Run = Callable[[], torch.Tensor]

Capture = Callable[[Run], Run]
"""Makes a function over fixed memory repeatable without its Python code.

The returned function repeats the work on the memory's present content; each call overwrites its result.
"""


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool and must not run at the same time.

    The pool lives as long as one of its graphs. After a failed capture the thread's current stream is the
    earlier one.

    Parameters
    ----------
    device : torch.device
    warmups : int
        Runs before the capture on its stream: libraries choose algorithms and allocate workspaces for that
        stream, kernels are compiled and tuned. One more run checks that nothing waits for the device.
    """

    def __init__(self, device: torch.device, warmups: int = 3) -> None:
        self._device, self._warmups = device, warmups
        # torch shares streams of ordinary priority, and the work of another thread would be captured too.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, run: Run) -> Run:
        """As :data:`Capture`; ``NotCapturable`` if ``run`` waits for the device or copies to or from it.

        RuntimeError if CUDA cannot capture it for another reason.
        """
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph, out = self._captured(run)
        self._graphs.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _warm_up(self, run: Run) -> None:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(self._warmups):
                    run()
                with RefuseWaits():  # type: ignore[no-untyped-call]
                    run()
        finally:
            here.wait_stream(self._stream)  # also a failed run's memory is used again

    def _captured(self, run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        here, pool, graph = torch.cuda.current_stream(), self._pool(), torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile: only this one is captured.
        how = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with how:
                out = run()
        except BaseException:
            if torch.cuda.current_stream() != here:  # torch resets it only if it could end the capture
                torch.cuda.set_stream(here)
                _end(pool)
            raise
        return graph, out

    def _pool(self) -> Any:
        for graph in self._graphs:
            return graph.pool()
        return torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again


def _end(pool: Any) -> None:
    """End a capture for the allocator and the default generator, where torch (up to 2.12) could not.

    Otherwise the allocator fails an assertion later, and the generator refuses to make random numbers.
    """
    index = torch.cuda.current_device()
    with suppress(RuntimeError):  # ended already
        torch._C._cuda_endAllocateToPool(index, pool)
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers follow


def capture_for(device: torch.device) -> Capture | None:
    """CUDA graphs with a pool of their own; None on other devices."""
    return CudaGraphs(device) if has_graphs(device) else None


def has_graphs(device: torch.device) -> bool:
    """Whether forwards can be captured on it without a capture given in the configuration."""
    return device.type == "cuda"


class DeviceLock:
    """Mutual exclusion on the host and on the device, whatever streams the holders use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._done is not None:
                torch.cuda.current_stream(self._device).wait_event(self._done)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._device.type == "cuda":
                self._done = self._done or torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()
