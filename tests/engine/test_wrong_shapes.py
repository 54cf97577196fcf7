"""Entries under the right key, with right checksums, that are not the model's KV: a miss, and they go."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_kit import PROMPT, RecordingStore, ids, rag_for
from families import greedy, plain, tokens, wrapped
from ragcachekit import RagCache, StoreConfig, TreeConfig
from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder, ingredients
from ragcachekit.forward.attention import install
from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.rope import describe_rope
from ragcachekit.plan.encodings import NeighbourEncoding
from ragcachekit.plan.link_plan import Missing
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import read_key
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import open_store
from ragcachekit.types import KVKey
from store_kit import read_entry

Tensors = tuple[torch.Tensor, ...]


def sides(change: Callable[[Tensors], Any]) -> Callable[[ChunkKV], ChunkKV]:
    return lambda kv: replace(kv, keys=tuple(change(kv.keys)), values=tuple(change(kv.values)))


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[ChunkKV], ChunkKV]:
    return sides(lambda tensors: map(change, tensors))


def without_sums(kv: ChunkKV) -> ChunkKV:
    return replace(kv, sums={name: torch.zeros(1) for name in ("outward", "asked")})


WRONG = {
    "fewer layers": sides(lambda tensors: tensors[:-1]),
    "fewer heads": each(lambda t: t[:1].clone()),
    "a narrower head": each(lambda t: t[:, :, :8].clone()),
    "one layer of another head_dim": sides(lambda ts: (*ts[:-1], ts[-1][:, :, :8].clone())),
    "half precision": each(torch.Tensor.half),
    "fewer tokens": each(lambda t: t[:, 1:].clone()),
    "turned for a position": lambda kv: replace(kv, start=3 if kv.start is None else None),
    "sums of another length": without_sums,
}


@functools.cache
def right_entries(policy: str, encoder: str) -> dict[KVKey, ChunkKV]:
    store = RecordingStore()
    with rag_for("llama", store=store, policy=policy, encoder=encoder) as rag:
        rag.generate(PROMPT, max_new_tokens=1)
    return {key: kv for key, (kv, _) in store.originals.items()}


@pytest.fixture
def tiers(tmp_path: Path) -> dict[str, StoreConfig]:
    disk = {"host_bytes": 0, "disk_path": tmp_path / "kv"}
    quantised = StoreConfig(**disk, quantise={"disk": "int8"})
    return {"host": StoreConfig(), "disk": StoreConfig(**disk), "quantised": quantised}


@pytest.mark.parametrize(
    ("tier", "wrong"),
    [(tier, wrong) for tier in ("host", "disk") for wrong in WRONG]
    + [("quantised", wrong) for wrong in ("fewer layers", "a narrower head", "half precision")],
)
def test_it_is_a_miss_and_the_entry_goes(tiers: dict[str, StoreConfig], tier: str, wrong: str) -> None:
    policy = "reuse"
    store = open_store(tiers[tier])
    for key, kv in right_entries(policy, "standalone").items():
        assert store.put(key, WRONG[wrong](kv))
    if tier != "host":
        store.close()
        store = open_store(tiers[tier])
    with rag_for("llama", store=store, policy=policy, encoder="standalone", load="always") as rag:
        first = rag.generate(PROMPT, max_new_tokens=3, do_sample=False)
        assert first.token_ids == greedy(plain("llama"), ids(PROMPT), 3)
        assert first.report.link.reused_tokens == 0
        assert sum(record.damaged for record in rag.stats()) >= 3
        again = rag.generate(PROMPT, max_new_tokens=3, do_sample=False)
        assert again.report.link.reused_tokens > 0, "encoded anew"
    store.close()


@pytest.mark.parametrize("wrong", ["fewer layers", "fewer heads", "fewer tokens"])
def test_what_a_chunk_is_encoded_behind_is_encoded_again(wrong: str) -> None:
    """``similar:n`` reads its neighbours from the store itself."""
    model = wrapped("llama")
    install(model)
    rope, store = describe_rope(model), HostStore(1 << 26)
    chunks = ChunkEncoder(model, rope)
    key = KVKey("weights", "default", "chunk", "similar:1")
    item = Missing(key, tokens(9, 5), NeighbourEncoding("similar:1", neighbours=(tokens(12, 6),)))
    ((_, part),) = ingredients(item)
    ((_, right),) = chunks.encode([part.token_ids], part.encoding)
    assert store.put(part.key, WRONG[wrong](right))
    encoder = NeighbourEncoder(model, rope, chunks, store, KVLayout.of(model))
    ((_, kv),) = encoder.encode([item])
    assert part.key not in store
    ((_, expected),) = NeighbourEncoder(model, rope, chunks, HostStore(1 << 26)).encode([item])
    assert all(map(torch.equal, kv.keys, expected.keys))
    assert store.stats()[0].damaged == 1


@pytest.mark.parametrize("wrong", ["fewer layers", "a narrower head"])
def test_a_node_of_the_tree_is_a_miss_and_goes(tmp_path: Path, wrong: str) -> None:
    store = StoreConfig(host_bytes=0, disk_path=tmp_path / "kv")
    config = TreeConfig(disk_bytes=1 << 26)

    def opened() -> RagCache:
        return rag_for("llama", store=store, tree=config, policy="prefix")

    with opened() as rag:
        rag.generate(PROMPT, max_new_tokens=1)
    folder = tmp_path / "kv" / "tree"
    disk = DiskStore(folder, 1 << 26)
    files = list(folder.glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        key = read_key(file)
        assert disk.put(key, WRONG[wrong](read_entry(file, key)))
    disk.close()
    for reused in (False, True):
        with opened() as rag:
            answer = rag.generate(PROMPT, max_new_tokens=3, do_sample=False)
            assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 3)
            assert (answer.report.link.tree_tokens > 0) is reused
