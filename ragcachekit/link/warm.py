"""Encode what a prompt missed: now, or in the background after the answer."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

from ragcachekit.link.plan import Missing
from ragcachekit.model.encoder import ChunkEncoder, Encoding
from ragcachekit.store.base import KVStore

log = logging.getLogger(__name__)


class Warmer:
    """Fills the store, each entry once.

    Parameters
    ----------
    encoder : ChunkEncoder
    store : KVStore
    still_valid : callable
        Asked before each batch: False (the model changed under our feet) drops the work.
    """

    def __init__(self, encoder: ChunkEncoder, store: KVStore, still_valid: Callable[[], bool]) -> None:
        self._encoder = encoder
        self._store = store
        self._still_valid = still_valid
        self._queue: queue.SimpleQueue[Missing | None] = queue.SimpleQueue()
        self._waiting: dict[object, Missing] = {}
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self, missing: Iterable[Missing], done: Callable[[int], object] = lambda _: None) -> int:
        """Encode and store in the caller's thread; ``done`` hears each entry's tokens.

        Returns how many entries were kept.
        """
        groups: dict[Encoding, list[Missing]] = defaultdict(list)
        for item in missing:
            groups[item.encoding].append(item)
        kept = 0
        for encoding, items in groups.items():
            for index, kv in self._encoder.encode([item.token_ids for item in items], encoding):
                if not self._still_valid():
                    return kept
                kept += self._store.put(items[index].key, kv)
                done(kv.tokens)
        return kept

    def later(self, missing: Iterable[Missing]) -> None:
        """Queue for the background thread; what is queued already is not queued again."""
        with self._condition:
            if self._closed:
                return
            for item in missing:
                if item.key not in self._waiting:
                    self._waiting[item.key] = item
                    self._queue.put(item)
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragcachekit-warm", daemon=True)
                self._thread.start()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued; False if that took longer than ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Finish the entry in work, drop the rest, end the thread."""
        with self._condition:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item]
            while not self._queue.empty() and len(batch) < 32 and (more := self._queue.get()) is not None:
                batch.append(more)
            try:
                if not self._closed:
                    self.now(item for item in batch if item.key not in self._store)
            except Exception:
                # An encode that fails costs later requests their reuse, never this one its answer.
                log.warning("could not encode %d chunks in the background", len(batch), exc_info=True)
            with self._condition:
                for item in batch:
                    self._waiting.pop(item.key, None)
                self._condition.notify_all()
        with self._condition:
            self._waiting.clear()
            self._condition.notify_all()
