"""Memory that entries are read into, used again when nobody holds its tensors any more.

Fresh memory is what reading from a warm disk would mostly wait for: the kernel clears each page when it is
first touched, at a fraction of the speed at which a file in the page cache can be copied, and allocators
give large blocks back to the kernel as soon as they are free.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from threading import Lock

import numpy as np
import torch

PAGE = 4096
_SMALL = 1 << 18  # below, the allocator recycles by itself
_SLACK = 8  # a buffer may be larger than asked for by one eighth


class Buffers:
    """Hands out byte tensors; their memory comes back when the last tensor over it is gone.

    Parameters
    ----------
    idle : int
        Bytes that may lie here unused; what comes back beyond that goes to the system. 0: ordinary memory.
    """

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._lock = Lock()
        self._free: list[mmap.mmap] = []  # latest use last
        # Filled by finalizers, which run at any moment, also while this thread holds the lock.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` uint8 of any content; large ones begin at a page."""
        if nbytes < _SMALL or not self._idle:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._collect()
            memory = self._fitting(size)
        if memory is None:
            memory = mmap.mmap(-1, size)
        array = np.frombuffer(memory, np.uint8)
        # torch keeps the array for as long as any tensor over it lives, and the array keeps the map.
        weakref.finalize(array, self._give, memory).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def clear(self) -> None:
        """Give all that is unused back to the system."""
        with self._lock:
            self._idle = 0
            self._collect()

    def _give(self, memory: mmap.mmap) -> None:
        if self._idle:
            self._returned.append(memory)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        idle = sum(map(len, self._free))
        while idle > self._idle:
            idle -= len(self._free.pop(0))  # unmapped with its last reference

    def _fitting(self, size: int) -> mmap.mmap | None:
        for place in range(len(self._free) - 1, -1, -1):
            if size <= len(self._free[place]) <= size + size // _SLACK:
                return self._free.pop(place)
        return None
