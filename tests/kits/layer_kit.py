"""A model whose decoder layers are watched: something happens in one of them, and later ones are counted."""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from ragcachekit import CancelScope, Request
from ragcachekit.engine.request import AnswerStream
from ragcachekit.generate.options import TokenQueue

LONG = 60.0
WAITED = 10.0
AGAIN = 0.5


class Layers:
    """Layers that had ``begun`` before ``act`` returned, and by thread those ``after`` it."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.begun, self.after = 0, Counter[int]()
        self._at, self._act = at, act
        self._acted, self._lock = threading.Event(), threading.Lock()

    def begin(self, *_: Any) -> None:
        with self._lock:
            if self._acted.is_set():
                self.after[threading.get_ident()] += 1
                return
            self.begun += 1
            mine = self.begun == self._at
        if mine:
            try:
                self._act()
            finally:  # an interrupt of the main thread comes out of it there
                self._acted.set()

    @property
    def most_after(self) -> int:
        """Layers of the thread that went on for longest."""
        assert self._acted.wait(LONG), "nothing was cancelled"
        return max(self.after.values(), default=0)


@contextmanager
def watched(model: Any, at: int, act: Callable[[], object]) -> Iterator[Layers]:
    """Have ``act`` called in the ``at``-th layer that begins, in the thread that runs it."""
    layers = Layers(at, act)
    hooks = [layer.register_forward_pre_hook(layers.begin) for layer in model.model.layers]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


def hooks_of(model: Any) -> int:
    """Forward hooks on the model and all it consists of."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def threads_ended() -> bool:
    """Whether the library's threads end, with nothing more to do."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("ragcachekit-")]
    for thread in ours:
        thread.join(LONG)
    return not any(thread.is_alive() for thread in ours)


async def streams_ended() -> None:
    """Wait for the threads of streams and of asyncio. The loop runs on: a cancelled task may need it."""
    for thread in threading.enumerate():
        if thread.name == "ragcachekit-queue":
            await asyncio.to_thread(thread.join, LONG)
    await asyncio.get_running_loop().shutdown_default_executor()


def cancellations(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> threading.Event:
    """Set once scopes and streams were cancelled ``times`` times."""
    cancelled, left = threading.Event(), [None] * times
    for kind in (CancelScope, AnswerStream, Request):
        cancel: Callable[..., None] = kind.cancel

        def noted(self: Any, cancel: Callable[..., None] = cancel) -> None:
            cancel(self)
            with suppress(IndexError):
                left.pop()
            if not left:
                cancelled.set()

        monkeypatch.setattr(kind, "cancel", noted)
    return cancelled


def interrupted_reader(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What interrupts the wait for a stream's tokens, and returns once somebody has cancelled something."""
    inside, cancelled = threading.Event(), cancellations(monkeypatch)

    def interrupted(*_: Any) -> None:
        assert inside.wait(LONG)
        raise KeyboardInterrupt

    def interrupt() -> None:
        inside.set()
        cancelled.wait(WAITED)

    monkeypatch.setattr(TokenQueue, "__iter__", interrupted)
    return interrupt


@contextmanager
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What interrupts the main thread as Ctrl-C does, and waits until somebody has cancelled something.

    It returns after :data:`WAITED` seconds where nobody does, and the layers after it show that.
    """
    cancelled, main = cancellations(monkeypatch), threading.main_thread().ident
    assert main is not None
    handled = threading.Event()

    def handle(*_: Any) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        # A signal that comes just before a thread begins to wait is seen only when that wait is over.
        while not handled.wait(AGAIN):
            signal.pthread_kill(main, signal.SIGINT)
        cancelled.wait(WAITED)

    before = signal.signal(signal.SIGINT, handle)  # test runners may ignore it
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
