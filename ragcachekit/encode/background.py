"""Encoding and storing of what prompts missed, at once or in a background thread."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from threading import Lock

import torch

from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder, with_ingredients
from ragcachekit.encode.in_prompt import AverageEncoder, InPromptEncoder, RunningMean, takes_along
from ragcachekit.model.encoding import AverageEncoding, Encoding, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.kv import CONTEXTS, ChunkKV, context_number, contexts_of, token_ids_of, with_token_ids
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.variants import is_average
from ragcachekit.reports import EncodingStats
from ragcachekit.store.base import KVStore, concerns
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.threads import BackgroundWorker, Pause
from ragcachekit.types import Ids, KVKey

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # requests whose missing entries may wait; further ones are dropped
MAX_REFUSED = 4096  # remembered entries that the store could not keep
MAX_COUNTED = 65_536  # entries whose misses are counted, about 50 MB


class BackgroundEncoder:
    """Encodes and stores missing entries, each once.

    ``neighbours`` and ``in_prompts`` encode chunks under ``similar:n`` and ``in-prompt``. Work is dropped if
    ``still_valid`` returns False: the model has changed. ``stored`` is called with every stored entry, before
    it can be forgotten. Entries in ``forgets`` since the work on them began are not stored. :meth:`later`
    encodes an entry at its ``after``-th miss; ``pause`` may delay its thread before each layer.
    ``known_mean`` returns the key of what is stored of a chunk under ``average:n``: rows of another context
    join that mean. ``question`` are token ids of one about any chunk.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        store: KVStore,
        still_valid: Callable[[], bool],
        neighbours: NeighbourEncoder,
        in_prompts: InPromptEncoder,
        stored: Callable[[KVKey, ChunkKV], object] = lambda *_: None,
        forgets: ForgetEpochs | None = None,
        after: int = 1,
        worker: BackgroundWorker | None = None,
        pause: Pause | None = None,
        known_mean: Callable[[KVKey], KVKey | None] = lambda _: None,
        question: Ids = (),
    ) -> None:
        self.forgets, self._store, self._stored = forgets or ForgetEpochs(), store, stored
        self._encoder, self._neighbours, self._in_prompts = encoder, neighbours, in_prompts
        self._averages = AverageEncoder(in_prompts, question)
        self.still_valid = still_valid
        self._after, self._known_mean = after, known_mean
        self.stats, self._counting = EncodingStats(), Lock()
        # Written in ``forgets.storing``:
        self.misses = MissCounts()
        self._refused: dict[KVKey, None] = {}
        self.worker = worker or BackgroundWorker()
        self._jobs = self.worker.queue(self._encode_queued, MAX_WAITING, pause)

    def now(
        self,
        missing: Iterable[Missing],
        done: Callable[[KVKey, ChunkKV], object] = lambda *_: None,
        *,
        store: bool = True,
    ) -> None:
        """Encode in the caller's thread, and ``store``; ``done`` is called with each entry.

        The absent context of entries is encoded first.
        """
        for item, kv in self._encoded(self.complete(missing)):
            if not self.still_valid():
                return
            with self.forgets.storing:
                if store and self._is_current(item):
                    self._put(item, kv)
            self.count(encoded_tokens=kv.tokens)
            done(item.key, kv)

    def keep(self, entries: Iterable[tuple[Missing, ChunkKV]], counted: str = "captured_tokens") -> None:
        """Store what was computed in a prompt, unless forgotten since or stored already."""
        for item, kv in entries:
            with self.forgets.storing:
                if self._is_current(item) and (_joins_mean(item) or item.key not in self._store):
                    self._put(item, kv)
                    self.count(**{counted: kv.tokens})

    def count(self, **tokens: int) -> None:
        with self._counting:
            added = {name: getattr(self.stats, name) + more for name, more in tokens.items()}
            self.stats = replace(self.stats, **added)

    def _is_current(self, item: Missing) -> bool:
        """Whether nothing of the chunk and its context was forgotten since the work on it began."""
        forgets, namespace = self.forgets, item.key.namespace
        if forgets.forgot(item.key, item.epoch):
            return False
        return item.epoch == forgets.epoch or not forgets.forgot_within(namespace, item.content, item.epoch)

    def _put(self, item: Missing, kv: ChunkKV) -> None:
        key, content = item.key, item.content
        if _joins_mean(item):
            joined = self._joined(key, kv, content)
            if joined is None:
                return
            key, kv, content = joined
        kv = with_token_ids(kv, content)
        self._refused.pop(key, None)
        if self._store.put(key, kv):
            self._store.retain(key, item.retain)
            self._stored(key, kv)
            return
        self._refused[key] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _joined(self, key: KVKey, kv: ChunkKV, content: Ids) -> tuple[KVKey, ChunkKV, Ids] | None:
        """The mean that is stored of a chunk with a prompt's own rows, and all that it is computed from.

        None if it has that context. What cannot be gone on from is replaced.
        """
        context, known = context_number(key.digest()), self._known_mean(key)
        found = None if known is None else self._store.get(known, 0.0)
        held = None if found is None else token_ids_of(found.kv.sums)
        if known is None or found is None or held is None or not contexts_of(found.kv):
            contexts = torch.tensor([context], dtype=torch.float32)
            return key, replace(kv, sums={**kv.sums, CONTEXTS: contexts}), content
        if context in contexts_of(found.kv):
            return None
        mean = RunningMean.of(found.kv)
        mean.add(kv, context)
        key = replace(key, context=tuple(dict.fromkeys((*known.context, *key.context))))
        return key, mean.result(), (*held, *content)

    def refused(self, keys: Iterable[KVKey]) -> int:
        """Number of these entries that the store could not keep when they were last encoded."""
        return sum(key in self._refused for key in keys) if self._refused else 0

    def complete(self, missing: Iterable[Missing]) -> list[Missing]:
        """``missing`` after the absent entries of its context: the work of :meth:`now`."""
        return with_ingredients(missing, self._store)

    def _encoded(self, items: Sequence[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Every entry once, entries with neighbours after those."""
        groups: dict[Encoding, list[Missing]] = defaultdict(list)
        neighbours, in_prompts, averages = list[Missing](), list[Missing](), list[Missing]()
        for item in items:
            if isinstance(item.encoding, NeighbourEncoding):
                neighbours.append(item)
            elif isinstance(item.encoding, AverageEncoding):
                averages.append(item)
            elif isinstance(item.encoding, InPromptEncoding):
                in_prompts.append(item)
            else:
                groups[item.encoding].append(item)
        along = takes_along(averages, [item for group in groups.values() for item in group])
        taken = {item.key for item in along}
        for encoding, together in groups.items():
            group = [item for item in together if item.key not in taken]
            for index, kv in self._encoder.encode([item.token_ids for item in group], encoding):
                yield group[index], kv
        yield from self._neighbours.encode(neighbours)
        yield from self._averages.encode(averages, along)
        yield from self._in_prompts.encode(in_prompts)

    def later(self, missing: Iterable[Missing]) -> None:
        """Queue the missing entries of a request, to be counted and encoded in the background thread."""
        todo = list(missing)
        if todo and not self._jobs.add(todo) and self._jobs.waiting:
            log.warning("%d missing chunks are not encoded: %d requests wait", len(todo), MAX_WAITING)

    def _encode_queued(self, missing: Iterable[Missing]) -> None:
        self.now(self.due(item for item in missing if item.key not in self._store))

    def due(self, missing: Iterable[Missing], more: int = 0) -> list[Missing]:
        """Count a miss of each; returns those missed ``after + more`` times, which were not forgotten."""
        with self.forgets.storing:
            return [i for i in missing if self._is_current(i) and self.misses.is_due(i, self._after + more)]


def _joins_mean(item: Missing) -> bool:
    """Whether it is a prompt's own rows under ``average:n``."""
    return is_average(item.key) and isinstance(item.encoding, InPromptEncoding)


class MissCounts:
    """Misses of the entries that were not encoded yet, those missed last. Not thread safe.

    ``in-prompt`` entries are counted per chunk, as their context hardly ever comes back as a whole.
    """

    def __init__(self) -> None:
        self._misses: OrderedDict[KVKey, int] = OrderedDict()

    def is_due(self, item: Missing, after: int) -> bool:
        """Count a miss; True for the ``after``-th one, which ends the count of this entry."""
        key = replace(item.key, context=()) if isinstance(item.encoding, InPromptEncoding) else item.key
        misses = self._misses.pop(key, 0) + 1
        if misses < after:
            self._misses[key] = misses
            if len(self._misses) > MAX_COUNTED:
                self._misses.popitem(last=False)
        return misses >= after

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        for key in [key for key in self._misses if concerns(key, namespace, chunk_ids)]:
            del self._misses[key]
