"""Memory that entries are read into, used again when nobody holds its tensors any more.

Fresh memory is what reading from a warm disk would mostly wait for: the kernel clears each page when it is
first touched, at a fraction of the speed at which a file in the page cache can be copied, and allocators
give large blocks back to the kernel as soon as they are free.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.uint8]

PAGE = 4096
SMALL = 1 << 18  # bytes; below, the allocator recycles by itself
_NEAR = 8  # memory that is larger than asked for by one eighth is cut to size; larger stays for others
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Python's default is shared with forked children: each would overwrite what the others have verified."""


class Buffers:
    """Hands out byte tensors; their memory comes back when the last tensor over it is gone.

    A forked child has copies of what is in use, and begins with nothing unused.

    Parameters
    ----------
    idle : int
        Bytes that may lie here unused; what comes back beyond that goes to the system. 0: ordinary memory.
    """

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._unused = _Unused()
        # By the reference's id: a reference hashes as what it refers to, and arrays do not hash.
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` uint8 of any content; large ones begin at a page, and keep less than one page more."""
        if nbytes < SMALL or not self._idle:
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // PAGE) * PAGE
        memory = self._own().take(size, self._idle)
        if memory is None:
            memory = mmap.mmap(-1, size, **_PRIVATE)
        array = np.frombuffer(memory, np.uint8, nbytes)
        # torch keeps the array for as long as any tensor over it lives, and the array keeps the map.
        lent = weakref.ref(array, self._give)
        self._lent[id(lent)] = lent, memory
        return torch.from_numpy(array)

    def clear(self) -> None:
        """Give all that is unused back to the system."""
        self._idle = 0
        self._own().shrink(0)

    def _give(self, lent: weakref.ref[Array]) -> None:
        _, memory = self._lent.pop(id(lent), (lent, None))  # None: interrupted before it was noted
        if self._idle and memory is not None:
            self._unused.returned.append(memory)

    def _own(self) -> _Unused:
        """This process's: at a fork, another thread may have held the lock, which then stays locked."""
        unused = self._unused
        if unused.pid != os.getpid():
            unused = self._unused = _Unused()
        return unused


class _Unused:
    """Memory of one process that nobody uses."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Filled by finalizers, which run at any moment, also while this thread holds the lock.
        self.returned: deque[mmap.mmap] = deque()
        self.free: list[mmap.mmap] = []  # latest use last
        self._lock = Lock()

    def take(self, size: int, idle: int) -> mmap.mmap | None:
        """Memory of exactly ``size`` bytes, if there is some; ``idle`` bytes may be left."""
        with self._lock:
            self._collect(idle)
            for place in range(len(self.free) - 1, -1, -1):
                if size <= len(self.free[place]) <= size + size // _NEAR:
                    return _cut(self.free.pop(place), size)
        return None

    def shrink(self, idle: int) -> None:
        """Give back to the system what exceeds ``idle`` bytes."""
        with self._lock:
            self._collect(idle)

    def _collect(self, idle: int) -> None:
        while self.returned:
            self.free.append(self.returned.popleft())
        held = sum(map(len, self.free))
        while held > idle:
            held -= len(self.free.pop(0))  # unmapped with its last reference


def _cut(memory: mmap.mmap, size: int) -> mmap.mmap | None:
    """``memory`` without what exceeds ``size`` bytes, which would count in nobody's budget."""
    if len(memory) > size:
        try:
            memory.resize(size)
        except (BufferError, SystemError):  # its last user is just about to let go; or this system cannot
            return None
    return memory
