"""Capture of forwards on a GPU, and a lock under which they are replayed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

_aten = torch.ops.aten
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKING = {_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}

Run = Callable[[], torch.Tensor]

Capture = Callable[[Run], Run]
"""Makes a function over fixed memory repeatable without its Python code.

The returned function repeats the work on the memory's present content; each call overwrites its result.
"""


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool and must not run at the same time.

    The pool lives as long as one of its graphs. After a failed capture the thread's current stream is the
    earlier one.

    ``warmups`` are runs before the capture on its stream: libraries choose algorithms and allocate workspaces
    for that stream, kernels are compiled and tuned. One more run checks that nothing waits for the device.
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


class RefuseWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for operations of this thread that wait for the device or copy between it and the host.

    Only torch's operations on tensors are checked, not libraries below them nor waits for events.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or raise :class:`NotCapturable`."""
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise NotCapturable(f"its forward makes the host wait for the device ({func})")
        if _copies(func, args, kwargs):
            raise NotCapturable(f"its forward copies between host and device ({func})")
        return func(*args, **kwargs)


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is _aten.index.Tensor:
        return bool(_masks(args[1]))
    if func in _MASKING:
        masks, given, value = _masks(args[1]), [at for at in args[1] if at is not None], args[2]
        # With one mask and one number of the host torch fills by the mask, without reading it.
        return bool(masks) and not (len(masks) == len(given) and value.numel() == 1 and value.is_cpu)
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool(_WAITING.intersection(func.tags))


def _copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is _aten._to_copy.default:
        to = kwargs.get("device")
        return to is not None and torch.device(to).type != args[0].device.type
    if func is _aten.copy_.default:
        return bool(args[0].device.type != args[1].device.type)
    # torch.tensor(numbers, device=...) passes its copied result through this.
    return func is _aten.lift_fresh.default and not args[0].is_cpu


def _masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
