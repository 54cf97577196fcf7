"""Memory tiers own what they keep: a view of a large tensor keeps none of the rest alive."""

from __future__ import annotations

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.base import Root, Step
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import GpuStore, HostStore, MemoryStore
from store_kit import contents, key_of, kv_of


def views(tokens: int, of: int = 4000, start: int | None = None) -> ChunkKV:
    """The first rows of large tensors, their sums included."""
    whole = kv_of(1, tokens=of)
    sums = {"attended": torch.arange(float(of))[:tokens]}
    return ChunkKV(
        tuple(k[:, :tokens] for k in whole.keys), tuple(v[:, :tokens] for v in whole.values), start, sums
    )


def held(kv: ChunkKV) -> int:
    tensors = (*kv.keys, *kv.values, *kv.sums.values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "make",
    [lambda: HostStore(1 << 24), lambda: GpuStore(1 << 24, "cpu"), lambda: MemoryStore("any", 1 << 24)],
)
def test_views_are_copied_and_what_is_counted_is_what_is_held(make) -> None:
    store: KVStore = make()
    for number in range(20):
        assert store.put(key_of(number), views(10))
    kept = [store.get(key_of(number)) for number in range(20)]
    assert all(found is not None and contents(found.kv) == contents(views(10)) for found in kept)
    assert sum(held(found.kv) for found in kept if found is not None) == store.stats()[0].nbytes
    assert store.stats()[0].nbytes == 20 * views(10).nbytes
    assert all(torch.equal(f.kv.sums["attended"], torch.arange(10.0)) for f in kept if f is not None)


def test_what_is_compact_is_kept_by_reference_and_counted_whole() -> None:
    store, kv = HostStore(1 << 24), kv_of(1, tokens=100)
    assert store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found is not None
    assert found.kv.keys[0] is kv.keys[0]
    nearly = views(3900)
    assert store.put(key_of(2), nearly)
    assert store.stats()[0].nbytes == kv.nbytes + held(nearly)


def test_the_tree_owns_its_nodes() -> None:
    tree = KnowledgeTree(host_bytes=1 << 24)
    match = tree.match(Root("weights", "space"), [Step(("chunk",), 10)])
    assert tree.insert(match, [views(10, start=0)], new=10) == 1
    (reused,) = tree.match(match.root, match.path).found
    assert held(reused.kv) == reused.kv.nbytes == views(10).nbytes
