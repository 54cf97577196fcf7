"""A slow store whose every read the test sees, holds back or spoils."""

import threading
from collections.abc import Callable
from dataclasses import replace

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats
from ragcachekit.store.loader import LoadingKV
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey

WAIT = 60
"""Seconds after which a test that waits has failed; nothing ever takes that long."""


class Source:
    """Layers of an entry in memory, given out one by one as the store's test says."""

    def __init__(self, store: "SlowStore", key: KVKey, kv: ChunkKV) -> None:
        self._store, self._key, self._kv = store, key, kv
        self.nbytes, self.tokens, self.layers = kv.nbytes, kv.tokens, kv.layers
        self._next, self._busy = 0, threading.Lock()
        self.closed = False

    def layer(self, number):
        assert self._busy.acquire(blocking=False), "used by two threads at once"
        try:
            assert not self.closed
            assert number == self._next, "layers are read in order"
            self._store.before_read(self._key, number)
            self._next += 1
            self._store.log.append((self._key, number))
            return self._kv.keys[number].clone(), self._kv.values[number].clone()
        finally:
            self._busy.release()

    def finished(self, kv):
        assert self._next == self.layers
        self._store.finished.append((self._key, kv))

    def close(self):
        self.closed = True


class SlowStore(KVStore):
    """A ``disk`` tier in memory. ``before_read(key, layer)`` runs in the reading thread."""

    __module__ = "ragcachekit.store.slow"  # of a store of the user's own, engines get whole entries

    def __init_subclass__(cls) -> None:
        cls.__module__ = SlowStore.__module__

    def __init__(self, before_read: Callable[[KVKey, int], object] = lambda *_: None) -> None:
        self.inner = HostStore(1 << 30)
        self.before_read = before_read
        self.log: list[tuple[KVKey, int]] = []
        self.finished: list[tuple[KVKey, ChunkKV]] = []
        self.sources: list[Source] = []

    def open(self, key, weight=1.0):
        found = self.inner.get(key, weight)
        if found is None:
            return None
        kv, source = found.kv, Source(self, key, found.kv)
        self.sources.append(source)
        calls = source.layer, source.finished, source.close
        return LayerSource("disk", kv.nbytes, kv.shapes, *calls, kv.start, kv.sums, kv.quantised)

    def get(self, key, weight=1.0):
        found = self.inner.get(key, weight)
        return None if found is None else Found(found.kv, "disk")

    def put(self, key, kv):
        return self.inner.put(key, kv)

    def __contains__(self, key):
        return key in self.inner

    def discard(self, key):
        self.inner.discard(key)

    def forget(self, namespace, chunk_ids=None):
        return self.inner.forget(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        return tuple(replace(record, tier="disk") for record in self.inner.stats())

    def close(self):
        self.inner.close()


def start(loader, key):
    """What the loader has under a key, with its reading begun."""
    hit = loader.open(key)
    if hit is not None and isinstance(hit.kv, LoadingKV):
        loader.begin([hit.kv])
    return hit


class Gate:
    """Holds reads back until :meth:`open` is called; ``reached`` is set when one came."""

    def __init__(self, which: Callable[[KVKey, int], bool] = lambda *_: True) -> None:
        self._which = which
        self._open, self.reached = threading.Event(), threading.Event()

    def __call__(self, key, layer):
        if self._which(key, layer):
            self.reached.set()
            assert self._open.wait(WAIT)

    def open(self):
        self._open.set()


class Spoil:
    """Fails at one layer of entries that ``which`` picks."""

    def __init__(self, layer: int, error: Exception, which: Callable[[KVKey], bool]) -> None:
        self.layer, self.error, self.which = layer, error, which
        self.spoiled: list[KVKey] = []

    def __call__(self, key, layer):
        if layer == self.layer and self.which(key):
            self.spoiled.append(key)
            raise self.error
