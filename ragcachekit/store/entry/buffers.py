"""Reusable memory for reading entries. Fresh pages, which the kernel clears, cost more than a warm read."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.uint8]

PAGE = 4096
SMALL = 1 << 18  # bytes; below, the allocator reuses memory itself
_NEAR = 8  # memory larger by up to one eighth is taken


class Buffers:
    """Byte tensors whose memory is reused once the last tensor over it is freed.

    At most ``idle`` unused bytes are kept; with 0, tensors are in ordinary memory.
    """

    def __init__(self, idle: int) -> None:
        self._idle = idle
        # By the reference's id: a reference hashes as what it refers to, and arrays do not hash.
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}
        # Filled by finalizers, which run at any moment, also while this thread holds the lock.
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []  # latest use last
        self._lock = Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` uint8 of any content; large ones begin at a page."""
        if nbytes < SMALL or not self._idle:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // PAGE) * PAGE
        memory = self._recycled(size) or _fresh(size)
        array = np.frombuffer(memory, np.uint8, nbytes)
        # Tensors hold the array, and the array holds the map.
        lent = weakref.ref(array, self._give)
        self._lent[id(lent)] = lent, memory
        return torch.from_numpy(array)

    def clear(self) -> None:
        """Free unused memory."""
        self._idle = 0
        with self._lock:
            self._collect()

    def _give(self, lent: weakref.ref[Array]) -> None:
        _, memory = self._lent.pop(id(lent), (lent, None))  # None: interrupted
        if self._idle and memory is not None:
            self._returned.append(memory)

    def _recycled(self, size: int) -> mmap.mmap | None:
        with self._lock:
            self._collect()
            for place in range(len(self._free) - 1, -1, -1):
                if size <= len(self._free[place]) <= size + size // _NEAR:
                    return self._free.pop(place)
        return None

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        held = sum(map(len, self._free))
        while held > self._idle:
            held -= len(self._free.pop(0))  # unmapped with its last reference


def _fresh(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    # Python's default is shared with forked children, which would overwrite verified bytes.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
