"""What a :class:`ragcachekit.store.loader.Loader` shares with its threads: the loads, and which is next."""

from __future__ import annotations

import itertools
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ragcachekit.store.base import KVStore, LayerSource
from ragcachekit.store.condition import Condition
from ragcachekit.store.crew import Crew
from ragcachekit.store.loading import Load
from ragcachekit.types import KVKey

HOLD_SECONDS = 30.0
"""How long an entry that was prefetched waits for a prompt that wants it."""

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
    store : KVStore
    observe : callable
    room : int
        Bytes that may be prefetched ahead of prompts.
    crew : Crew
        The threads.
    work : callable
        What each of them does here, until there is nothing more to do.
    changed : Condition
        Guards everything here and in the loads.
    active : list of Load
        Opened and not yet read to their end.
    findable : dict
        Loads that a request may join: active ones that were not forgotten, and held ones.
    held : dict
        What was prefetched, is complete, and waits for a prompt; the oldest first. (Not an OrderedDict: one
        whose keys compare in Python is left damaged when that is interrupted.)
    queue : deque of KVKey
        To be prefetched.
    ranks : iterator of int
        Numbers for requests, in order.
    reading, opening : int
        Bytes that reads in work are about, and entries that are being opened to be prefetched.
    forgets : int
        How often something was forgotten.
    dropped : deque of Load
        Closed as nobody holds them any more, and perhaps still findable.
    """

    store: KVStore
    observe: Observe
    room: int
    crew: Crew
    work: Callable[[Desk], None]
    changed: Condition = field(default_factory=Condition)
    active: list[Load] = field(default_factory=list)
    findable: dict[KVKey, Load] = field(default_factory=dict)
    held: dict[KVKey, Load] = field(default_factory=dict)
    queue: deque[KVKey] = field(default_factory=deque)
    ranks: itertools.count[int] = field(default_factory=itertools.count)
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
        try:  # begun before it is taken: a KeyboardInterrupt may come as soon as it is
            if self.changed.acquire(blocking=False) and self._abandoned(load):
                self.dropped.append(load)
                load.source.close()
                self.active = [other for other in self.active if other is not load]
        finally:
            try:  # noqa: SIM105 (for the same reason: a call of ``suppress`` comes before the release)
                self.changed.release()
            except RuntimeError:  # another thread's
                pass

    def _abandoned(self, load: Load) -> bool:
        return load in self.active and not load.busy and not load.wanted

    def wake(self) -> None:
        """Have as many threads as there is work for; the condition is held."""
        if not self.closed:
            self.crew.hire(len(self.begun()) + bool(self.queue), partial(self.work, self))
        if not self.crew.useful:
            self.give_up("there is no thread that could read it")
        self.changed.notify_all()

    def late(self, late: Load, seconds: float) -> None:
        """A request has waited ``seconds`` for it in vain: find who hangs, and have others in their place."""
        for load in self.crew.late(late, seconds):
            self.hide(load)  # whoever asks for it next shall not wait for this read
        self.wake()

    def give_up(self, why: str) -> None:
        """Nobody is there to read: whoever waits computes rows instead."""
        self.queue.clear()
        for load in [load for load in self.begun() if not load.busy]:
            load.error = load.error or why
            self._end(load)

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
            self.hide(load)  # first: what is findable and not held would be overlooked when it is forgotten
            del self.held[load.key]

    def hide(self, load: Load) -> None:
        """Have nobody join it any more."""
        if self.findable.get(load.key) is load:
            del self.findable[load.key]

    def _hide_dropped(self) -> None:
        while self.dropped:
            self.hide(self.dropped[0])
            self.dropped.popleft()

    def sweep(self) -> None:
        """Let go of what nobody wants any more."""
        self._hide_dropped()
        old = time.perf_counter() - HOLD_SECONDS
        while self.held:
            first = next(iter(self.held.values()))
            if first.ended > old and not (self.queue and self.flying() >= self.room):
                break
            self.unhold(first)
        for load in [load for load in self.active if self._abandoned(load)]:
            self._end(load)

    def _end(self, load: Load) -> None:
        """Close a load; active up to the last step, so that whoever is interrupted leaves it to others."""
        self.hide(load)
        load.source.close()
        self.active = [other for other in self.active if other is not load]
