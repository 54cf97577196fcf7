"""A tier on a service that may be slow, dead or hostile: sealed entries, deadlines."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import Lock
from typing import TypeVar

import numpy as np

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, StoreStats, concerns
from ragcachekit.store.entry import EntryDamaged, decode_entry, encode_entry, read_header
from ragcachekit.store.eviction import Counters
from ragcachekit.threads import DaemonPool, Job
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES = 3
"""Failures in a row after which a service is not asked for a while."""

COOLDOWN = 5.0
"""Seconds until operations try again."""

THREADS = 16
"""Operations on one service that run or hang at the same time."""

FORGET_DEADLINES = 10
"""Deadlines that ``forget`` and opening may take: no answer waits for them."""


_REPORTED: ContextVar[list[str] | None] = ContextVar("ragcachekit_store_failures", default=None)


@contextmanager
def reported(failures: list[str]) -> Iterator[None]:
    """While inside, why operations of any :class:`DeadlineExecutor` failed goes to ``failures``, too."""
    token = _REPORTED.set(failures)
    try:
        yield
    finally:
        _REPORTED.reset(token)


_WAITS: ContextVar[list[float] | None] = ContextVar("ragcachekit_vain_waits", default=None)


def vain_waits() -> list[float]:
    """Seconds of each wait for a store that failed, of the request around the caller; a new list else."""
    waits = _WAITS.get()
    return [] if waits is None else waits


@contextmanager
def waits_of(waits: list[float]) -> Iterator[None]:
    """Of what one request asks of stores inside: :func:`vain_waits`, which shorten its later waits."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)


class DeadlineExecutor:
    """Runs operations in threads and waits for each until ``deadline`` seconds have passed. Thread safe.

    What a request has waited in vain comes off its later deadlines: in all it waits for one. After
    :data:`FAILURES` in a row operations are refused for :data:`COOLDOWN` seconds, and while all
    :data:`THREADS` hang. ``failures`` are those that raised or were late.
    """

    def __init__(self, name: str, deadline: float) -> None:
        self.deadline, self.failures = deadline, 0
        self._name = name
        self._failed = 0  # in a row
        self._retry_at = 0.0  # monotonic seconds
        self._lock = Lock()  # around both
        self._pool = DaemonPool(f"ragcachekit-{name}", THREADS)

    def run(self, operation: Callable[[], T] | Job, default: T, deadline: float | None = None) -> T:
        """What ``operation`` returns, or ``default`` if it raises, is late or is refused."""
        waits, started_at = vain_waits(), time.monotonic()
        deadline = (deadline or self.deadline) - sum(waits)
        if self._pool.closed.is_set():
            return default
        if self._failed >= FAILURES and time.monotonic() < self._retry_at:
            self._report("not asked after too many failures")
            return default
        if deadline <= 0:
            self._report("not asked again by this request")
            return default
        job, failure = operation if isinstance(operation, Job) else Job(operation), "interrupted"
        try:
            if not self._pool.submit(job):
                failure = "every thread hangs"
            elif not self._pool.wait(job, deadline):
                failure = f"no answer within {deadline:g} s"
            else:
                failure = "" if job.error is None else f"{type(job.error).__name__}: {job.error}"
        finally:
            self._pool.give_up(job)  # also if interrupted: then it must not start later
            self._record(failure)
            if failure:
                waits.append(time.monotonic() - started_at)
        return default if failure else job.result

    def close(self) -> None:
        """Refuse further operations; does not wait."""
        self._pool.close(0.0)

    def _report(self, failure: str) -> None:
        if (failures := _REPORTED.get()) is not None:
            failures.append(f"{self._name}: {failure}")

    def _record(self, failure: str) -> None:
        if failure:
            self._report(failure)
        with self._lock:
            self.failures += bool(failure)
            self._failed = self._failed + 1 if failure else 0
            self._retry_at = time.monotonic() + COOLDOWN
            if self._failed == FAILURES:
                log.warning("%s tier: not used for a while after too many failures: %s", self._name, failure)


_MAGIC = b"rck-seal"
_DIGEST = "sha256"
_ID_BYTES, _MAC_BYTES = 8, 32
OVERHEAD = len(_MAGIC) + _ID_BYTES + _MAC_BYTES
"""Bytes that a seal adds to an entry."""
_SHORTEST = 16

_HOW = (
    "make one with `openssl rand -hex 32`, give every process of the deployment the same one in an "
    "environment variable, and name that variable in remote_key="
)


class Seal:
    """HMAC-SHA256 over an entry and its name, as others can write to a service. Nothing is encrypted.

    ``key`` has at least 16 bytes, or is the name of the environment variable that has it. ValueError if there
    is none or it is too short; the message does not repeat it, as it may be the key in place of a name.
    """

    def __init__(self, key: bytes | str | None) -> None:
        if key is None:
            raise ValueError(f"a remote tier needs a key to sign its entries with: {_HOW}")
        if isinstance(key, str):
            if key not in os.environ:
                raise ValueError(
                    "remote_key= (--shared-key) is the name of an environment variable, and that one is not "
                    f"set: {_HOW}"
                )
            key = os.environ[key].encode()
        if len(key) < _SHORTEST:
            raise ValueError(
                f"the key of the remote tier has {len(key)} bytes, fewer than {_SHORTEST}: {_HOW}"
            )
        self._key = key
        # Tells entries of another key from damaged ones, and reveals nothing about the key.
        self._id = hmac.digest(key, b"ragcachekit key id", _DIGEST)[:_ID_BYTES]

    def sealed(self, digest: str, parts: Sequence[bytes | memoryview]) -> memoryview:
        """The seal and ``parts`` in one buffer, to be stored under the name ``digest``."""
        head = _MAGIC + self._id + self._mac(digest, parts)
        blob = np.empty(len(head) + sum(len(part) for part in parts), np.uint8)
        at = 0
        for part in (head, *parts):
            # Not b"".join, which holds the GIL while it copies.
            blob[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return blob.data

    def opened(self, digest: str, blob: bytes | bytearray | memoryview) -> memoryview | None:
        """The entry in ``blob``, verified for the name ``digest``; None if it was sealed with another key.

        Raises EntryDamaged if a byte or the name is another.
        """
        view = memoryview(blob).toreadonly()
        image = _body(view)
        if view[len(_MAGIC) : len(_MAGIC) + _ID_BYTES] != self._id:
            return None
        if not hmac.compare_digest(view[OVERHEAD - _MAC_BYTES : OVERHEAD], self._mac(digest, (image,))):
            raise EntryDamaged("the entry does not match its seal")
        return image

    def _mac(self, digest: str, parts: Sequence[bytes | memoryview]) -> bytes:
        # Names have a fixed length: no byte can move between name and entry.
        mac = hmac.new(self._key, _MAGIC + digest.encode(), _DIGEST)
        for part in parts:
            mac.update(part)
        return mac.digest()


def _body(view: memoryview) -> memoryview:
    if len(view) < OVERHEAD or view[: len(_MAGIC)] != _MAGIC:
        raise EntryDamaged("no sealed entry")
    return view[OVERHEAD:]


def is_dropped(
    digest: str, head: bytes | Exception, size: int, namespace: str, chunk_ids: frozenset[str] | None
) -> bool:
    """Whether a forget drops the sealed entry ``digest`` of ``size`` bytes, by its first bytes.

    Its seal is not checked. It does where these could not be read, or are those of another entry.
    """
    if isinstance(head, Exception):
        return not isinstance(head, FileNotFoundError)
    try:
        raw = _body(memoryview(head))
        key = read_header(lambda at, nbytes: bytes(raw[at : at + nbytes]), size - OVERHEAD)[0].key
    except EntryDamaged:
        return True
    return key.digest() != digest or concerns(key, namespace, chunk_ids)


class Forgetting:
    """Forgets on a medium: what one is about is hidden until it is confirmed. Thread safe.

    ``count`` is their number, ``name`` that of the medium.
    """

    def __init__(self, name: str, executor: DeadlineExecutor) -> None:
        self.count = 0
        self._name, self._executor = name, executor
        self._unconfirmed: list[tuple[str, frozenset[str] | None]] = []
        self._lock = Lock()  # around changes of both

    def hides(self, key: KVKey) -> bool:
        """Whether a forget of the entry is not confirmed."""
        return any(concerns(key, *forget) for forget in self._unconfirmed)

    def run(self, forget: Callable[[], T], namespace: str, chunk_ids: frozenset[str] | None) -> T:
        """What ``forget`` returns; StoreError if it raises or is late: then some entries may be left."""
        self._hide(namespace, chunk_ids)  # before: what is being saved is refused, or deleted
        done, failed = list[T](), ["no answer in time"]

        def call() -> None:
            try:
                done.append(forget())
            except Exception as error:
                failed[:] = [f"{type(error).__name__}: {error}"]

        self._executor.run(call, None, FORGET_DEADLINES * self._executor.deadline)
        if not done:
            self._hide(namespace, chunk_ids)  # another forget may have been confirmed meanwhile
            raise StoreError(
                f"the {self._name} tier may hold what was to be forgotten; forget again: {failed[0]}"
            )
        with self._lock:
            self._unconfirmed = [
                (space, ids)
                for space, ids in self._unconfirmed
                if space != namespace or (chunk_ids is not None and ids != chunk_ids)
            ]
        return done[0]

    def _hide(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        with self._lock:
            if (namespace, chunk_ids) not in self._unconfirmed:
                self._unconfirmed.append((namespace, chunk_ids))
            self.count += 1  # last: a put that reads the new count finds the entry hidden


class RemoteStore(KVStore):
    """Sealed chunk KV on a service, with deadlines.

    If the service does not answer within ``deadline`` seconds, methods return a miss, False or nothing;
    ``forget`` takes up to ten deadlines and then raises StoreError. Entries of such a forget are misses in
    this process, and are not put, until the same forget, or one of the namespace, succeeds. Larger entries
    than ``max_entry`` bytes are refused, which counts as no failure; ``budget`` is this process's share.

    Subclasses implement the methods with ``blob`` in their names, ``connect``, ``usage`` and ``disconnect``.
    These may block and raise anything: they run with a deadline, in several threads, and may end after the
    caller has given up. They promise:

    - an entry is whole, missing, or its seal does not match;
    - an entry saved late never survives a forget called after it was saved, or that forget raises.
    """

    shared = True
    remote = True

    def __init__(
        self, tier: str, *, key: bytes | str | None, deadline: float, max_entry: int | None = None
    ) -> None:
        self._tier, self._seal = tier, Seal(key)
        self._executor = DeadlineExecutor(tier, deadline)
        self._max_entry = max_entry
        self._counters = Counters(tier)
        self._closed = False
        self._forgets = Forgetting(tier, self._executor)
        self._executor.run(self.connect, None, FORGET_DEADLINES * deadline)

    def connect(self) -> None:
        """Warn of a service that is set up badly."""

    def read_blob(self, key: KVKey) -> bytes | None:
        """Return the entry under ``key``, or None."""
        raise NotImplementedError

    def write_blob(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> bool:
        """Keep ``blob`` under ``key`` if ``wanted()``: it was not forgotten meanwhile. False if not."""
        raise NotImplementedError

    def delete_blob(self, key: KVKey) -> None:
        """Drop the entry under ``key``."""
        raise NotImplementedError

    def has_blob(self, key: KVKey) -> bool:
        """Whether there is an entry under ``key``."""
        raise NotImplementedError

    def forget_blobs(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        """As :meth:`drop`, adding digests to ``dropped``."""
        raise NotImplementedError

    def usage(self) -> tuple[int, int, int]:
        """Return entries, their bytes and the bytes that they may take, each 0 if it cannot be counted."""
        return 0, 0, 0

    def disconnect(self) -> None:
        """Close connections; does not wait."""

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The verified entry under ``key``, or None."""
        kv = self._executor.run(lambda: self._load(key), None) if self._is_served(key) else None
        self._counters.count("misses" if kv is None else "hits")
        return None if kv is None else Found(kv, self._tier)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Seal and keep ``kv``.

        False if the entry is too large, something is forgotten meanwhile, a forget of it was not confirmed,
        or the service does not answer in time: it may arrive later. TypeError for a dtype of no safetensors.
        """
        forgets, parts = self._forgets.count, encode_entry(key, kv)
        if self._closed or (self._max_entry is not None and kv.nbytes > self._max_entry):
            return False
        kept = False
        if self._is_served(key):

            def save() -> bool:
                blob = self._seal.sealed(key.digest(), parts)
                return self.write_blob(key, blob, lambda: self._forgets.count == forgets)

            kept = self._executor.run(save, False)
        if not kept:
            self._counters.count("failed_writes")
        return kept

    def __contains__(self, key: KVKey) -> bool:
        return self._is_served(key) and self._executor.run(lambda: self.has_blob(key), False)

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        if damaged and key in self:
            self._counters.count("damaged")
            self._executor.run(lambda: self.delete_blob(key), None)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Drop entries; StoreError if the service does not confirm it: then some may be left."""
        if self._closed or (chunk_ids is not None and not chunk_ids):
            return frozenset()
        dropped = set[str]()
        self._forgets.run(lambda: self.forget_blobs(namespace, chunk_ids, dropped), namespace, chunk_ids)
        return frozenset(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; sizes come from the service, 0 if it does not answer or cannot count."""
        entries, nbytes, budget = (0, 0, 0) if self._closed else self._executor.run(self.usage, (0, 0, 0))
        record = self._counters.stats(entries=entries, nbytes=nbytes, budget=budget)
        return (replace(record, failures=self._executor.failures),)

    def close(self) -> None:
        """Close connections; further calls are misses."""
        self._closed = True
        self._executor.close()
        self.disconnect()

    def _is_served(self, key: KVKey) -> bool:
        return not self._closed and not self._forgets.hides(key)

    def _load(self, key: KVKey) -> ChunkKV | None:
        blob = self.read_blob(key)
        if blob is None:
            return None
        try:
            image = self._seal.opened(key.digest(), blob)
            if image is not None:
                return decode_entry(image, key)
            self._counters.warn_once("key", "holds entries that were signed with another key; not used")
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self.delete_blob(key)
        return None
