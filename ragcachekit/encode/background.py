"""Encoding and storing of what prompts missed, at once or in a background thread."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from ragcachekit.cancellation import CancelScope
from ragcachekit.encode.behind_neighbours import NeighbourEncoder, with_ingredients
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.encode.standalone import ChunkEncoder
from ragcachekit.errors import Cancelled
from ragcachekit.model.encoding import Encoding, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.plan.link_plan import Missing
from ragcachekit.store.base import KVStore, concerns
from ragcachekit.store.forget_epochs import ForgetEpochs
from ragcachekit.threads import DaemonPool, Job
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

BATCH = 32  # chunks taken from the queue at once
MOST_REFUSED = 4096  # remembered entries that the store could not keep


class BackgroundEncoder:
    """Encodes and stores missing entries, each once.

    ``neighbours`` and ``in_prompts`` encode chunks under ``similar:n`` and ``in-prompt``. Work is dropped if
    ``still_valid`` returns False: the model has changed. ``stored`` is called with every stored entry, before
    it can be forgotten. Entries in ``forgets`` since the work on them began are not stored.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        store: KVStore,
        still_valid: Callable[[], bool],
        neighbours: NeighbourEncoder,
        in_prompts: InPromptEncoder,
        stored: Callable[[KVKey, ChunkKV], object],
        forgets: ForgetEpochs,
    ) -> None:
        self.forgets, self._store, self._stored = forgets, store, stored
        self._encoder, self._neighbours, self._in_prompts = encoder, neighbours, in_prompts
        self._still_valid = still_valid
        self._refused: dict[KVKey, None] = {}  # written in ``forgets.storing``
        self._changed = threading.Condition()
        self._waiting: dict[KVKey, Missing] = {}  # with those in work; guarded by ``_changed``
        self._pool = DaemonPool("ragcachekit-warm")

    def now(self, missing: Iterable[Missing], done: Callable[[int], object] = lambda _: None) -> None:
        """Encode and store in the caller's thread; ``done`` is called with each entry's token count.

        The absent context of entries is encoded first.
        """
        for item, kv in self._encoded(self.complete(missing)):
            if not self._still_valid():
                return
            with self.forgets.storing():
                if self._is_current(item):
                    self._put(item.key, kv)
            done(kv.tokens)

    def keep(self, entries: Iterable[tuple[Missing, ChunkKV]]) -> None:
        """Store what a request computed itself, unless forgotten since or stored already."""
        for item, kv in entries:
            with self.forgets.storing():
                if self._is_current(item) and item.key not in self._store:
                    self._put(item.key, kv)

    def _is_current(self, item: Missing) -> bool:
        """Whether neither the chunk nor its context was forgotten since the work on it began."""
        return not self.forgets.forgot(item.key, item.epoch)

    def _put(self, key: KVKey, kv: ChunkKV) -> None:
        self._refused.pop(key, None)
        if self._store.put(key, kv):
            self._stored(key, kv)
            return
        self._refused[key] = None
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, keys: Iterable[KVKey]) -> int:
        """Number of these entries that the store could not keep when they were last encoded."""
        return sum(key in self._refused for key in keys) if self._refused else 0

    def complete(self, missing: Iterable[Missing]) -> list[Missing]:
        """``missing`` after the absent entries of its context: the work of :meth:`now`."""
        return with_ingredients(missing, self._store)

    def _encoded(self, items: Sequence[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Every entry once, entries with neighbours after those."""
        groups: dict[Encoding, list[Missing]] = defaultdict(list)
        neighbours, in_prompts = list[Missing](), list[Missing]()
        for item in items:
            if isinstance(item.encoding, NeighbourEncoding):
                neighbours.append(item)
            elif isinstance(item.encoding, InPromptEncoding):
                in_prompts.append(item)
            else:
                groups[item.encoding].append(item)
        for encoding, group in groups.items():
            for index, kv in self._encoder.encode([item.token_ids for item in group], encoding):
                yield group[index], kv
        yield from self._neighbours.encode(neighbours)
        yield from self._in_prompts.encode(in_prompts)

    def later(self, missing: Iterable[Missing]) -> None:
        """Queue for the background thread, each entry once."""
        todo = self.complete(missing)
        with self._changed:
            new = {i.key: i for i in todo if i.key not in self._waiting and self._is_current(i)}
            if new and self._pool.submit(Job(self._work)):
                self._waiting.update(new)

    @contextmanager
    def forgetting(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> Iterator[None]:
        """Hold back storing during a forget; afterwards drop queued entries of these chunks.

        Inside, call ``store.forget`` with the same arguments, then add them to :attr:`forgets`, even if the
        store raised. Entries being encoded at that time are then not stored either.
        """
        with self.forgets.storing(), self.forgets.storing_in_tree():
            try:
                yield
            finally:
                with self._changed:
                    for key in [k for k in self._waiting if concerns(k, namespace, chunk_ids)]:
                        del self._waiting[key]
                    self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Stop the running forward before its next layer, drop the queue and end the thread."""
        self._pool.close()
        self._remove(list(self._waiting.values()))

    def _work(self) -> None:
        while batch := self._batch():
            try:
                with CancelScope(self._pool.closed):
                    self.now(item for item in batch if self._waits(item) and item.key not in self._store)
            except Cancelled:
                pass
            except Exception:
                # A failed encoding costs later requests their reuse, never this one its answer.
                log.warning("could not encode %d chunks in the background", len(batch), exc_info=True)
            self._remove(batch)

    def _batch(self) -> list[Missing]:
        with self._changed:
            return [] if self._pool.closed.is_set() else list(islice(self._waiting.values(), BATCH))

    def _waits(self, item: Missing) -> bool:
        return self._waiting.get(item.key) is item

    def _remove(self, batch: Iterable[Missing]) -> None:
        with self._changed:
            for item in batch:
                if self._waits(item):  # else forgotten, and perhaps missed again since
                    del self._waiting[item.key]
            self._changed.notify_all()
