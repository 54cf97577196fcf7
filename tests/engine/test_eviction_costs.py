"""What prefills cost reaches the tiers that weigh it, of the chunk store and of the tree."""

from __future__ import annotations

import pytest

from engine_kit import chunk, text
from families import wrapped
from ragcachekit import Prompt, RagCache, StoreConfig, TreeConfig
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.model.prefill_timing import store_profile, stored_profile
from ragcachekit.policies.craft import Impact
from ragcachekit.store.memory import HostStore
from ragcachekit.types import chunk_id
from speaking import byte_level, speaker

FLAT = PrefillProfile([0, 256], [1, 64], [[1.0, 1.01], [1.01, 1.02]])
"""Nearly the same for one token and for many: short chunks are dear by the token."""


def engine(tmp_path, **options) -> RagCache:
    return RagCache(
        wrapped("llama"),
        **{"policy": "lego:4", "cold": "now", "cache_dir": tmp_path, "store": None, **options},
    )


def token_bytes() -> int:
    model = wrapped("llama")
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def asked(tokens: int, seed: int) -> Prompt:
    return Prompt([chunk(tokens, seed), text(6, 99)])


def with_flat_costs(tmp_path) -> None:
    with engine(tmp_path) as rag:
        store_profile(tmp_path, rag.fingerprint, rag.model, FLAT)


@pytest.mark.parametrize(("eviction", "source"), [("pgdsf", "host"), ("gdsf:10000", "computed")])
def test_the_chunk_store_keeps_what_is_dear(eviction, source, tmp_path):
    """Under ``gdsf`` the oldest of three entries leaves, which is the short one."""
    with_flat_costs(tmp_path)
    store = StoreConfig(host_bytes=int(93 * token_bytes()), eviction=eviction)  # with what is summed beside
    with engine(tmp_path, store=store) as rag:
        for tokens, seed in ((10, 1), (40, 2), (45, 3)):
            rag.generate(asked(tokens, seed), max_new_tokens=1)
        assert rag.stats()[0].evictions == 1
        (used,) = rag.generate(asked(10, 1), max_new_tokens=1).report.link.chunks
    assert used.source == source


def test_the_tree_hears_of_the_profile_that_was_measured_later(tmp_path):
    config = TreeConfig(host_bytes=200 * token_bytes())
    with engine(tmp_path, store=StoreConfig(host_bytes=0), tree=config, policy="prefix") as rag:
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is None
        costs = []
        for number in range(6):
            rag.generate(asked(30, number), max_new_tokens=1)
            assert rag.flush(60)
            costs.append(rag._components.tree._cost(0, 30))
        assert costs[0] == 0 < costs[-1]
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is not None


def test_a_host_store_is_measured_once_it_fills_and_not_before(tmp_path):
    with engine(tmp_path, store=StoreConfig(host_bytes=400 * token_bytes())) as rag:
        rag.generate(asked(30, 1), max_new_tokens=1)
        assert rag.flush(60)
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is None
        for number in range(2, 6):
            rag.generate(asked(30, number), max_new_tokens=1)
        assert rag.flush(60)
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is not None


@pytest.mark.parametrize("eviction", ["lru", "gdsf", "f_r"])
def test_nothing_is_measured_for_policies_that_weigh_no_cost(eviction, tmp_path):
    with engine(tmp_path, store=StoreConfig(host_bytes=400 * token_bytes(), eviction=eviction)) as rag:
        for number in range(8):
            rag.generate(asked(30, number), max_new_tokens=1)
        assert rag.flush(60)
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is None


def test_encoding_ahead_measures_while_nobody_waits(tmp_path):
    texts = [f"Paragraph {number}: the river Spree flows in Berlin." for number in range(12)]
    options = {"cache_dir": tmp_path, "store": StoreConfig(host_bytes=1 << 18), "cold": "never"}
    with RagCache(speaker(), byte_level(), **options) as rag:
        rag.encode(texts)
        assert stored_profile(tmp_path, rag.fingerprint, rag.model) is not None


class Listening(HostStore):
    """Writes down what each use of each chunk was worth."""

    def __init__(self) -> None:
        super().__init__(1 << 26)
        self.worths: list[tuple[str, float]] = []

    def open(self, key, weight=1.0):
        found = super().open(key, weight)
        if found is not None:
            self.worths.append((key.chunk_id, weight))
        return found


def test_f_r_hears_what_a_variant_costs_where_it_is_used(tmp_path):
    """20 behind its very context, 1 / (CCI (1 - β')) behind another, by the sums that are stored with it."""
    store = Listening()
    first, others = Prompt([text(9, 1), chunk(20, 2), chunk(25, 3), text(6, 9)]), (chunk(22, 4), chunk(25, 3))
    with engine(tmp_path, store=store, encoder="in-prompt", policy="craft:1") as rag:
        rag.generate(first, max_new_tokens=1)
        store.worths.clear()
        rag.generate(first, max_new_tokens=1)
        assert [weight for _, weight in store.worths] == [20, 20, 20]
        store.worths.clear()
        prompt = Prompt([text(9, 1), *others, text(6, 9)])
        used = rag.generate(prompt, max_new_tokens=1).report.link.chunks[1]
        (key,) = [
            key
            for key in store._entries
            if key.chunk_id == used.chunk_id
            and len(key.context) == 2
            and first_chunk(rag, first) in key.context
        ]
        before = (key.context[0], rag_ids(rag, others[0]))
        kv = store.get(key).kv
        cost = Impact.of(key.context, kv.sums, kv.tokens).cost(before)
    assert dict(store.worths)[used.chunk_id] == pytest.approx(1 / cost)


def first_chunk(rag: RagCache, prompt: Prompt) -> str:
    return rag_ids(rag, prompt.segments[1])


def rag_ids(rag: RagCache, segment) -> str:
    return chunk_id(segment.token_ids, rag.namespace)


@pytest.mark.parametrize(("eviction", "kept"), [("f_r", "exact"), ("lfu:10000", "often")])
def test_f_r_keeps_what_needs_no_recomputation(eviction, kept, tmp_path):
    """One entry is used once where it is exact, another one four times where half of it is recomputed."""
    exact, often = chunk(40, 1), chunk(40, 2)
    store = StoreConfig(host_bytes=int(93 * token_bytes()), eviction=eviction)
    with engine(tmp_path, store=store, policy="craft:1", encoder="standalone") as rag:
        rag.generate(Prompt([exact, text(6, 9)]), max_new_tokens=1)
        rag.generate(Prompt([exact, text(6, 9)]), max_new_tokens=1)
        rag.generate(Prompt([often, text(6, 9)]), max_new_tokens=1)
        for _ in range(4):  # a chunk that was never seen stands before it, and is too long to be kept
            rag.generate(Prompt([chunk(100, 3), often, text(6, 9)]), max_new_tokens=1)
        rag.generate(Prompt([chunk(40, 4), text(6, 9)]), max_new_tokens=1)
        ids = {rag_ids(rag, exact): "exact", rag_ids(rag, often): "often"}
        there = {ids[key.chunk_id] for key in rag._components.store._tiers[0]._entries if key.chunk_id in ids}
    assert there == {kept}
