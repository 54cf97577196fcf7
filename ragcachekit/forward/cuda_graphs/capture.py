"""How a forward is captured on a GPU, and how its replays keep out of each other's way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

import torch

from ragcachekit.forward.cuda_graphs.host_waits import RefuseWaits


class Capture(Protocol):
    """Makes a function over fixed memory repeatable without its Python code."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What does ``run``'s work again, on whatever its memory holds then, and gives its result.

        The result's memory is overwritten by the next call.
        """
        ...


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory: they must not run at the same time.

    The pool lives as long as one of its graphs; another object has another pool. If a capture fails, the
    thread's current stream is again what it was.

    Parameters
    ----------
    device : torch.device
    warmups : int
        Runs before the capture, on the stream that it is made on: libraries choose their algorithms and
        allocate their workspaces for that stream there, kernels are compiled and tuned. One more run sees
        to it that nothing waits for the device.
    """

    def __init__(self, device: torch.device, warmups: int = 3) -> None:
        self._device, self._warmups = device, warmups
        # A high priority has streams of its own: torch deals out the ordinary ones in turn, again and again,
        # and what another thread enqueued on this one during a capture would become part of the graph.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """As :meth:`Capture.__call__`.

        Raises
        ------
        NotCapturable
            If ``run`` waits for the device, or copies between it and the host.
        RuntimeError
            If CUDA cannot capture it for another reason.
        """
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph, out = self._captured(run)
        self._graphs.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _warm_up(self, run: Callable[[], torch.Tensor]) -> None:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(self._warmups):
                    run()
                with RefuseWaits():  # type: ignore[no-untyped-call]
                    run()
        finally:
            # Memory that a run which failed worked on is used again behind it, too.
            here.wait_stream(self._stream)

    def _captured(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        here, pool, graph = torch.cuda.current_stream(), self._pool(), torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile: only what this one does is captured.
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
        """That of the living graphs: a pool without any cannot be captured into again."""
        for graph in self._graphs:
            return graph.pool()
        return torch.cuda.graph_pool_handle()


def _end(pool: Any) -> None:
    """Do what torch leaves undone if it cannot end a capture, on the current device.

    Its allocator (of torch 2.12 and older) believes that the capture goes on, and fails an assertion later;
    the default generator believes it too, and refuses to make random numbers.
    """
    index = torch.cuda.current_device()
    with suppress(RuntimeError):  # it has been done
        torch._C._cuda_endAllocateToPool(index, pool)
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers follow


def capture_for(device: torch.device) -> Capture | None:
    """CUDA graphs with memory of their own, where there are any."""
    return CudaGraphs(device) if has_graphs(device) else None


def has_graphs(device: torch.device) -> bool:
    """Whether forwards can be captured on it without a capture given in the configuration."""
    return device.type == "cuda"


class DeviceLock:
    """One at a time, on the host and on the device, whatever streams the holders work on."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._device.type == "cuda":
                self._done = self._done or torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(torch.cuda.current_stream(self._device))
        finally:
            self._lock.release()
