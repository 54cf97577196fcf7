"""Disk tier of a knowledge tree: nodes evicted from memory, and forgets of other processes."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from threading import RLock
from uuid import uuid4

import torch

from ragcachekit.errors import StoreError
from ragcachekit.files import read_regular, replace_file
from ragcachekit.model.kv import TOKEN_IDS, ChunkKV, token_ids_of, with_token_ids
from ragcachekit.prefix_tree.nodes import Path, Reused, Root, fault, key_of
from ragcachekit.store.base import KVStore, NullStore, StoreStats, concerns
from ragcachekit.store.disk_folder import FolderLock, LockFailed
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.store.guarded import guarded
from ragcachekit.store.loader import DEADLINE_SECONDS
from ragcachekit.threads import attempt
from ragcachekit.types import KVKey

DISK = "tree:disk"
FOLDER = "tree"
"""Folder of a tree's entries, in that of the chunk store's disk tier."""

FORGETS = "forgets"
"""Folder of the log of forgets, beside the entries."""

_SECONDS_TO_WRITE = 5.0
"""Longest wait of a writer for another process; then it writes nothing."""

_SECONDS_TO_FORGET = 60.0
"""Longest wait of a ``forget`` for a writer; then it continues, and raises StoreError at the end."""

_LOG = logging.getLogger(__name__)

Ids = frozenset[str] | None
"""Forgotten segment ids, or None for the whole namespace."""

Dropped = tuple[list[KVKey], int, Ids]
"""What a forget dropped from memory: keys of nodes, a number of turns; and all ids that it was about."""

Drop = Callable[[str, Ids, ForgottenTexts | None], Dropped]
"""Forgets ids and texts of a namespace in memory, :meth:`TreeDisk.drop_pending` included."""


class TreeDisk:
    """Store of evicted nodes, written outside ``lock``, the tree's, which look-ups take.

    Entries have the token ids of their whole path, so that texts can be found in them.
    """

    def __init__(self, store: KVStore | None, lock: RLock, drop: Drop) -> None:
        self._keeps = store is not None
        self.store = NullStore() if store is None else guarded(store, DEADLINE_SECONDS)
        folder = getattr(store, "folder", None)  # which other processes may share
        self._log = ForgetLog(folder / FORGETS) if folder is not None else None
        self._drop = drop
        self._pending: dict[KVKey, ChunkKV] = {}
        self._lock = lock
        self._writing = RLock()  # taken before the other one

    def read(self, root: Root, path: Path, known: int) -> Iterator[Reused]:
        """The steps after the first ``known``, as far as they are stored."""
        start = sum(step.tokens for step in path[:known])
        for number in range(known, len(path)):
            step, key = path[number], key_of(root, path[: number + 1])
            found = self.store.get(key) if key in self.store else None
            if found is None:
                return
            if fault(found.kv, step, start):
                self.store.discard(key)
                return
            sums = {name: tensor for name, tensor in found.kv.sums.items() if name != TOKEN_IDS}
            yield Reused(step, replace(found.kv, sums=sums), DISK)
            start += step.tokens

    def add(self, root: Root, path: Path, kv: ChunkKV) -> None:
        """Queue KV for the next :meth:`write`; the lock is held."""
        if self._keeps:
            ids = [token for step in path for token in step.token_ids]
            known = len(ids) == sum(step.tokens for step in path)
            self._pending[key_of(root, path)] = with_token_ids(kv, ids) if known else kv

    def discard(self, root: Root, path: Path) -> None:
        """Drop the entry of a path's last node, which cannot be used; the lock is held."""
        key = key_of(root, path)
        self._pending.pop(key, None)
        self.store.discard(key)

    def drop_pending(self, namespace: str, chunk_ids: Ids, texts: ForgottenTexts | None) -> None:
        """Remove what was forgotten from the queue; the lock is held."""
        for key, kv in list(self._pending.items()):
            of_text = texts is not None and key.namespace == namespace and _may_hold(kv.sums, texts)
            if of_text or concerns(key, namespace, chunk_ids):
                del self._pending[key]

    def apply_forgets(self, namespace: str) -> None:
        """Forget what other processes on the same disk have forgotten; the lock is held."""
        if self._log is not None and self._log.changed(namespace):
            self._drop(namespace, None, None)  # ids are not written down: all of it can be computed again

    def write(self) -> None:
        """Write the queue. Writes and forgets exclude each other, across processes too."""
        if not self._pending:
            return
        with self._writing, self._log.writing() if self._log else nullcontext(True) as may_write:
            with self._lock:
                for namespace in {key.namespace for key in self._pending}:
                    self.apply_forgets(namespace)
                pending, self._pending = self._pending, {}
            for key, kv in pending.items() if may_write else ():
                if key not in self.store or kv.has_state:
                    attempt(self._put, key, kv)  # a GPU may have lost it

    def _put(self, key: KVKey, kv: ChunkKV) -> None:
        self.store.put(key, kv.to("cpu"))

    def forget(self, namespace: str, chunk_ids: Ids, texts: ForgottenTexts | None = None) -> int:
        """Forget in memory, in the store and in other processes; returns the number of nodes and turns."""
        with self._writing, self._log.forgetting(namespace) if self._log else nullcontext():
            if chunk_ids is not None and texts is not None:
                chunk_ids |= self._holding(namespace, texts)
            keys, turns, ids = self._drop(namespace, chunk_ids, texts)
            only_in_memory = sum(key not in self.store for key in keys)
            try:
                return turns + only_in_memory + self.store.forget(namespace, ids)
            finally:
                self._drop(namespace, ids, None)  # what requests read from the disk meanwhile

    def _holding(self, namespace: str, texts: ForgottenTexts) -> set[str]:
        """Ids of the stored nodes whose path holds one of the texts, or has unknown tokens."""
        ids, last = set[str](), tuple[str, ...]()
        every = self.store.keys()
        keys = {(*key.context, key.chunk_id): key for key in every if key.namespace == namespace}
        for path in sorted(keys, reverse=True):  # a path comes after those that go on from it
            if last[: len(path)] == path or not ids.isdisjoint(path):
                continue
            sums = self.store.sums(keys[path])
            if sums is None or _may_hold(sums, texts):
                ids.add(path[-1])
            else:
                last = path
        return ids

    def stats(self) -> list[StoreStats]:
        return [replace(record, tier=f"tree:{record.tier}") for record in self.store.stats()]

    def close(self) -> None:
        self.write()
        self.store.close()


class ForgetLog:
    """One file per namespace, which every ``forget`` replaces. Not thread safe.

    ``forget`` holds the folder's lock while it deletes and replaces the file, a writer while it looks and
    writes: in either order, forgotten entries are gone afterwards.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._lock = FolderLock(folder / "lock")
        self._seen: dict[str, bytes] = {}  # content of a namespace's file

    def changed(self, namespace: str) -> bool:
        """Whether others forgot something since the last call; never the first time."""
        state, seen = self._state(namespace), self._seen.get(namespace)
        self._seen[namespace] = state
        return seen is not None and seen != state

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Exclude other writers and forgets; False if that fails, and nothing must be written."""
        with ExitStack() as held:
            error = self._try(held, _SECONDS_TO_WRITE)
            if error is not None:
                _LOG.warning("the tree is not written to the disk: %s", error)
            yield error is None

    @contextmanager
    def forgetting(self, namespace: str) -> Iterator[None]:
        """Exclude writers, and note the forget at the end. A failing medium is only logged.

        The note comes last, as others may still read entries while they are being deleted. StoreError, after
        all else, if the wait for a writer timed out: it may write forgotten entries again.
        """
        with ExitStack() as held:
            error = self._try(held, _SECONDS_TO_FORGET)
            if error is not None and not error.busy:
                _LOG.warning("other processes do not wait while something is forgotten: %s", error)
            try:
                yield
            finally:
                before, note = self._state(namespace), uuid4().hex
                try:
                    replace_file(self._path(namespace), note)
                    if self._seen.get(namespace, before) == before:  # else somebody else's is not seen yet
                        self._seen[namespace] = note.encode()
                except OSError as failed:
                    _LOG.warning("other processes are not told what was forgotten: %s", failed)
        if error is not None and error.busy:
            raise StoreError(
                "another process has been writing to the tree's folder all the time and may write what was "
                f"forgotten; forget again when it goes on or has ended: {error}"
            ) from error

    def _try(self, held: ExitStack, seconds: float) -> LockFailed | None:
        """Hold the folder's lock; why that failed."""
        try:
            held.enter_context(self._lock.held(seconds))
        except LockFailed as error:
            return error
        return None

    def _path(self, namespace: str) -> pathlib.Path:
        return self._folder / blake2b(namespace.encode(), digest_size=16).hexdigest()

    def _state(self, namespace: str) -> bytes:
        try:
            return read_regular(self._path(namespace))
        except OSError:
            return b""


def _may_hold(sums: Mapping[str, torch.Tensor], texts: ForgottenTexts) -> bool:
    token_ids = token_ids_of(sums)
    return token_ids is None or texts.begin_in(token_ids)
