"""Any sequence of operations, damage and restarts on a file system in memory, against a dict."""

from __future__ import annotations

import random

import fsspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_store_machine import BUDGET, KEYS, StoreMachine

from ragcachekit.store.base import KVStore
from ragcachekit.store.fsspec_store import FsspecStore
from ragcachekit.types import KVKey
from redis_kit import KEY_BYTES

keys = st.sampled_from(KEYS)
FS = fsspec.filesystem("memory")


class FsspecMachine(StoreMachine):
    def open(self) -> KVStore:
        if FS.exists("/machine"):
            FS.rm("/machine", recursive=True)
        return self.opened()

    def opened(self, key: bytes = KEY_BYTES) -> KVStore:
        return FsspecStore("memory://machine", BUDGET, key=key, deadline=20)

    def objects(self) -> dict[str, int]:
        """Digest → size, as they lie there."""
        found = FS.find("/machine", detail=True)
        return {path.rpartition("/")[2].removesuffix(".kv"): info["size"] for path, info in found.items()}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    @rule(draw=st.randoms(use_true_random=False), key=keys)
    def damage_and_read(self, draw: random.Random, key: KVKey) -> None:
        found = [path for path in FS.find("/machine") if key.digest() in path]
        if found:
            blob = bytearray(FS.cat_file(found[0]))
            place = draw.randrange(len(blob))
            blob[place] ^= 1 << draw.randrange(8)
            others = [FS.cat_file(path) for path in FS.find("/machine") if path != found[0]]
            FS.pipe_file(found[0], draw.choice([bytes(blob), bytes(blob[:place]), b"", *others]))
            assert self.store.get(key) is None
            if key in self.store:  # one that seems to be another deployment's stays; its sizes must agree
                self.store.forget(key.namespace)
                self.model = {k: kv for k, kv in self.model.items() if k.namespace != key.namespace}

    @rule(key=keys)
    def object_is_gone(self, key: KVKey) -> None:
        for path in [path for path in FS.find("/machine") if key.digest() in path]:
            FS.rm_file(path)
            assert self.store.get(key) is None

    @rule(key=keys)
    def another_deployment_never_hits(self, key: KVKey) -> None:
        other = self.opened(b"the key of somebody else")
        assert other.get(key) is None
        other.close()

    @invariant()
    def sums_are_those_of_the_objects(self) -> None:
        if hasattr(self, "store"):
            sizes = self.objects()
            (stats,) = self.store.stats()
            assert (stats.entries, stats.nbytes) == (len(sizes), sum(sizes.values()))


TestFsspecMachine = FsspecMachine.TestCase
TestFsspecMachine.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
