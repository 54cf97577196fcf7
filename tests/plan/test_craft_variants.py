"""The pool of variants: bounded, fair by use, thread safe, and never a way to the wrong entry."""

import math
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.plan import variants
from ragcachekit.plan.encodings import Fetch, Wanted, find_entry
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.craft import Impact
from ragcachekit.store.base import concerns
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey


def key(chunk, context="s", namespace="one", encoding="in-prompt"):
    return KVKey("model", namespace, chunk, encoding, tuple(context))


def kv(context, tokens=4):
    """Every segment of the context got 1, but a separator's share is small; the chunk itself 2."""
    inter = torch.tensor([[0.1 if id == "-" else 1.0 for id in context]])
    sums = {
        "inter": inter,
        "intra": torch.tensor([2.0]),
        "behind": torch.ones(len(context)),
        "outward": torch.arange(tokens, dtype=torch.float32),
    }
    rows = (torch.ones(1, tokens, 2),)
    return ChunkKV(rows, rows, None, sums)


def filled(*entries, budget=None):
    pool = VariantPool(**({} if budget is None else {"budget": budget}))
    for chunk, context in entries:
        pool.add(key(chunk, context), kv(context))
    return pool


def test_the_variant_whose_context_is_most_like_this_one_comes_first():
    pool = filled(("x", "sab"), ("x", "scd"), ("x", "sba"), ("y", "sab"))
    assert [fit.key.context for fit in pool.ranked(key("x"), tuple("sab"))] == [
        tuple("sab"),
        tuple("sba"),
        tuple("scd"),
    ]
    fit = pool.ranked(key("x"), tuple("sac"))[0]
    assert fit.cost == Impact.of(tuple("sab"), kv("sab").sums, 4).cost(tuple("sac"))
    assert pool.ranked(key("z"), tuple("sab")) == []
    assert pool.ranked(key("x", namespace="two"), tuple("sab")) == []
    assert pool.ranked(key("x", encoding="in-prompt@long"), tuple("sab")) == []


def test_what_a_store_holds_is_recalled_as_far_as_there_is_room():
    store = HostStore(1 << 20)
    for context in ("sa", "sb", "sc"):
        store.put(key("x", context), kv(context))
    for wanted, number in ((True, 2), (False, 0)):
        pool = VariantPool(budget=2 * kv("sa").nbytes)
        pool.recall(store, "model", variants=wanted)
        assert len(pool) == number
    pool = VariantPool()
    pool.recall(store, "another model", variants=True)
    assert len(pool) == 0


def wanted(chunk, before):
    encoding = InPromptEncoding("in-prompt", (9,), segments=(1,))
    return Wanted(0, (1, 2, 3, 4), key(chunk, before), encoding, True, tuple(before))


class TestLookUp:
    def store(self, *entries):
        store, pool = HostStore(1 << 20), VariantPool()
        for chunk, context in entries:
            store.put(key(chunk, context), kv(context))
            pool.add(key(chunk, context), kv(context))
        return store, pool

    def find(self, store, pool, chunk, before):
        return find_entry(wanted(chunk, before), Fetch(store), pool)

    def test_its_very_context_wins_and_enters_the_pool(self):
        store, _ = self.store(("x", "sa"), ("x", "sb"))
        pool = VariantPool()
        assert self.find(store, pool, "x", "sc") is None
        found = self.find(store, pool, "x", "sa")
        assert (found.key, found.renew) == (key("x", "sa"), False)
        assert key("x", "sa") in pool
        assert pool.weight(found.key) == pytest.approx(21)

    def test_another_context_does_and_a_bad_one_is_renewed(self):
        store, pool = self.store(("x", "sab"), ("x", "stu"))
        assert self.find(store, pool, "x", "sabc").key == key("x", "sab")
        assert not self.find(store, pool, "x", "sabc").renew
        assert self.find(store, pool, "x", "pqr").renew
        assert self.find(store, pool, "y", "sab") is None

    def test_what_the_store_has_lost_leaves_the_pool(self):
        store, pool = self.store(("x", "sab"), ("x", "sc"))
        store.forget("one", frozenset("b"))
        assert self.find(store, pool, "x", "saz").key == key("x", "sc")
        assert key("x", "sab") not in pool

    def test_an_entry_of_another_length_is_damaged(self):
        store, pool = self.store(("x", "sa"))
        store.put(key("x", "sa"), kv("sa", tokens=3))
        assert self.find(store, pool, "x", "sa") is None


CHUNKS, CONTEXTS, SPACES = (
    st.sampled_from("xyz"),
    st.text("sab-", max_size=4),
    st.sampled_from(["one", "two"]),
)


class Pool(RuleBasedStateMachine):
    """Against a plain dict of exact worths."""

    def __init__(self):
        super().__init__()
        self.pool, self.model, self.budget = VariantPool(budget=600), {}, 600
        self.half_life, variants.HALF_LIFE = variants.HALF_LIFE, 3

    def teardown(self):
        variants.HALF_LIFE = self.half_life

    def of(self, namespace):
        return {k: v for k, v in self.model.items() if k.namespace == namespace}

    def nbytes(self):
        return sum(kv(known.context).nbytes for known in self.model)

    @rule(chunk=CHUNKS, context=CONTEXTS, namespace=SPACES)
    def add(self, chunk, context, namespace):
        new, weights = key(chunk, context, namespace), {k: self.pool.weight(k) for k in self.of(namespace)}
        self.pool.add(new, kv(context))
        if new in self.model:
            return
        gone = [known for known in weights if known not in self.pool]
        left = [weight for known, weight in weights.items() if known in self.pool]
        assert all(weights[known] <= min(left, default=math.inf) for known in gone)
        self.model = {k: v for k, v in self.model.items() if k not in gone} | {new: 1.0}
        assert self.nbytes() <= self.budget or not left
        needed = [self.nbytes() + kv(known.context).nbytes > self.budget for known in gone]
        assert any(needed) or not gone, "one too many"

    @rule(chunk=CHUNKS, context=CONTEXTS, before=CONTEXTS, namespace=SPACES)
    def use(self, chunk, context, before, namespace):
        used = key(chunk, context, namespace)
        if used in self.model:
            for known in self.of(namespace):
                self.model[known] *= 0.5 ** (1 / 3)
            cost = Impact.of(used.context, kv(context).sums, 4).cost(tuple(before))
            # Its own age counts from this use on: what it had was not yet aged by it.
            self.model[used] = self.model[used] / 0.5 ** (1 / 3) + 1 / max(cost, 0.05)
        self.pool.used(used, tuple(before))

    @rule(ids=st.sets(st.sampled_from("xyzsab"), max_size=2), namespace=SPACES)
    def forget(self, ids, namespace):
        self.model = {k: v for k, v in self.model.items() if not concerns(k, namespace, frozenset(ids))}
        self.pool.forget(namespace, frozenset(ids))

    @rule(namespace=SPACES)
    def forget_all(self, namespace):
        self.model = {k: v for k, v in self.model.items() if k.namespace != namespace}
        self.pool.forget(namespace)

    @rule(chunk=CHUNKS, context=CONTEXTS, namespace=SPACES)
    def discard(self, chunk, context, namespace):
        self.model.pop(key(chunk, context, namespace), None)
        self.pool.discard(key(chunk, context, namespace))

    @invariant()
    def agrees(self):
        assert len(self.pool) == len(self.model)
        for known, weight in self.model.items():
            assert known in self.pool
            assert self.pool.weight(known) == pytest.approx(weight)
            ranked = [fit.key for fit in self.pool.ranked(known, ())]
            assert set(ranked) == {k for k in self.of(known.namespace) if k.chunk_id == known.chunk_id}


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_many_threads():
    pool, failed = VariantPool(budget=8 * kv("s00").nbytes), []

    def work(number):
        try:
            for step in range(200):
                own = key("xyz"[step % 3], f"s{number}{step % 7}")
                pool.add(own, kv("s00"[: len(own.context)]))
                for fit in pool.ranked(own, ("s",)):
                    pool.used(fit.key, ("s",))
                if step % 50 == 0:
                    pool.forget("one", frozenset(str(number)))
        except Exception as error:  # seen by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(pool) <= 8 * kv("s00").nbytes // kv("s").nbytes
