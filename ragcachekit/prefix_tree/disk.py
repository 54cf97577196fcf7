"""Disk tier of a knowledge tree: every node that was computed, for the next process too."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from uuid import uuid4

import torch

from ragcachekit.files import read_regular, replace_file
from ragcachekit.model.kv import ChunkKV, token_ids_of, with_token_ids
from ragcachekit.prefix_tree.nodes import Path, Reused, Root, fault, key_of
from ragcachekit.store.base import ForgottenTexts, KVStore, NullStore, StoreStats

DISK = "tree:disk"
FOLDER = "tree"
"""Folder of a tree's entries, in that of the chunk store's disk tier."""


FORGETS = "forgets"
"""Folder beside the entries: one file per namespace, which every ``forget`` replaces."""

_LOG = logging.getLogger(__name__)


class TreeDisk:
    """Store of nodes, which other processes may share. Not thread safe, but for reading.

    Entries have the token ids of their whole path, so that texts can be found in them.
    """

    def __init__(self, store: KVStore | None) -> None:
        self._keeps = store is not None
        self.store = NullStore() if store is None else store
        folder = getattr(store, "folder", None)
        self._forgets = folder / FORGETS if folder is not None else None
        self._seen: dict[str, bytes] = {}  # content of a namespace's file

    def changed(self, namespace: str) -> bool:
        """Whether other processes forgot something since the last call; never the first time."""
        state, seen = self.state(namespace), self._seen.get(namespace)
        self._seen[namespace] = state
        return seen is not None and seen != state

    def note(self, namespace: str) -> None:
        """Let other processes know that something is being forgotten; a failing medium is only logged.

        Called before deleting, for those who are just writing, and after it, for those who still read it.
        """
        if self._forgets is None:
            return
        before, note = self.state(namespace), uuid4().hex
        try:
            replace_file(self._forgets / _digest(namespace), note)
        except OSError as error:
            _LOG.warning("other processes are not told what was forgotten: %s", error)
        if self._seen.get(namespace, before) == before:  # else somebody else's is not seen yet
            self._seen[namespace] = note.encode()

    def state(self, namespace: str) -> bytes:
        """Changes with every forget, also in other processes."""
        try:
            return read_regular(self._forgets / _digest(namespace)) if self._forgets is not None else b""
        except OSError:
            return b""

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
            yield Reused(step, replace(found.kv, sums={}), DISK)
            start += step.tokens

    def write(self, root: Root, path: Path, kvs: Sequence[ChunkKV], state: bytes) -> bool:
        """Store KV of the last steps of a path, where it is not there yet.

        False, with nothing stored, if others forgot something since the namespace's :meth:`state`.
        """
        keys = []
        for stop, kv in enumerate(kvs, len(path) - len(kvs) + 1):
            key = key_of(root, path[:stop])
            if self._keeps and key not in self.store:
                keys.append(key)
                ids = [token for step in path[:stop] for token in step.token_ids]
                known = len(ids) == sum(step.tokens for step in path[:stop])
                self.store.put(key, (with_token_ids(kv, ids) if known else kv).to("cpu"))
        if self.state(root.namespace) == state:
            return True
        for key in keys:
            self.store.discard(key, damaged=False)
        return False

    def holding(self, namespace: str, texts: ForgottenTexts) -> set[str]:
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
        """The store's records, under the tree's names."""
        return [replace(record, tier=f"tree:{record.tier}") for record in self.store.stats()]


def _digest(namespace: str) -> str:
    return blake2b(namespace.encode(), digest_size=16).hexdigest()


def _may_hold(sums: Mapping[str, torch.Tensor], texts: ForgottenTexts) -> bool:
    token_ids = token_ids_of(sums)
    return token_ids is None or texts.begin_in(token_ids)
