"""Encode what a prompt missed: now, or in the background after the answer."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from ragcachekit.link.contextual import NeighbourEncoder, ingredients, with_ingredients
from ragcachekit.link.encodings import InPromptEncoding, NeighbourEncoding
from ragcachekit.link.in_prompt import InPromptEncoder
from ragcachekit.link.planned import Missing
from ragcachekit.model.encoder import ChunkEncoder, Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore, concerns
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

BATCH = 32
"""Chunks taken from the queue at once."""

IDLE_SECONDS = 0.5
"""How long the thread waits for more before it ends."""


class Warmer:
    """Fills the store, each entry once.

    Parameters
    ----------
    encoder : ChunkEncoder
    store : KVStore
    still_valid : callable
        Asked before each batch: False (the model changed under our feet) drops the work.
    behind_chunks : NeighbourEncoder, optional
        For chunks under ``similar:n``.
    in_prompts : InPromptEncoder, optional
        For chunks under ``in-prompt``.
    stored : callable
        Hears of every entry that was stored, before anybody can forget it.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        store: KVStore,
        still_valid: Callable[[], bool],
        behind_chunks: NeighbourEncoder | None = None,
        in_prompts: InPromptEncoder | None = None,
        stored: Callable[[KVKey, ChunkKV], object] = lambda *_: None,
    ) -> None:
        self._encoder = encoder
        self._behind_chunks = behind_chunks
        self._in_prompts = in_prompts
        self._stored = stored
        self._store = store
        self._still_valid = still_valid
        self._queue: queue.SimpleQueue[Missing | None] = queue.SimpleQueue()
        self._waiting: dict[KVKey, Missing] = {}
        self._condition = threading.Condition()
        self._keeping = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        # At exit too: an interpreter that goes while a thread is inside the model may crash.
        self._end = weakref.finalize(self, _end, self._closed, self._queue, self._threads)

    def now(
        self,
        missing: Iterable[Missing],
        done: Callable[[int], object] = lambda _: None,
        wanted: Callable[[Missing], bool] = lambda _: True,
    ) -> int:
        """Encode and store in the caller's thread; ``done`` hears each entry's tokens.

        What an entry is encoded behind comes first, where the store does not hold it (:meth:`complete`).
        ``wanted`` is asked about each entry when it is about to be stored. Returns how many were kept.
        """
        kept = 0
        for item, kv in self._encoded(self.complete(missing)):
            if not self._still_valid():
                return kept
            with self._keeping:
                if wanted(item) and self._store.put(item.key, kv):
                    self._stored(item.key, kv)
                    kept += 1
            done(kv.tokens)
        return kept

    def complete(self, missing: Iterable[Missing]) -> list[Missing]:
        """``missing`` and all that has to be encoded before it: the work of :meth:`now`."""
        return with_ingredients(missing, self._store)

    def _encoded(self, items: Sequence[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Everything once, block by block what stands behind chunks, after those chunks.

        In blocks, so that a store too small for all of it still holds what a block is encoded behind.
        """
        behind_chunks = [item for item in items if isinstance(item.encoding, NeighbourEncoding)]
        in_prompts = [item for item in items if isinstance(item.encoding, InPromptEncoding)]
        contextual = NeighbourEncoding, InPromptEncoding
        alone = {item.key: item for item in items if not isinstance(item.encoding, contextual)}
        if behind_chunks and self._behind_chunks is None:
            raise ValueError("this Warmer was made without behind_chunks=, which similar:n needs")
        for start in range(0, len(behind_chunks), BATCH):
            block = behind_chunks[start : start + BATCH]
            first = {part.key for item in block for _, part in ingredients(item)} & alone.keys()
            yield from self._encoded_alone([alone.pop(key) for key in list(alone) if key in first])
            if self._behind_chunks is not None:
                yield from self._behind_chunks.encode(block)
        yield from self._encoded_alone(alone.values())
        if in_prompts and self._in_prompts is None:
            raise ValueError("this Warmer was made without in_prompts=, which the encoder in-prompt needs")
        if self._in_prompts is not None:
            yield from self._in_prompts.encode(in_prompts)

    def _encoded_alone(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        groups: dict[Encoding, list[Missing]] = defaultdict(list)
        for item in items:
            groups[item.encoding].append(item)
        for encoding, group in groups.items():
            for index, kv in self._encoder.encode([item.token_ids for item in group], encoding):
                yield group[index], kv

    def later(self, missing: Iterable[Missing]) -> None:
        """Queue for the background thread; what is queued already is not queued again."""
        todo = self.complete(missing)
        with self._condition:
            if self._closed.is_set():
                return
            for item in todo:
                if item.key not in self._waiting:
                    self._waiting[item.key] = item
                    self._queue.put(item)
            if self._waiting and not self._threads:
                self._threads.append(
                    threading.Thread(target=self._work, name="ragcachekit-warm", daemon=True)
                )
                self._threads[0].start()

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Give up what ``store.forget`` with the same arguments is about; call it before that.

        Otherwise a chunk that waits or is being encoded would be stored after it was forgotten.
        """
        with self._keeping, self._condition:
            for key in [k for k in self._waiting if concerns(k, namespace, chunk_ids)]:
                del self._waiting[key]
            self._condition.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued; False if that took longer than ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Finish the entries in work, drop the rest, end the thread."""
        self._end()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                todo = [item for item in batch if self._waits(item) and item.key not in self._store]
                self.now(todo, wanted=self._waits)
            except Exception:
                # An encode that fails costs later requests their reuse, never this one its answer.
                log.warning("could not encode %d chunks in the background", len(batch), exc_info=True)
            self._done(batch)

    def _next_batch(self) -> list[Missing]:
        """What is queued, at most :data:`BATCH`; empty when the thread should end."""
        batch: list[Missing] = []
        try:
            while len(batch) < BATCH:
                item = self._queue.get(timeout=0 if batch else IDLE_SECONDS)
                if item is None:  # closed
                    break
                batch.append(item)
        except queue.Empty:
            pass
        if self._closed.is_set():
            self._done(list(self._waiting.values()))
            return []
        with self._condition:
            if not batch and self._queue.empty():
                # Idle: let go, so that a RagCache that was dropped without close can be freed.
                self._threads.clear()
            elif not batch:
                return self._next_batch()
        return batch

    def _waits(self, item: Missing) -> bool:
        return item.key in self._waiting

    def _done(self, batch: Iterable[Missing]) -> None:
        with self._condition:
            for item in batch:
                self._waiting.pop(item.key, None)
            self._condition.notify_all()


def _end(
    closed: threading.Event, waiting: queue.SimpleQueue[Missing | None], threads: list[threading.Thread]
) -> None:
    closed.set()
    waiting.put(None)
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join()
