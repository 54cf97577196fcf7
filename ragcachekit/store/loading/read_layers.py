"""Reader jobs of a loader: each reads one layer, or prefetches one key."""

from __future__ import annotations

import logging
import time

from ragcachekit.store.base import Found
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.loading import load_queue
from ragcachekit.store.loading.load import Load
from ragcachekit.store.loading.load_queue import LoadQueue, ReadJob
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


def step(queue: LoadQueue, job: ReadJob) -> None:
    """Read the most urgent layer, or prefetch the next key, or wait while prefetched entries are held."""
    queue.changed.wait_for(
        lambda: queue.closed or queue.next() or queue.may_prefetch() or not queue.held,
        load_queue.HOLD_SECONDS,
    )
    beside = 0
    with queue.changed:
        queue.jobs.add(job)  # whoever submitted it may have been interrupted
        queue.sweep()
        load = None if queue.closed else queue.next()
        key = queue.keys.popleft() if load is None and queue.may_prefetch() else None
        queue.opening += key is not None
        job.load, job.since = load, time.monotonic()
        if load is not None:
            load.busy = True
            beside, queue.reading = queue.reading, queue.reading + load.read_bytes
    if load is not None:
        _read(queue, load, beside)
    elif key is not None:
        _prefetch(queue, key)
    with queue.changed:
        queue.opening -= key is not None
        queue.jobs.discard(job)
        queue.sweep()
        queue.wake()


def _read(queue: LoadQueue, load: Load, beside: int) -> None:
    """Read the next layer of a load, while other jobs read ``beside`` bytes."""
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
    with queue.changed:
        queue.reading -= load.read_bytes
        if pair is not None:
            load.pairs[load.read] = pair
            load.read += 1
        load.error = load.error or error
        load.ended = time.perf_counter()
        over = load.complete or load.error is not None
        load.busy = over  # no other job takes it up again
        queue.changed.notify_all()
    if pair is not None:
        queue.observe(load.source.tier, load.read_bytes, seconds, beside)
    if over:
        _finish(queue, load)


def _finish(queue: LoadQueue, load: Load) -> None:
    """Tell the store and close the file; requests have the layers already."""
    try:
        if load.complete:
            load.source.finished(load.kv())
    except Exception:
        log.warning("an entry could not be kept in a faster tier", exc_info=True)
    load.source.close()
    with queue.changed:
        if load in queue.active:
            queue.active.remove(load)
        if load.prefetched and load.complete and queue.findable.get(load.key) is load and not queue.closed:
            queue.held[load.key] = load
        else:
            queue.hide(load)
        queue.changed.notify_all()


def _prefetch(queue: LoadQueue, key: KVKey) -> None:
    """Open an entry to be read; one that is in memory needs no more."""

    def begin(load: Load) -> None:
        load.prefetched = not load.handles  # one that a request has opened meanwhile is the request's
        load.begun = load.begun or time.perf_counter()
        queue.wake()

    forgets = queue.forgets
    try:
        opened = queue.store.open(key, 0.0)
        if opened is not None and not isinstance(opened, Found):
            queue.share(key, opened, begin, forgets)
    except Exception:
        log.warning("an entry could not be prefetched", exc_info=True)
