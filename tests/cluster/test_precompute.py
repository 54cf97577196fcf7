"""Encoding by an actor, without Ray around it: bytes, what is stored already, tiers that refuse."""

import pytest

from cluster_kit import SYSTEM, begun, corpus, job, stored
from ragcachekit.cluster.precompute import EncodingActor, encode_chunks, table
from ragcachekit.cluster.shared_tier import shared_tier
from ragcachekit.errors import StoreError
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.tiered import open_store

CHUNKS = corpus(12)


def test_an_actor_stores_each_chunk_of_a_batch(tmp_path):
    actor = EncodingActor(job(tmp_path, tmp_path / "notes"))
    assert stored(tmp_path) == {}, "its warm-up chunk is not stored"
    returned = actor(table(CHUNKS))
    assert returned["chunk_id"].to_pylist() == [one for one, _ in CHUNKS]
    assert len(stored(tmp_path)) == len(CHUNKS)
    assert begun(tmp_path / "notes").keys() >= {one for one, _ in CHUNKS}


def test_a_batch_has_the_same_bytes_whatever_is_stored_already(tmp_path):
    """An actor that died in a batch leaves some entries; those of the next actor are as if it had not."""
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    EncodingActor(job(tmp_path / "whole", tmp_path / "notes"))(table(CHUNKS))
    EncodingActor(job(tmp_path / "resumed", tmp_path / "notes"))(table(CHUNKS))
    for path in sorted((tmp_path / "resumed" / "kv").glob("*.safetensors"))[::2]:
        path.unlink()
    other = EncodingActor(job(tmp_path / "resumed", tmp_path / "notes"))
    other(table(corpus(30)[20:]))
    other(table(CHUNKS))
    whole = stored(tmp_path / "whole")
    assert {name: stored(tmp_path / "resumed")[name] for name in whole} == whole


def test_what_an_actor_stores_is_found_by_an_engine(tmp_path):
    one = job(tmp_path, tmp_path / "notes")
    EncodingActor(one)(table(CHUNKS))
    with one.open_engine(open_store(one.store)) as rag:
        rag.register([text for _, text in CHUNKS])
        prompt = SYSTEM + CHUNKS[3][1] + "\n\n" + CHUNKS[7][1] + "\n\nWhere does the river flow?"
        report = rag.generate(prompt, max_new_tokens=1, policy="reuse").report
    assert [chunk.source for chunk in report.link.chunks] == ["disk", "disk"]


def test_a_tier_that_refuses_ends_the_run(tmp_path, monkeypatch):
    puts = []
    monkeypatch.setattr(DiskStore, "put", lambda _store, key, _kv: puts.append(key))
    actor = EncodingActor(job(tmp_path, tmp_path / "notes"))
    with pytest.raises(StoreError, match="run the same command again"):
        actor(table(CHUNKS[:1]))
    assert len(puts) == 3
    assert len(set(puts)) == 1


def test_what_is_stored_is_not_encoded_again(tmp_path, monkeypatch):
    """Batches of 16 of which one chunk is missing are encoded; where none is, not even Ray is started."""

    def no_ray(*_):
        raise InterruptedError

    monkeypatch.setattr("ragcachekit.cluster.precompute._ray_data", no_ray)
    chunks, one = corpus(40), job(tmp_path, tmp_path / "notes")
    ids = [chunk for chunk, _ in chunks]
    assert encode_chunks(one, chunks, actors=2, stored=set(ids)) == 0
    for known in ((), ids[:-1]):
        with pytest.raises(InterruptedError):
            encode_chunks(one, chunks, actors=2, stored=known)


def test_a_run_needs_an_actor(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        encode_chunks(job(tmp_path, tmp_path / "notes"), CHUNKS, actors=0)


def test_urls_choose_the_tier():
    redis = shared_tier("redis://host/0")
    assert (redis.redis_url, redis.bulk_url, redis.redis_entry_bytes) == ("redis://host/0", None, 256 << 20)
    bulk = shared_tier("s3://bucket/kv", key="OTHER")
    assert (bulk.bulk_url, bulk.redis_url, bulk.remote_key) == ("s3://bucket/kv", None, "OTHER")
    assert redis.host_bytes == bulk.host_bytes == 0
