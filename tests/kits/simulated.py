"""A device in memory whose two queues run in any order that the events between them allow.

What is enqueued is done later, one tensor at a time, when a schedule says so. Memory that nobody has written
is NaN; memory that was given back is NaN again, and so are sources that were let go. A wait that is missing
is wrong bytes, or a fault, under some schedule.
"""

from __future__ import annotations

import random
import weakref
from collections import deque

import numpy as np
import torch

COPY, COMPUTE = "copy", "compute"


class SimulatedEvent:
    def __init__(self, device, lane):
        self.device, self.tick = device, None
        device.enqueue(lane, self._reach)

    def _reach(self):
        self.tick = self.device.ticks

    def query(self):
        return self.tick is not None

    def synchronize(self):
        self.device.run(lambda: self.tick is not None)


class Memory:
    """Bytes that outlive the tensor over them, which is how it is seen that it went too early."""

    def __init__(self, nbytes, gone):
        self.bytes = bytearray(b"\xff" * (nbytes + 256))
        skip = -np.frombuffer(self.bytes, np.uint8).ctypes.data % 256
        array = np.frombuffer(self.bytes, np.uint8, nbytes, skip)
        self.view = memoryview(self.bytes)[skip : skip + nbytes]
        self.start = array.ctypes.data
        self.alive = True
        self.tensor = torch.from_numpy(array)
        weakref.finalize(array, self._free, gone).atexit = False

    def hand_out(self):
        """Its only strong reference to the tensor goes."""
        tensor, self.tensor = self.tensor, None
        return tensor

    def _free(self, gone):
        self.alive = False
        self.view[:] = b"\xff" * len(self.view)
        gone(self)

    def part(self, tensor):
        at = tensor.data_ptr() - self.start
        return self.view[at : at + tensor.numel() * tensor.element_size()]


class Simulated:
    """Stands in for :class:`ragcachekit.forward.copy_streams.Streams`.

    Parameters
    ----------
    schedule : {"copies first", "computing first", "last moment"} or int
        Which queue runs where both could; "last moment": nothing before somebody waits for it, then as few
        copies as possible. An int is the seed of a random order.
    at_once : bool
        What computes has been done when :meth:`compute` returns (for models that run right behind).
    deaf : str
        A queue that does not wait for events: what the tests must notice.
    """

    def __init__(self, schedule="last moment", at_once=False, deaf=""):
        self.schedule, self.at_once, self.deaf = schedule, at_once, deaf
        self.random = random.Random(schedule)
        self.lanes = {COPY: deque(), COMPUTE: deque()}
        self.memories: list[Memory] = []
        self.faults: list[str] = []
        self.ticks = 0
        self.allocated: list[int] = []
        self.copied = 0

    # -- Streams ---------------------------------------------------------------------------------

    def holds(self, tensor):
        memory = self._memory(tensor)
        return memory is not None and memory.device

    def new(self, nbytes):
        self.allocated.append(nbytes)
        return self._new(nbytes, True)

    def copy(self, moves, after=None):
        if after is not None and self.deaf != COPY:
            self.enqueue(COPY, after)
        for into, source in moves:
            assert into.is_contiguous()
            assert into.shape == source.shape
            assert into.dtype == source.dtype
            self.copied += into.numel() * into.element_size()
            self.enqueue(COPY, self._move(into, source))
        event = SimulatedEvent(self, COPY)
        self._go_on()
        return event

    def compute(self, work, after=None):
        if after is not None and self.deaf != COMPUTE:
            self.enqueue(COMPUTE, after)
        self.enqueue(COMPUTE, work)
        event = SimulatedEvent(self, COMPUTE)
        self._go_on()
        if self.at_once:
            event.synchronize()
        return event

    def mark(self):
        return SimulatedEvent(self, COMPUTE)

    def seconds(self, first, last):
        return float(last.tick - first.tick) if last.query() else None

    # -- memory ----------------------------------------------------------------------------------

    def put(self, tensor, device):
        """A copy of ``tensor`` whose end is noticed, in the device's memory or in the host's."""
        memory = self._new(tensor.numel() * tensor.element_size(), device)
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _new(self, nbytes, device):
        memory = Memory(nbytes, self.memories.remove)
        memory.device = device
        self.memories.append(memory)
        return memory.hand_out()

    def _memory(self, tensor):
        at = tensor.data_ptr()
        return next((m for m in self.memories if m.start <= at < m.start + len(m.view)), None)

    def _move(self, into, source):
        to, origin = self._memory(into), self._memory(source)
        target = to.part(into)
        if origin is None:  # not ours to watch
            given = source.contiguous().view(-1).view(torch.uint8).numpy()
        else:
            given = origin.part(source)

        def move():
            if not to.alive:
                self.faults.append("copied into memory that was given back")
            if origin is not None and not origin.alive:
                self.faults.append("copied from a source that was let go")
            target[:] = memoryview(given).cast("B")

        return move

    # -- time ------------------------------------------------------------------------------------

    def enqueue(self, lane, step):
        self.lanes[lane].append(step)

    def finish(self):
        self.run(lambda: not any(self.lanes.values()))

    def run(self, until):
        while not until():
            ready = [lane for lane in (COPY, COMPUTE) if self._ready(lane)]
            assert ready, "both queues wait for each other"
            self._step(self._pick(ready))

    def _pick(self, ready):
        if isinstance(self.schedule, int):
            return self.random.choice(ready)
        return ready[0] if self.schedule == "copies first" else ready[-1]

    def _go_on(self):
        """What happens while the host goes on: one queue as far as it gets, or a few steps of any."""
        lanes = {"copies first": (COPY,), "computing first": (COMPUTE,), "last moment": ()}
        lanes = lanes.get(self.schedule, (COPY, COMPUTE))
        steps = self.random.randrange(12) if isinstance(self.schedule, int) else 1 << 30
        while steps and (ready := [lane for lane in lanes if self._ready(lane)]):
            self._step(self._pick(ready))
            steps -= 1

    def _ready(self, lane):
        if not self.lanes[lane]:
            return False
        step = self.lanes[lane][0]
        return step.query() if isinstance(step, SimulatedEvent) else True

    def _step(self, lane):
        step = self.lanes[lane].popleft()
        self.ticks += 1
        if not isinstance(step, SimulatedEvent):
            step()


SCHEDULES = ("copies first", "computing first", "last moment", *range(3))
