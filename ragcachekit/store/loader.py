"""Background reads of entries in slow tiers: layer 0 of all entries first, then layer 1, and so on."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, Pair, concerns
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.remote import vain_waits
from ragcachekit.threads import Condition, DaemonPool, Job
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

THREADS = 2
DEADLINE_SECONDS = 30.0
BYTES_IN_FLIGHT = 1 << 30

CLOSE_SECONDS = 5.0
"""How long closing waits for running reads."""

PREFETCH = float(1 << 62)
"""Rank of loads for which no request waits."""

IDLE = float("inf")
"""Rank of loads that are not to be read yet."""


class LoadFailed(Exception):
    """Entries (``keys``) that a request needs cannot be read in time; it is planned again without them."""

    def __init__(self, keys: frozenset[KVKey], why: str) -> None:
        super().__init__(why)
        self.keys = keys


@dataclass(eq=False)
class Load:
    """One entry that is read for every request that needs it, guarded by the loader's condition."""

    key: KVKey
    source: LayerSource
    changed: Condition
    rank: float = IDLE  # of the earliest request it is read for; the lowest is read first
    joinable: bool = True  # by further requests: not once it was forgotten or has ended
    reading_since: float | None = None  # by time.monotonic; not None once the last layer is read
    error: str | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    pairs: list[Pair] = field(default_factory=list)  # the layers read and verified so far
    handles: weakref.WeakSet[LoadingKV] = field(default_factory=weakref.WeakSet)
    failures: Counter[str] = field(default_factory=Counter)  # by tier, of all loads

    @property
    def complete(self) -> bool:
        return len(self.pairs) == self.source.layers

    @property
    def layer_bytes(self) -> int:
        """Bytes per layer, on average."""
        return self.source.nbytes // self.source.layers

    def begin(self, rank: float) -> None:
        """Have it read for one more request, or be prefetched."""
        self.rank = min(self.rank, rank)
        self.started_at = self.started_at or time.perf_counter()

    def kv(self) -> ChunkKV:
        """The whole entry; only once it is complete."""
        keys, values = zip(*self.pairs, strict=True)
        return ChunkKV(keys, values, self.source.start, self.source.sums, self.source.quantised)


class LoadingKV:
    """One request's handle of an entry that is being read, in place of a :class:`ChunkKV`.

    Attributes come from the header and never wait; they are those of
    :class:`~ragcachekit.store.base.LayerSource`. :meth:`layer` waits until it is read and verified. Reading
    stops when the last handle is dropped. ``waited`` counts this request's seconds of waiting.
    """

    def __init__(self, load: Load, seconds: float) -> None:
        self._seconds = seconds
        self._until = float("inf")
        self.waited = 0.0
        source = load.source
        self.key, self.tier, self.nbytes = load.key, source.tier, source.nbytes
        self.tokens, self.layers, self.start = source.tokens, source.layers, source.start
        self.shapes, self.sums, self.quantised = source.shapes, source.sums, source.quantised
        self.load = load
        load.handles.add(self)

    @property
    def ready(self) -> int:
        return len(self.load.pairs)

    @property
    def lost(self) -> str | None:
        """Why the entry cannot be read (in time), or None."""
        late = time.monotonic() > self._until
        return None if self.load.complete else self.load.error or (self._late if late else None)

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end of the reading by :func:`time.perf_counter`, 0 until then."""
        return self.load.started_at, self.load.ended_at

    def give_up(self) -> None:
        """Count that a request goes on without it."""
        with self.load.changed:
            self.load.failures[self.tier] += 1

    def start_deadline(self) -> None:
        """Count the seconds that a request may wait from now on."""
        self._until = time.monotonic() + self._seconds - sum(vain_waits())

    def layer(self, number: int) -> Pair:
        """Keys and values of one layer, ``[kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        LoadFailed
            If it is damaged or cannot be read before the deadline.
        """
        load = self.load
        if number < len(load.pairs):
            return load.pairs[number]
        started_at = time.perf_counter()
        load.changed.wait_for(
            lambda: number < len(load.pairs) or load.error is not None,
            max(0.0, self._until - time.monotonic()),
        )
        self.waited += time.perf_counter() - started_at
        if number >= len(load.pairs):
            vain_waits().append(self.waited)
            raise LoadFailed(frozenset([self.key]), load.error or self._late)
        return load.pairs[number]

    @property
    def _late(self) -> str:
        return f"not there within {self._seconds:g} s"


AnyKV = ChunkKV | LoadingKV
"""KV in memory, or being read."""


@dataclass(frozen=True, eq=False)
class Hit:
    """The KV under a key and the tier that has it."""

    kv: AnyKV
    tier: str


Observe = Callable[[str, int, float, int], object]
"""Called after every read with its tier, bytes, seconds, and the bytes of other reads when it began."""


class Loader:
    """Finds entries in a store and reads those of slow tiers in background threads. Thread safe.

    An entry that several requests need at once is read once. While all threads hang in reads (a dead mount)
    for longer than the deadline, slow tiers have nothing. Damage, I/O errors and a wait of more than
    ``deadline`` seconds raise :class:`LoadFailed` where a request waits for the layer. ``bytes_in_flight``
    limits what is being prefetched (one entry may exceed it), ``threads`` the reads at a time; ``observe``
    gets the speed of each read.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        threads: int = THREADS,
        deadline: float = DEADLINE_SECONDS,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
        observe: Observe = lambda *_: None,
    ) -> None:
        self._store, self._observe = store, observe
        self._threads, self._deadline, self._max_prefetched = threads, deadline, bytes_in_flight
        self._pool = DaemonPool("ragcachekit-load", threads)
        self._changed = Condition()  # guards everything below and in the loads
        self._jobs = 0  # submitted and not finished
        self._active: list[Load] = []  # opened and not read to the end
        self._ranks = itertools.count()
        self._reading = 0  # bytes
        self._forgets = 0
        self.failures = Counter[str]()  # loads that requests gave up, by tier
        self._closed = False

    def open(self, key: KVKey, weight: float = 1.0) -> Hit | None:
        """The entry in the store; its layers are read after :meth:`begin`, for a whole prompt at once."""
        opened = self._opened(key, weight)
        if opened is None:
            return None
        return Hit(opened.kv if isinstance(opened, Found) else opened, opened.tier)

    def begin(self, handles: Iterable[LoadingKV]) -> None:
        """Read these for one request; those of earlier requests are read first."""
        with self._changed:
            rank = next(self._ranks)
            for handle in handles:
                handle.load.begin(rank)
                handle.start_deadline()
            self._wake()

    def release(self, handles: Iterable[LoadingKV]) -> None:
        """Close entries that a request does not need; dropping a handle does so at the next call."""
        with self._changed:
            for handle in handles:
                handle.load.handles.discard(handle)
            self._wake()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Copy entries into the store's faster tiers, after everything that a request waits for.

        Waits while ``bytes_in_flight`` are being prefetched. A prompt that needs an entry meanwhile joins in.
        """
        for key in keys:
            if not self._changed.wait_for(self._may_prefetch, self._deadline) or self._closed:
                return
            opened = self._opened(key, 0.0)
            if isinstance(opened, LoadingKV):
                with self._changed:
                    opened.load.begin(PREFETCH)
                    self._wake()

    def coming(self, keys: Iterable[KVKey]) -> list[LoadingKV]:
        """Entries among ``keys`` that are being read now."""
        with self._changed:
            loads = [load for key in keys if (load := self._find(key)) is not None]
            return [LoadingKV(load, self._deadline) for load in loads if load.rank != IDLE]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Return nothing more of what ``store.forget`` with the same arguments dropped; call it after that.

        Requests that already have an entry finish with it.
        """
        self._drop(lambda key: concerns(key, namespace, chunk_ids))

    def discard(self, key: KVKey) -> None:
        """Drop an unusable entry, from the store too."""
        self._drop(lambda other: other == key)
        self._store.discard(key)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being read; False if ``timeout`` seconds did not suffice."""
        self.release(())
        return self._changed.wait_for(lambda: not self._begun(), timeout)

    def close(self) -> None:
        """Cancel all reads, and wait for the running ones but not for one that hangs."""
        with self._changed:
            self._closed = True
            for load in self._active:
                load.joinable, load.error = False, load.error or "the store was closed"
                if load.reading_since is None:
                    load.source.close()
            self._active.clear()
            self._changed.notify_all()
        self._pool.close(CLOSE_SECONDS)

    def _opened(self, key: KVKey, weight: float) -> Found | LoadingKV | None:
        """The entry in memory, or a handle of its load: a running one if there is one."""
        with self._changed:
            self._sweep()
            load, forgets = self._find(key), self._forgets
            if load is not None:
                return LoadingKV(load, self._deadline)
        opened = self._store.open(key, weight)
        if opened is None or isinstance(opened, Found):
            return opened
        with self._changed:
            load = self._find(key)  # another thread may have opened it meanwhile
            hang = sum(map(self._hangs, self._active)) >= self._threads
            if load is not None or self._closed or hang:
                opened.close()
            else:
                load = Load(key, opened, self._changed, failures=self.failures)
                load.joinable = forgets == self._forgets  # else it was forgotten while it was opened
                self._active.append(load)
            return LoadingKV(load, self._deadline) if load is not None else None

    # -- reader jobs: the lock is not held ---------------------------------------------------------

    def _step(self) -> None:
        """Read the most urgent layer."""
        with self._changed:
            self._sweep()
            load, beside = self._next(), self._reading
            if load is not None:
                load.reading_since = time.monotonic()
                self._reading += load.layer_bytes
        if load is not None:
            self._read(load, beside)
        with self._changed:
            self._jobs -= 1
            self._wake()

    def _read(self, load: Load, beside: int) -> None:
        started_at = time.perf_counter()
        pair, error = None, None
        try:
            pair = load.source.layer(len(load.pairs))
        except (EntryDamaged, OSError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        except Exception as failed:
            log.warning("reading an entry from tier %s failed", load.source.tier, exc_info=True)
            error = repr(failed)
        seconds = time.perf_counter() - started_at
        with self._changed:
            self._reading -= load.layer_bytes
            if pair is not None:
                load.pairs.append(pair)
            load.error = load.error or error
            load.ended_at = time.perf_counter()
            over = load.complete or load.error is not None
            if not over:
                load.reading_since = None  # another job may read the next layer
            self._changed.notify_all()
        if pair is not None:
            self._observe(load.source.tier, load.layer_bytes, seconds, beside)
        if over:
            try:
                if load.complete:
                    load.source.finished(load.kv())
            except Exception:
                log.warning("an entry could not be kept in a faster tier", exc_info=True)
            with self._changed:
                self._end(load)
                self._changed.notify_all()

    # -- the lock is held --------------------------------------------------------------------------

    def _find(self, key: KVKey) -> Load | None:
        found = (load for load in self._active if load.key == key and load.joinable)
        return next((load for load in found if not self._hangs(load)), None)

    def _hangs(self, load: Load) -> bool:
        return load.reading_since is not None and time.monotonic() - load.reading_since > self._deadline

    def _wake(self) -> None:
        """Submit jobs for what is to be done."""
        self._sweep()
        work = 0 if self._closed else len(self._begun())
        while self._jobs < min(self._threads, work) and self._pool.submit(Job(self._step)):
            self._jobs += 1
        self._changed.notify_all()

    def _begun(self) -> list[Load]:
        return [load for load in self._active if load.rank != IDLE]

    def _next(self) -> Load | None:
        """The load to read a layer of: of the earliest request, the one with the lowest layer."""
        ready = [load for load in self._begun() if load.reading_since is None]
        return min(ready, key=lambda load: (load.rank, len(load.pairs)), default=None)

    def _may_prefetch(self) -> bool:
        prefetched = sum(load.source.nbytes for load in self._active if load.rank == PREFETCH)
        return self._closed or prefetched < self._max_prefetched

    def _drop(self, which: Callable[[KVKey], bool]) -> None:
        """Stop what is prefetched, and have no further request join a load."""
        with self._changed:
            self._forgets += 1
            for load in [load for load in self._active if which(load.key)]:
                if load.rank == PREFETCH:
                    load.rank = IDLE
                load.joinable = False
            self._wake()

    def _sweep(self) -> None:
        for load in list(self._active):
            if load.reading_since is None and load.rank != PREFETCH and not load.handles:
                self._end(load)

    def _end(self, load: Load) -> None:
        load.joinable = False
        load.source.close()
        self._active = [other for other in self._active if other is not load]
