"""Raises KeyboardInterrupt at random moments of loads, as Ctrl-C does; prints what went wrong. Run alone."""

import collections
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from ragcachekit.store import remote
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.loader import Loader, LoadingKV
from ragcachekit.store.remote import DeadlineExecutor
from store_kit import contents, key_of, kv_of

ENTRIES = 6


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Interrupts:
    """Counts interrupts and everything that is raised beside them."""

    def __init__(self):
        self.armed, self.raised = False, 0
        self.others: collections.Counter[str] = collections.Counter()
        signal.signal(signal.SIGALRM, self._strike)
        sys.unraisablehook = lambda found: self._saw(found.exc_value)
        threading.excepthook = lambda found: self._saw(found.exc_value)

    def _strike(self, *_):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _saw(self, error):
        if not isinstance(error, KeyboardInterrupt):
            self.others[repr(error)] += 1

    def during(self, work, seconds):
        """Run ``work`` and interrupt it after so many seconds, if it takes that long."""
        self.armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        except KeyboardInterrupt:
            self.raised += 1
        except BaseException as error:
            self.others[f"raised: {error!r}"] += 1
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def load(loader, numbers):
    """One request: open, begin, wait for all layers, compare."""
    hits = [loader.open(key_of(number)) for number in numbers]
    handles = [hit.kv for hit in hits if hit is not None and isinstance(hit.kv, LoadingKV)]
    assert len(handles) == len(numbers)
    loader.begin(handles)
    for number, handle in zip(numbers, handles, strict=True):
        for layer in range(handle.layers):
            keys, _ = handle.layer(layer)
            assert keys.shape == kv_of(number).keys[layer].shape


def prefetch(loader, numbers):
    loader.prefetch(key_of(number) for number in numbers)
    loader.flush(5.0)
    loader.forget(key_of(0).namespace)


def read(store, numbers):
    for number in numbers:
        found = store.get(key_of(number))
        assert contents(found.kv) == contents(kv_of(number))


def guarded(guard, numbers):
    for number in numbers:
        assert guard.run(lambda number=number: number, None) == number


def main(folder, seed, rounds):
    draw, interrupts = random.Random(seed), Interrupts()
    store = DiskStore(folder, 1 << 30)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(ENTRIES))
    loader = Loader(store, deadline=20.0)
    # Never given up for being late, and never left alone after failures: what is counted is interrupts alone.
    remote.FAILURES = 1 << 30
    guard = DeadlineExecutor("test", 20.0)
    works = ((load, loader), (prefetch, loader), (read, store), (guarded, guard))
    for work, what in works:
        work(what, [0, 1])
    gc.collect()
    loader.flush()
    usual = {work: 0.0 for work, _ in works}
    for work, what in works:
        begun = time.perf_counter()
        work(what, [0, 1, 2])
        usual[work] = time.perf_counter() - begun
    before = descriptors()
    for _ in range(rounds):
        work, what = draw.choice(works)
        once = partial(work, what, draw.sample(range(ENTRIES), 3))
        interrupts.during(once, draw.uniform(1e-6, 1.2 * usual[work]))
    for work, what in works:
        work(what, list(range(ENTRIES)))
    assert loader.flush(20.0)
    gc.collect()
    alive = loader._pool._threads
    found = {
        "interrupts": interrupts.raised,
        "others": dict(interrupts.others),
        "descriptors": descriptors() - before,
        "dead threads": sum(not thread.is_alive() for thread in alive),
    }
    sys.stdout.write(json.dumps(found))
    loader.close()
    guard.close()
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
