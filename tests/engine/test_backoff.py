"""Model work in the background leaves the processor to requests, but does not stand still."""

import threading
from types import SimpleNamespace

import pytest

from engine_kit import chunk, rag_for, text
from ragcachekit import Prompt, cancellation
from ragcachekit.cancellation import ActiveRequests, Backoff

LAYERS = 2  # at least, in the family's model
PROMPT = Prompt([text(9, 1), chunk(40, 2), chunk(30, 3), text(6, 4)])


class Clock:
    """Seconds, which pass as an event is waited for; ``at`` maps times to what happens then."""

    def __init__(self) -> None:
        self.seconds, self.at = 100.0, {}
        self.closed = SimpleNamespace(wait=self.wait, set=False)

    def wait(self, seconds: float) -> bool:
        self.seconds += seconds
        for when in [when for when in self.at if when <= self.seconds]:
            self.at.pop(when)()
        return self.closed.set


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cancellation, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


@pytest.fixture
def given(clock):
    active = ActiveRequests()
    return SimpleNamespace(active=active, pause=Backoff(active, clock.closed))


def test_without_requests_nothing_waits(clock, given):
    clock.seconds += 0.3
    given.pause()
    assert clock.seconds == pytest.approx(100.3)


def test_beside_a_request_a_tenth_of_the_time_is_left(clock, given):
    with given.active:
        for _ in range(5):
            clock.seconds += 0.1
            given.pause()
    assert clock.seconds == pytest.approx(105.0)


def test_it_goes_on_when_the_request_ends(clock, given):
    given.active.__enter__()
    clock.at[100.5] = given.active.__exit__
    clock.seconds += 0.1
    given.pause()
    assert 100.5 <= clock.seconds < 100.53


@pytest.fixture
def paused(monkeypatch):
    """Names of the threads that gave way, once per layer."""
    names, real = [], Backoff.__call__

    def called(self):
        names.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(Backoff, "__call__", called)
    return names


def test_encoding_in_the_background_gives_way_before_each_layer(paused):
    with rag_for("llama", policy="reuse", cold="background", encode_after=1) as rag:
        rag.generate(PROMPT, max_new_tokens=1)
        assert rag.flush(60)
        assert rag.encoding_stats().encoded_tokens == 70
        assert paused.count("ragcachekit-background") >= LAYERS
        assert set(paused) == {"ragcachekit-background"}


@pytest.mark.parametrize("cold", ["now", "background"])
def test_what_is_waited_for_does_not(paused, cold):
    with rag_for("llama", policy="reuse", cold=cold) as rag:
        rag.submit(PROMPT, max_new_tokens=1).result(60)
        rag.generate(PROMPT, policy="full", max_new_tokens=2)
    assert [name for name in paused if name != "ragcachekit-background"] == []
