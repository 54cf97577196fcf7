"""What each thread of a :class:`ragcachekit.store.loader.Loader` does, and the end of them all."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from ragcachekit.store.base import Found
from ragcachekit.store.desk import Desk
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.loading import Load
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long a thread waits for more before it ends."""

JOIN_SECONDS = 5.0
"""How long closing waits for reads in work; one that hangs is left to its (daemon) thread."""


def work(desk: Desk) -> None:
    """A thread: the most urgent layer, or the next key to prefetch, or an end after idling."""
    me = threading.current_thread()
    while True:
        with desk.changed:
            needed = desk.crew.back(me)
            desk.sweep()
            if not needed:
                return
        woken = desk.changed.wait_for(lambda: desk.closed or desk.next() or desk.may_prefetch(), IDLE_SECONDS)
        with desk.changed:
            desk.sweep()
            load = None if desk.closed else desk.next()
            beside = 0
            key = desk.queue.popleft() if load is None and desk.may_prefetch() else None
            desk.opening += key is not None
            if load is None and key is None and (desk.closed or not (woken or desk.held)):
                desk.crew.leave(me)
                return
            desk.crew.begins(me, load)
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
        threads = list(desk.crew.alive)
        desk.changed.notify_all()
    for load in idle:
        load.source.close()
    until = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            with suppress(RuntimeError):  # not started yet: it will see that all is over
                thread.join(max(0.0, until - time.monotonic()))
