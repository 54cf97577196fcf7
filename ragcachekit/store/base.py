"""The contract of every storage tier and its counters; what was forgotten."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from threading import Lock

import torch

from ragcachekit.model.kv import ChunkKV, TensorShape
from ragcachekit.reports import Report
from ragcachekit.threads import refuse_after_fork
from ragcachekit.types import KVKey, whole_id


@dataclass(frozen=True)
class Found:
    """A hit: the KV and the tier that held it (``gpu``, ``host``, ``disk``, ``redis``, ``bulk``)."""

    kv: ChunkKV
    tier: str


Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""

Evicted = Sequence[tuple[KVKey, ChunkKV]]
"""Entries that a tier evicted."""


@dataclass(frozen=True, eq=False)
class LayerSource:
    """A hit whose header is verified and whose layers are to be read one by one, by one thread at a time.

    - ``nbytes``: To be read.
    - ``shapes``: Per layer the dtype and shape of keys and of values, as ``layer`` returns them.
    - ``layer``: Called with 0, 1, and so on; returns verified keys and values. Raises EntryDamaged if a byte
      was altered (the entry has then been dropped) and OSError if it cannot be read.
    - ``finished``: Called when all layers were read: counts the hit; faster tiers may keep the KV.
    - ``close``: Closes files; allowed at any time, may be repeated. The opener calls it.
    - ``start``, ``sums``, ``quantised``: As in :class:`ragcachekit.model.kv.ChunkKV`.
    """

    tier: str
    nbytes: int
    shapes: tuple[tuple[TensorShape, TensorShape], ...]
    layer: Callable[[int], Pair]
    finished: Callable[[ChunkKV], object]
    close: Callable[[], object]
    start: int | None = None
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantised: str = ""

    @property
    def layers(self) -> int:
        return len(self.shapes)

    @property
    def tokens(self) -> int:
        return self.shapes[0][0][1][1]


@dataclass(frozen=True)
class StoreStats(Report):
    """Counters of one tier since it was opened; ``nbytes`` and ``entries`` are the present content.

    ``damaged`` entries failed verification or have another shape than the model's, and were dropped.
    ``failed_writes`` counts refused puts (no space, larger than the budget, I/O error). ``writable`` is False
    after the medium refused a write, until it takes one.
    """

    tier: str
    entries: int
    nbytes: int
    budget: int
    hits: int
    misses: int
    evictions: int
    damaged: int
    failed_writes: int
    writable: bool = True


class KVStore:
    """A store of chunk KV, the base of every implementation. They promise:

    - ``get`` returns exactly what was ``put`` under an equal key, byte for byte, or None (a tier that
      quantises: the same rounded KV every time, marked as such). An entry that fails verification is a miss.
    - Nothing raises for a full or failing medium: a ``put`` that cannot be kept returns False, is not
      found afterwards and does not damage older entries; ``get`` returns None.
    - Returned tensors are shared and must not be written to.
    - All methods are thread safe.
    - ``nbytes`` never exceeds the budget after a call returns; a new entry never evicts itself
      (one larger than the budget, or than its namespace's quota, is not kept).

    Stores of several tiers ask three more things of each: ``shared`` is True if other processes use the
    medium, ``remote`` if a service may be slow, and :meth:`admit` and :meth:`drop` return more than
    :meth:`put` and :meth:`forget`.
    """

    shared = False
    remote = False

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, or None.

        ``weight`` is for eviction policies that weigh uses; 0 counts no use (a prefetch).
        """
        raise NotImplementedError

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`, without waiting for layers that have to be read; by default it is :meth:`get`."""
        return self.get(key, weight)

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        """What was recorded with an entry, None if it is not there; reads no layer and counts no use."""
        opened = self.open(key, 0.0)
        if isinstance(opened, LayerSource):
            opened.close()
            return opened.sums
        return None if opened is None else opened.kv.sums

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store ``kv`` under ``key``; True if it can now be read back. Idempotent."""
        return self.admit(key, kv)[0]

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, returning also evicted entries that a slower tier may keep."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        """Whether ``get`` would probably hit; reads no tensor and counts no access."""
        raise NotImplementedError

    def in_memory(self, key: KVKey) -> bool:
        """Whether ``get`` would find the entry without any I/O; counts no access. By default it would not."""
        return False

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        """Drop the entry under ``key``, if there is one, and count it as damaged or else as evicted.

        By default nothing. Remote tiers drop damaged entries alone.
        """

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """Keys of all readable entries, or of those in memory, the latest first; by default none."""
        return iter(())

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries of the namespace whose chunk id, or any context id, is among ``chunk_ids``.

        ``None`` drops the whole namespace. Returns the number of dropped entries. Raises StoreError if some
        may be left.
        """
        return len(self.drop(namespace, chunk_ids))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys, which several tiers may have."""
        return frozenset()

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier."""
        return ()

    def close(self) -> None:
        """Release files and threads; further calls are misses."""


def concerns(key: KVKey, namespace: str, chunk_ids: AbstractSet[str] | None) -> bool:
    """Whether ``forget(namespace, chunk_ids)`` drops ``key``; the ids of its context count as well."""
    if key.namespace != namespace:
        return False
    return chunk_ids is None or not chunk_ids.isdisjoint(map(whole_id, (key.chunk_id, *key.context)))


def quota_of(quotas: Mapping[str, int], namespace: str) -> int | None:
    """Bytes that a namespace may take: its own entry, else that of ``*``, else no limit."""
    return quotas.get(namespace, quotas.get("*"))


_log = logging.getLogger(__name__)


class Counters:
    """Thread-safe event counts of one tier, and a log of its failures."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._warned: set[str] = set()
        refuse_after_fork(self)
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "damaged": 0, "failed_writes": 0}

    def count(self, event: str, by: int = 1) -> None:
        """Add to ``hits``, ``misses``, ``evictions``, ``damaged`` or ``failed_writes``."""
        with self._lock:
            self._counts[event] += by

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log a warning the first time, at debug level afterwards."""
        with self._lock:
            level = logging.DEBUG if kind in self._warned else logging.WARNING
            self._warned.add(kind)
        _log.log(level, f"%s tier: {message}", self._tier, *args)

    def stats(self, *, entries: int, nbytes: int, budget: int, writable: bool = True) -> StoreStats:
        """The counts together with the tier's present content."""
        with self._lock:
            return StoreStats(self._tier, entries, nbytes, budget, **self._counts, writable=writable)


class NullStore(KVStore):
    """Keeps nothing: every ``get`` is a miss, and every ``put`` is refused."""

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        return False

    def __contains__(self, key: KVKey) -> bool:
        return False


# -- what was forgotten ----------------------------------------------------------------------------------

MIN_OVERLAP = 3
"""Characters of a forgotten text with which a kept beginning may end: fewer say nothing of it."""


class ForgottenTexts:
    """Finds texts in token ids that ``decode`` makes text of, special tokens shown and nothing cleaned up.

    Whitespace does not count: chains strip texts and wrap their lines, and tokenizers add blanks. A text that
    a tokenizer normalises should be given in its decoded form as well. Blank ones are ignored.
    """

    def __init__(self, texts: Iterable[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = tuple(dict.fromkeys(filter(None, map(_squeezed, texts))))
        self._decode = decode

    def in_text(self, text: str) -> bool:
        """Whether a text holds one of them."""
        text = _squeezed(text)
        return any(one in text for one in self._texts)

    def within(self, token_ids: Sequence[int]) -> bool:
        """Whether the decoded ids hold one of them."""
        return self.in_text(self._decode(token_ids))

    def begin_in(self, token_ids: Sequence[int]) -> bool:
        """As :meth:`within`, or the ids end inside one."""
        return self._start(_squeezed(self._decode(token_ids))) is not None

    def first_part(self, parts: Sequence[Sequence[int]]) -> int | None:
        """Number of the part in which the first of them begins, or that a text at the end begins in."""
        ids = [token for part in parts for token in part]
        start = self._start(_squeezed(self._decode(ids)))
        if start is None:
            return None
        ends = list(accumulate(map(len, parts)))
        after = bisect_right(ends, start, key=lambda end: len(_squeezed(self._decode(ids[:end]))))
        return min(after, len(parts) - 1)

    def _start(self, text: str) -> int | None:
        places = [place for one in self._texts if (place := text.find(one)) >= 0]
        for one in self._texts:
            sizes = range(min(len(one), len(text)), MIN_OVERLAP - 1, -1)
            places += [len(text) - size for size in sizes if text.endswith(one[:size])][:1]
        return min(places, default=None)


def _squeezed(text: str) -> str:
    return "".join(text.split())


MAX_NAMES = 100_000
MAX_TEXTS = 64  # forgets of texts


@dataclass
class _Namespace:
    whole: int = 0  # epoch of the last forget of everything
    last: dict[str, int] = field(default_factory=dict)  # name to that epoch
    texts: list[tuple[int, ForgottenTexts]] = field(default_factory=list)  # with their epochs

    def newer_half(self) -> _Namespace:
        """What remains if the older half of the epochs counts as forgets of everything."""
        epochs = sorted({*self.last.values(), *(epoch for epoch, _ in self.texts)})
        whole = max(self.whole, epochs[(len(epochs) - 1) // 2])
        return _Namespace(
            whole,
            {name: epoch for name, epoch in self.last.items() if epoch > whole},
            [(epoch, within) for epoch, within in self.texts if epoch > whole],
        )


class ForgetEpochs:
    """A count of forgets, and for each chunk the count at its last one. Thread safe.

    Work takes :meth:`now` before its first lookup, and stores a result inside ``storing`` if nothing it
    depends on was forgotten since. A forget is added inside ``storing`` and ``storing_in_tree`` when it has
    reached every tier. :data:`MAX_NAMES` names and the texts of :data:`MAX_TEXTS` forgets of one namespace
    are remembered; beyond that, the older half counts as a forget of the whole namespace, which costs work
    that began before it.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._namespaces: dict[str, _Namespace] = {}
        self._lock = Lock()
        self.storing = Lock()
        """Around storing, and around forgetting in every tier."""
        self.storing_in_tree = Lock()
        """The same for the knowledge tree, whose disk would delay encoding; taken second."""

    def now(self) -> int:
        """The number of forgets so far."""
        return self._epoch

    def add(
        self,
        namespace: str,
        chunk_ids: Iterable[str] | None = None,
        texts: Iterable[str] = (),
        within: ForgottenTexts | None = None,
    ) -> None:
        """Count a forget of chunks and texts; without ids, of the whole namespace.

        ``within`` finds the texts where they are part of what was computed.
        """
        with self._lock:
            epoch = self._epoch + 1
            known = self._namespaces.setdefault(namespace, _Namespace())
            if within is not None:
                known.texts.append((epoch, within))
            if chunk_ids is not None:
                known.last.update(dict.fromkeys([*chunk_ids, *map(_name, texts)], epoch))
            if chunk_ids is None:
                self._namespaces[namespace] = _Namespace(whole=epoch)
            elif len(known.last) > MAX_NAMES or len(known.texts) > MAX_TEXTS:
                self._namespaces[namespace] = known.newer_half()
            self._epoch = epoch

    def forgot(self, key: KVKey, since: int) -> bool:
        """Whether the chunk, or one of its context, was forgotten after ``since``."""
        return self.forgot_any(key.namespace, (key.chunk_id, *key.context), since)

    def forgot_text(self, namespace: str, text: str, since: int) -> bool:
        """As :meth:`forgot`, for a chunk's text without outer whitespace."""
        return self.forgot_any(namespace, (_name(text),), since)

    def forgot_any(self, namespace: str, names: Iterable[str], since: int) -> bool:
        """As :meth:`forgot`, for any of several chunk ids."""
        if self._epoch == since:
            return False
        with self._lock:
            known = self._namespaces.get(namespace, _Namespace())
            return known.whole > since or any(known.last.get(whole_id(name), 0) > since for name in names)

    def forgot_within(self, namespace: str, token_ids: Sequence[int], since: int) -> bool:
        """Whether KV of these token ids holds a text that was forgotten after ``since``."""
        if self._epoch == since:
            return False
        with self._lock:
            known = self._namespaces.get(namespace, _Namespace())
            whole, later = known.whole, [within for epoch, within in known.texts if epoch > since]
        return whole > since or any(within.within(token_ids) for within in later)


def _name(text: str) -> str:
    """The digest of a text; no chunk id has this form."""
    return "text:" + blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
