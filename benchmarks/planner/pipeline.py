"""A prefill whose chunks load while it computes, event by event: what planning is judged by.

Knows nothing of the planner's formula: readers take layers one by one, share one channel, and the model
waits for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Medium:
    """A storage tier: seconds before a read's first byte, and bytes per second of all reads together."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """A model's prefill: ``fixed + per_row * rows + per_pair * pairs`` seconds, over ``layers`` layers."""

    layers: int
    fixed: float
    per_row: float
    per_pair: float

    def seconds(self, cached: float, rows: float) -> float:
        """Of ``rows`` behind ``cached`` ones: every row attends to all before it."""
        return self.fixed + self.per_row * rows + self.per_pair * rows * (cached + rows / 2)


@dataclass(frozen=True)
class Read:
    """One read as it went: how long it took, and the bytes of others that were in work when it began."""

    nbytes: float
    seconds: float
    beside: float


def read_layers(
    sizes: Sequence[float], layers: int, medium: Medium, readers: int
) -> tuple[list[float], list[Read]]:
    """When each layer of all entries is there, and every read; ``sizes`` are bytes per layer and entry.

    Layer 0 of all entries first. A reader waits for the latency, then for the channel, which is one.
    """
    free, channel, about = [0.0] * readers, 0.0, [0.0] * readers
    done, reads = [0.0] * len(sizes), list[Read]()
    ready = []
    for _ in range(layers):
        for entry, nbytes in enumerate(sizes):
            reader = min(range(readers), key=free.__getitem__)
            begun = max(free[reader], done[entry])  # an entry is read by one reader at a time
            beside = sum(about[i] for i in range(readers) if i != reader and free[i] > begun)
            ended = max(begun + medium.latency, channel) + nbytes / medium.bandwidth
            free[reader] = done[entry] = channel = ended
            about[reader] = nbytes
            reads.append(Read(nbytes, ended - begun, beside))
        ready.append(max(done, default=0.0))
    return ready, reads


def prefill_seconds(
    sizes: Sequence[float],
    cached: int,
    rows: int,
    machine: Machine,
    medium: Medium,
    readers: int,
    chosen: int | None = None,
) -> float:
    """Until the last layer is computed, where each begins when it is loaded and the one before is done.

    ``chosen``: the rows run over the cached ones twice, the second time together with so many of these,
    which the first pass has chosen. None: one pass, nothing is chosen.
    """
    ready, _ = read_layers(sizes, machine.layers, medium, readers)
    passes = [(cached, rows)] if chosen is None else [(cached, rows), (cached - chosen, rows + chosen)]
    now = 0.0
    for behind, new in passes:
        step = machine.seconds(behind, new) / machine.layers
        for at in ready:
            now = max(now, at) + step
    return now
