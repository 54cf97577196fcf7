"""torch.cuda without a GPU, as far as capturing goes: streams, graphs and what fails there, written down.

``torch.cuda.graph`` is torch's own: that it leaves its stream current if ending a capture fails is its doing.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch


class FakeCuda:
    """Stands where torch.cuda does once ``install`` has been called."""

    def __init__(self):
        self.calls = []
        self.streams = []
        self.pools = 0
        self.graphs = []
        self.begins = self.ends = None  # an error to raise there
        self.current = Stream(self)
        self.default_generators = (Generator(self.calls),)

    def install(self, monkeypatch):
        """For one test."""
        for name in ("current_stream", "set_stream", "stream", "graph_pool_handle", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: Stream(self, *args, **kwargs))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "default_generators", self.default_generators)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False)
        return self

    def current_stream(self, device=None):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    def synchronize(self, device=None):
        pass

    def stream(self, stream):
        return StreamContext(self, stream)

    @contextmanager
    def device(self, device):
        yield

    def graph_pool_handle(self):
        self.pools += 1
        return (0, self.pools)

    def end_allocation(self, device, pool):
        self.calls.append(("end allocation", device, pool))


class Stream:
    def __init__(self, cuda, device=None, priority=0):
        self.cuda, self.priority = cuda, priority
        cuda.streams.append(self)

    def wait_stream(self, other):
        self.cuda.calls.append(("wait", self, other))


class StreamContext:
    """As torch's: only its exit resets the stream."""

    def __init__(self, cuda, stream):
        self.cuda, self.stream = cuda, stream

    def __enter__(self):
        self.before = self.cuda.current
        self.cuda.current = self.stream

    def __exit__(self, *error):
        self.cuda.current = self.before


class Graph:
    """Runs nothing: a replay leaves what the capture computed."""

    def __init__(self, cuda):
        self.cuda, self.taken, self.replays = cuda, None, 0

    def capture_begin(self, pool=None, capture_error_mode="global", **_):
        if self.cuda.begins is not None:
            raise self.cuda.begins
        assert capture_error_mode == "thread_local"
        self.taken = pool
        self.cuda.graphs.append((pool, self.cuda.current))

    def capture_end(self):
        if self.cuda.ends is not None:
            raise self.cuda.ends

    def pool(self):
        return self.taken

    def replay(self):
        self.replays += 1


class Generator:
    def __init__(self, calls):
        self.calls = calls

    def clone_state(self):
        return "a clone"

    def graphsafe_set_state(self, state):
        self.calls.append(("generator", state))
