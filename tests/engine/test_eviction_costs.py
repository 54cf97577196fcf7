"""What prefills cost reaches the tiers that weigh it, of the chunk store and of the tree."""

from __future__ import annotations

import pytest

from engine_kit import chunk, text
from families import wrapped
from ragcachekit import Prompt, RagCache, StoreConfig
from ragcachekit.model.prefill_profile import PrefillProfile, store_profile

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
