"""What is asked of CUDA, and in which order; the orders themselves are tried on a simulated device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from ragcachekit.forward.copy_streams import CudaStreams, Streams, streams_of

GPU = torch.device("cuda")


class Calls(list):
    """Stands where torch.cuda does and writes down what it is asked for."""

    def __init__(self, monkeypatch):
        calls = self

        class Event:
            def __init__(self, enable_timing=False):
                self.timed, self.reached = enable_timing, False

            def record(self, stream):
                calls.append(("record", stream.name, self.timed))

            def query(self):
                return self.reached

            def elapsed_time(self, other):
                assert self.timed
                assert other.timed
                return 250.0

        class Stream:
            name = "copies"

            def __init__(self, device=None):
                assert device == GPU

            def wait_event(self, event):
                calls.append(("wait", self.name))

        class Current(Stream):
            name = "current"

        @contextmanager
        def stream(on):
            calls.append(("enter", on.name))
            yield
            calls.append(("leave", on.name))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current(device))


class Target:
    def __init__(self, calls):
        self.calls = calls

    def copy_(self, source, non_blocking=False):
        self.calls.append(("copy", source, non_blocking))


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def test_copies_go_to_their_own_stream_behind_what_they_wait_for(calls):
    streams = CudaStreams(GPU)
    event = streams.mark()
    calls.clear()
    streams.copy([(Target(calls), "keys"), (Target(calls), "values")], event)
    assert calls == [
        ("wait", "copies"),
        ("enter", "copies"),
        ("copy", "keys", True),
        ("copy", "values", True),
        ("leave", "copies"),
        ("record", "copies", False),
    ]


def test_work_goes_to_the_current_stream_behind_what_it_waits_for(calls):
    streams = CudaStreams(GPU)
    landed = streams.copy([])
    calls.clear()
    streams.compute(lambda: calls.append("launched"), landed)
    assert calls == [("wait", "current"), "launched", ("record", "current", True)]
    calls.clear()
    streams.compute(lambda: calls.append("launched"))
    assert calls == ["launched", ("record", "current", True)]


def test_time_is_known_when_both_events_are_reached(calls):
    streams = CudaStreams(GPU)
    first, last = streams.mark(), streams.mark()
    assert streams.seconds(first, last) is None
    first.reached = True
    assert streams.seconds(first, last) is None
    last.reached = True
    assert streams.seconds(first, last) == 0.25


def test_each_kind_of_device_has_its_queues(calls):
    assert isinstance(streams_of(GPU), CudaStreams)
    assert type(streams_of(torch.device("cpu"))) is Streams
    assert type(streams_of(torch.device("mps"))) is Streams


@pytest.mark.parametrize(("device", "other", "here"), [("cuda:1", "cuda:1", True), ("cuda", "cuda:1", True)])
def test_where_kernels_read_a_tensor(calls, monkeypatch, device, other, here):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    class Tensor:
        def __init__(self, at):
            self.device = torch.device(at)

    streams = CudaStreams(torch.device(device))
    assert streams.holds(Tensor(other)) is here
    assert not streams.holds(Tensor("cpu"))
    assert CudaStreams(torch.device("cuda:1")).holds(Tensor("cuda:0")) is False
