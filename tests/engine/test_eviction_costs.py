"""What prefills cost reaches the tiers that weigh it, of the chunk store and of the tree."""

import pytest

from engine_kit import chunk, text
from families import wrapped
from ragcachekit import Prompt, RagCache, StoreConfig
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.types import chunk_id

FLAT = PrefillProfile(1.0, 1e-4, 1e-7)
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


@pytest.mark.parametrize(("eviction", "source"), [("pgdsf", "host"), ("gdsf:10000", "computed")])
def test_the_chunk_store_keeps_what_is_dear(eviction, source, tmp_path):
    """Under ``gdsf`` the oldest of three entries leaves, which is the short one."""
    store = StoreConfig(host_bytes=int(93 * token_bytes()), eviction=eviction)  # with what is summed beside
    with engine(tmp_path, store=store) as rag:
        rag.components.cost.profile = FLAT
        for tokens, seed in ((10, 1), (40, 2), (45, 3)):
            rag.generate(asked(tokens, seed), max_new_tokens=1)
        assert rag.stats()[0].evictions == 1
        (used,) = rag.generate(asked(10, 1), max_new_tokens=1).report.link.chunks
    assert used.source == source


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
        there = {
            ids[key.chunk_id] for key in rag.components.store.keys(in_memory=True) if key.chunk_id in ids
        }
    assert there == {kept}
