"""The threads behind :class:`ragcachekit.store.loader.Loader`, and what they share with it."""

from __future__ import annotations

import itertools
import logging
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ragcachekit.store.base import Found, KVStore, LayerSource
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.loading import Load
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long a thread waits for more before it ends."""

HOLD_SECONDS = 30.0
"""How long an entry that was prefetched waits for a prompt that wants it."""

JOIN_SECONDS = 5.0
"""How long closing waits for reads in work; one that hangs is left to its (daemon) thread."""

MOST_STUCK = 4
"""Threads that hang in a read (a mount that is gone) and have another one in their place."""

SHARE_OF_FILES = 0.5
"""How many of the files that the process may open are the loader's at most."""

Observe = Callable[[str, int, float, int], object]
"""Hears of every read: the tier, its bytes, its seconds, and the bytes of others in work when it began."""

_Use = TypeVar("_Use")


@dataclass(eq=False)
class Desk:
    """What threads and loader share; the threads hold no loader, so that one can be dropped unclosed.

    Attributes
    ----------
    changed : threading.Condition
        Guards everything here and in the loads.
    active : list of Load
        Opened and not yet read to their end.
    findable : dict
        Loads that a request may join: active ones that were not forgotten, and held ones.
    held : OrderedDict
        What was prefetched, is complete, and waits for a prompt.
    queue : deque of KVKey
        To be prefetched.
    alive : list of threading.Thread
    doing : dict
        What each thread works at, and since when by :func:`time.monotonic`; None while it opens an entry.
    stuck : set of threading.Thread
        Those that a request has given up waiting for; they do not count any more until they come back.
    reading : int
        Bytes that reads in work are about.
    forgets : int
        How often something was forgotten.
    dropped : deque of Load
        Closed as nobody holds them any more, and perhaps still findable.
    """

    store: KVStore
    observe: Observe
    room: int
    threads: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    active: list[Load] = field(default_factory=list)
    findable: dict[KVKey, Load] = field(default_factory=dict)
    held: OrderedDict[KVKey, Load] = field(default_factory=OrderedDict)
    queue: deque[KVKey] = field(default_factory=deque)
    ranks: itertools.count[int] = field(default_factory=itertools.count)
    alive: list[threading.Thread] = field(default_factory=list)
    doing: dict[threading.Thread, tuple[Load | None, float]] = field(default_factory=dict)
    stuck: set[threading.Thread] = field(default_factory=set)
    reading: int = 0
    opening: int = 0
    forgets: int = 0
    closed: bool = False
    dropped: deque[Load] = field(default_factory=deque)

    def share(
        self, key: KVKey, source: LayerSource, use: Callable[[Load], _Use], forgets: int
    ) -> _Use | None:
        """``use`` of the load of ``key``: over ``source``, or the one that somebody else opened meanwhile.

        Called with the condition held, so that nobody sweeps a load away before it has a user.
        ``forgets`` is what it was before ``source`` was opened: if something was forgotten since, it may
        be this, so nobody else finds it.
        """
        with self.changed:
            load = self.find(key)
            if load is None and not self.closed and self.may_open():
                load = Load(key, source, self.changed, self.late, self.left)
                self.active.append(load)
                if forgets == self.forgets:
                    self.findable[key] = load
            used = use(load) if load is not None else None
        if load is None or load.source is not source:
            source.close()
        return used

    def find(self, key: KVKey) -> Load | None:
        """A load that whoever asks may join; the condition is held."""
        self._hide_dropped()
        return self.findable.get(key)

    def may_open(self) -> bool:
        """Whether there is a file left for one entry more; the condition is held."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or len(self.active) < SHARE_OF_FILES * most:
            return True
        self.sweep()
        return len(self.active) < SHARE_OF_FILES * most

    def left(self, load: Load) -> None:
        """Somebody dropped his hold on it: close its file at once if he was the last.

        In any thread and at any moment, also where garbage is collected while this very thread is changing
        something here: so nothing that others go through is changed under them, and nobody is waited for.
        Whoever comes to the loader next does the rest.
        """
        if self.changed.acquire(blocking=False):
            try:
                if load in self.active and not load.busy and not load.wanted:
                    others = self.active.copy()
                    others.remove(load)
                    self.active = others
                    self.dropped.append(load)
                    load.source.close()
            finally:
                self.changed.release()

    def wake(self) -> None:
        """Have as many threads as there is work for; the condition is held."""
        work = len(self.begun()) + bool(self.queue)
        most = self.threads + MOST_STUCK
        while not self.closed and self.useful < min(self.threads, work) and len(self.alive) < most:
            thread = threading.Thread(target=_work, args=(self,), name="ragcachekit-load", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread to load with: %s", error)
                break
            self.alive.append(thread)
        if not self.useful:
            self.give_up("there is no thread that could read it")
        self.changed.notify_all()

    @property
    def useful(self) -> int:
        """Threads that do not hang."""
        return len(self.alive) - len(self.stuck)

    @property
    def hopeless(self) -> bool:
        """Whether as many threads hang as may: nothing can be read."""
        return len(self.stuck) >= self.threads + MOST_STUCK

    def late(self, late: Load, seconds: float) -> None:
        """A request has waited ``seconds`` for it in vain: find who hangs, and have others in their place."""
        old = time.monotonic() - seconds
        for thread, (load, since) in self.doing.items():
            if load is late or since <= old:
                self.stuck.add(thread)
                if load is not None:
                    self.hide(load)  # whoever asks for it next shall not wait for this read
        self.wake()

    def give_up(self, why: str) -> None:
        """Nobody is there to read: whoever waits computes rows instead."""
        self.queue.clear()
        for load in [load for load in self.begun() if not load.busy]:
            load.error = load.error or why
            self.active.remove(load)
            self.hide(load)
            load.source.close()

    def begun(self) -> list[Load]:
        """Loads that somebody asked to be read; the condition is held, as for all below."""
        return [load for load in self.active if load.prefetched or load.rank < float("inf")]

    def next(self) -> Load | None:
        """What to read next: for the earliest request, the lowest layer."""
        ready = [load for load in self.begun() if not load.busy]
        return min(ready, key=lambda load: (load.prefetched, load.rank, load.read), default=None)

    def may_prefetch(self) -> bool:
        """Whether there is a key to prefetch and room for it."""
        return bool(self.queue) and not self.closed and self.flying() < self.room

    def idle(self) -> bool:
        """Whether nothing is read or opened, and no key is about to be."""
        return not (self.opening or self.may_prefetch() or self.begun())

    def flying(self) -> int:
        """Bytes of what was prefetched and that no request has asked for yet."""
        return sum(load.source.nbytes for load in (*self.active, *self.held.values()) if load.prefetched)

    def drop(self, which: Callable[[KVKey], bool]) -> None:
        """Give up what was prefetched and no request has."""
        kept = [key for key in self.queue if not which(key)]
        self.queue.clear()
        self.queue.extend(kept)
        for load in [load for load in self.held.values() if which(load.key)]:
            self.unhold(load)
        for load in self.active:
            load.prefetched = load.prefetched and not which(load.key)
        self.sweep()

    def unhold(self, load: Load) -> None:
        """Let a held load go."""
        if self.held.get(load.key) is load:
            del self.held[load.key]
            self.hide(load)

    def hide(self, load: Load) -> None:
        """Have nobody join it any more."""
        if self.findable.get(load.key) is load:
            del self.findable[load.key]

    def _hide_dropped(self) -> None:
        while self.dropped:
            self.hide(self.dropped.popleft())

    def sweep(self) -> None:
        """Let go of what nobody wants any more."""
        self._hide_dropped()
        old = time.perf_counter() - HOLD_SECONDS
        while self.held:
            first = next(iter(self.held.values()))
            if first.ended > old and not (self.queue and self.flying() >= self.room):
                break
            self.unhold(first)
        for load in [load for load in self.active if not load.busy and not load.wanted]:
            if load in self.active:
                self.active.remove(load)
            self.hide(load)
            load.source.close()


def _work(desk: Desk) -> None:
    """A thread: the most urgent layer, or the next key to prefetch, or an end after idling."""
    me = threading.current_thread()
    while True:
        with desk.changed:
            desk.doing.pop(me, None)
            desk.stuck.discard(me)
            desk.sweep()
            if desk.useful > desk.threads:  # others work in place of this one, which hung
                desk.alive.remove(me)
                return
            desk.changed.wait_for(lambda: desk.closed or desk.next() or desk.may_prefetch(), IDLE_SECONDS)
            desk.sweep()
            load = None if desk.closed else desk.next()
            beside = 0
            key = desk.queue.popleft() if load is None and desk.may_prefetch() else None
            desk.opening += key is not None
            if load is None and key is None and (desk.closed or not desk.held):
                desk.alive.remove(me)
                return
            desk.doing[me] = load, time.monotonic()
            if load is not None:
                load.busy = True
                beside, desk.reading = desk.reading, desk.reading + load.read_bytes
        if load is not None:
            _read(desk, load, beside)
        elif key is not None:
            _prefetch(desk, key)
            with desk.changed:
                desk.opening -= 1
                desk.changed.notify_all()


def _read(desk: Desk, load: Load, beside: int) -> None:
    """The next layer of it, while others are reading ``beside`` bytes."""
    begun = time.perf_counter()
    pair, error = None, None
    try:
        pair = load.source.layer(load.read)
    except (EntryDamaged, OSError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    except Exception as failed:
        log.warning("reading an entry from tier %s failed", load.source.tier, exc_info=True)
        error = repr(failed)
    seconds = time.perf_counter() - begun
    with desk.changed:
        desk.reading -= load.read_bytes
        if pair is not None:
            load.pairs[load.read] = pair
            load.read += 1
        load.error = load.error or error
        load.ended = time.perf_counter()
        over = load.complete or load.error is not None
        load.busy = over  # nobody takes it up again
        desk.changed.notify_all()
    if pair is not None:
        desk.observe(load.source.tier, load.read_bytes, seconds, beside)
    if over:
        _finish(desk, load)


def _finish(desk: Desk, load: Load) -> None:
    """Tell the store and let go of the file; whoever waits for layers has them already."""
    try:
        if load.complete:
            load.source.finished(load.kv())
    except Exception:
        log.warning("an entry could not be kept in a faster tier", exc_info=True)
    load.source.close()
    with desk.changed:
        if load in desk.active:
            desk.active.remove(load)
        if load.prefetched and load.complete and desk.findable.get(load.key) is load and not desk.closed:
            desk.held[load.key] = load
        else:
            desk.hide(load)
        desk.changed.notify_all()


def _prefetch(desk: Desk, key: KVKey) -> None:
    """Open the entry; one that is in memory needs no more."""

    def begin(load: Load) -> None:
        # One that a request has opened meanwhile is the request's.
        load.prefetched = not load.handles
        load.begun = load.begun or time.perf_counter()
        desk.wake()

    forgets = desk.forgets
    try:
        opened = desk.store.open(key, 0.0)
        if opened is not None and not isinstance(opened, Found):
            desk.share(key, opened, begin, forgets)
    except Exception:
        log.warning("an entry could not be prefetched", exc_info=True)


def end(desk: Desk) -> None:
    """Finish the reads in work, give the rest up, join the threads."""
    with desk.changed:
        desk.closed = True
        desk.queue.clear()
        desk.held.clear()
        desk.findable.clear()
        for load in desk.active:
            load.error = load.error or "the store was closed"
        idle = [load for load in desk.active if not load.busy]
        desk.active.clear()
        threads = list(desk.alive)
        desk.changed.notify_all()
    for load in idle:
        load.source.close()
    until = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            with suppress(RuntimeError):  # not started yet: it will see that all is over
                thread.join(max(0.0, until - time.monotonic()))
