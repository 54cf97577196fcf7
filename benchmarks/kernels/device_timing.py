"""Time calls on a device, with what that device can do at best measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.errors import RagCacheError

Call = Callable[[], object]

WARM_UP = 3
"""Calls of each input set before any is timed: compilation, handles and clocks."""


@dataclass(frozen=True)
class Samples:
    """Milliseconds per call."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.ms)


def timed(calls: Sequence[Call], runs: int, device: torch.device, *, graphs: bool = False) -> Samples:
    """Time ``runs`` calls, going round ``calls``: one call per set of inputs.

    On a GPU, events are recorded before and after each call on the current stream, and nothing is waited for
    until the end. With ``graphs`` each call is captured and its replays are timed, so that a short kernel's
    time is not that of its launch; such calls must not wait for the device. Give as many sets of inputs as it
    takes to exceed the cache. RagCacheError if a call cannot be captured: begin a new process then.
    """
    for _ in range(WARM_UP):
        for call in calls:
            call()
    if device.type != "cuda":
        return Samples(tuple(_clocked(calls[i % len(calls)]) for i in range(runs)))
    torch.cuda.synchronize(device)
    if graphs:
        calls = [_captured(call) for call in calls]
    new: Any = torch.cuda.Event
    events = [(new(enable_timing=True), new(enable_timing=True)) for _ in range(runs)]
    for number, (begun, ended) in enumerate(events):
        begun.record()
        calls[number % len(calls)]()
        ended.record()
    torch.cuda.synchronize(device)
    return Samples(tuple(begun.elapsed_time(ended) for begun, ended in events))


def _captured(call: Call) -> Call:
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        raise RagCacheError(
            f"a call that is measured cannot be captured as a graph: {error}; measure without graphs"
        ) from error
    replay: Call = graph.replay
    replay()
    return replay


def _clocked(call: Call) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: a large matrix product in the bench's dtype, and a large copy.

    In 10^12 operations per second, and 10^9 bytes per second, read and written ones together.
    """

    tflops: float
    gb_per_s: float

    def of(self, unit: str) -> float:
        """The ceiling in ``unit``: ``TFLOP/s`` or ``GB/s``."""
        return {"TFLOP/s": self.tflops, "GB/s": self.gb_per_s}[unit]


def ceilings(device: torch.device, dtype: torch.dtype, runs: int, seed: int) -> Ceilings:
    """Measure both. Random numbers, not zeros: a GPU multiplies zeros faster."""
    random = torch.Generator(device).manual_seed(seed)
    width, nbytes = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 27)
    a, b = (torch.randn(width, width, generator=random, device=device).to(dtype) for _ in range(2))
    product = timed([lambda: a @ b], runs, device)
    source = torch.randint(127, (nbytes,), generator=random, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], runs, device)
    return Ceilings(2 * width**3 / product.median / 1e9, 2 * nbytes / copy.median / 1e6)
