"""Any sequence of operations, damage and restarts against a dict: the value last put, or a miss."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey
from store_kit import contents, file_of, kv_of

KEYS = [
    KVKey(fingerprint, namespace, chunk, "standalone" if not context else "similar:1", context)
    for fingerprint in ("weights-1", "weights-2")
    for namespace in ("acme", "globex")
    for chunk, context in (("a", ()), ("b", ()), ("a", ("b",)), ("c", ("a", "b")))
]
keys = st.sampled_from(KEYS)
BUDGET = 12_000  # a handful of entries: evictions happen all the time


class StoreMachine(RuleBasedStateMachine):
    """The oracle is ``self.model``, a dict that forgets nothing unless told to."""

    on_disk = False
    bounded = True  # within BUDGET bytes of its own

    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp())
        self.model: dict[KVKey, ChunkKV] = {}
        self.store = self.open()

    def open(self):
        raise NotImplementedError

    def teardown(self):
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(key=keys, seed=st.integers(0, 99), tokens=st.integers(1, 40))
    def put(self, key, seed, tokens):
        kv = kv_of(seed, tokens=tokens, start=seed if seed % 2 else None)
        kept = self.store.put(key, kv)
        assert kept, "fits into every budget here"
        self.model[key] = kv
        assert key in self.store

    @rule(key=keys)
    def put_too_large(self, key):
        assert not self.store.put(key, kv_of(0, tokens=200))

    @rule(key=keys)
    def get(self, key):
        found = self.store.get(key)
        if found is not None:
            assert key in self.model
            assert contents(found.kv) == contents(self.model[key])

    @rule(key=keys)
    def put_and_get(self, key):
        self.put(key, 5, 7)
        found = self.store.get(key)
        assert contents(found.kv) == contents(kv_of(5, tokens=7, start=5))

    @rule(namespace=st.sampled_from(["acme", "globex"]), ids=st.sets(st.sampled_from("abc")) | st.none())
    def forget(self, namespace, ids):
        doomed = [
            key
            for key in self.model
            if key.namespace == namespace and (ids is None or key.chunk_id in ids or ids & set(key.context))
        ]
        present = sum(key in self.store for key in doomed)
        assert self.store.forget(namespace, None if ids is None else frozenset(ids)) == present
        for key in doomed:
            del self.model[key]
            assert key not in self.store

    @invariant()
    def within_budget(self):
        for stats in self.store.stats() if hasattr(self, "store") and self.bounded else ():
            assert 0 <= stats.nbytes <= stats.budget == BUDGET

    @invariant()
    def sums_agree(self):
        if hasattr(self, "store"):
            files = list(self.folder.rglob("*.safetensors"))
            if self.on_disk:
                disk = self.store.stats()[-1]
                assert (disk.entries, disk.nbytes) == (len(files), sum(f.stat().st_size for f in files))
            assert not list(self.folder.rglob("*.tmp"))


class HostMachine(StoreMachine):
    def open(self):
        return HostStore(BUDGET)


class DiskMachine(StoreMachine):
    on_disk = True

    def open(self):
        return DiskStore(self.folder / "kv", BUDGET)

    @rule(draw=st.integers(0, 2**32))
    def restart(self, draw):
        """Close; leave an orphan behind; open again."""
        self.store.close()
        (self.folder / "kv" / f"999999999-{draw:016x}.tmp").write_bytes(b"half")
        self.store = self.open()

    @rule(draw=st.randoms(use_true_random=False), key=keys)
    def damage_and_read(self, draw, key):
        """A flipped bit, a cut, another's content: reading it is a miss, in a fresh process at the latest."""
        path = file_of(self.folder / "kv", key)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        if draw.random() < 0.5:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        path.write_bytes(data)
        self.store.close()
        self.store = self.open()
        assert self.store.get(key) is None
        del self.model[key]


class ThreeTierMachine(DiskMachine):
    """The fastest tier is filled by hits, and hands down what it evicts."""

    def open(self):
        gpu, host = GpuStore(BUDGET, "cpu"), HostStore(BUDGET)
        return TieredStore([gpu, host, DiskStore(self.folder / "kv", BUDGET)], hot=1)


class RemoteMachine(StoreMachine):
    """A tier of sealed blobs on another machine, whose bytes change and who has other clients."""

    def opened(self, **changes):
        raise NotImplementedError

    def blobs(self):
        """Digest → sealed entry, as they lie there."""
        raise NotImplementedError

    def put_blob(self, key, blob):
        raise NotImplementedError

    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.opened()

    @rule(draw=st.randoms(use_true_random=False), key=keys)
    def damage_and_read(self, draw, key):
        others = self.blobs()
        blob = bytearray(others.pop(key.digest(), b""))
        if blob:
            place = draw.randrange(len(blob))
            blob[place] ^= 1 << draw.randrange(8)
            self.put_blob(key, draw.choice([bytes(blob), bytes(blob[:place]), b"", *others.values()]))
            assert self.store.get(key) is None
            if key in self.store:  # one that seems to be another deployment's stays; its sizes must agree
                self.store.forget(key.namespace)
                self.model = {k: kv for k, kv in self.model.items() if k.namespace != key.namespace}

    @rule(key=keys)
    def another_deployment_never_hits(self, key):
        other = self.opened(key=b"the key of somebody else")
        assert other.get(key) is None
        other.close()


def few(examples, steps):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


TestHostMachine = HostMachine.TestCase
TestDiskMachine = DiskMachine.TestCase
TestThreeTierMachine = ThreeTierMachine.TestCase
TestHostMachine.settings = few(30, 40)
TestDiskMachine.settings = TestThreeTierMachine.settings = few(8, 25)
