"""Encoding by an actor, without Ray around it: bytes, what is stored already, tiers that refuse."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster_kit import SYSTEM, begun, corpus, job, stored
from ragcachekit.cluster.precompute import EncodingActor, encode_chunks
from ragcachekit.cluster.shared_tier import shared_tier
from ragcachekit.cluster.slices import RowCount, Slices
from ragcachekit.errors import StoreError
from ragcachekit.store.disk import DiskStore

CHUNKS = corpus(12)


def table(chunks):
    (task,) = Slices([chunks]).get_read_tasks(1)
    (block,) = task()
    return block


def test_an_actor_stores_each_chunk_of_a_batch(tmp_path):
    actor = EncodingActor(job(tmp_path, tmp_path / "notes"))
    returned = actor(table(CHUNKS))
    assert returned["chunk_id"].to_pylist() == [one for one, _ in CHUNKS]
    assert len(stored(tmp_path)) == len(CHUNKS)
    assert len(actor._own.stats()) == 1
    assert actor._own.stats()[0].entries == 0


def test_the_warm_up_chunk_is_not_stored(tmp_path):
    EncodingActor(job(tmp_path, tmp_path / "notes"))
    assert stored(tmp_path) == {}


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
    actor = EncodingActor(one)
    actor(table(CHUNKS))
    with one.open_engine(actor._shared) as rag:
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


def test_nothing_to_do_starts_no_ray(tmp_path, monkeypatch):
    monkeypatch.setattr("ragcachekit.cluster.precompute._session", None)
    done = {one for one, _ in CHUNKS}
    assert (
        encode_chunks(job(tmp_path, tmp_path / "notes"), CHUNKS, actors=2, checkpoint=tmp_path, stored=done)
        == 0
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_is_followed_only_where_nobody_knows_what_is_stored(tmp_path, monkeypatch, known):
    """What it names may have been evicted since."""

    def no_ray():
        raise InterruptedError

    monkeypatch.setattr("ragcachekit.cluster.precompute._session", no_ray)
    folder, ids = tmp_path / "checkpoint", [one for one, _ in CHUNKS]
    for where in (folder, folder.as_uri()):
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"chunk_id": ids[:8]}), folder / "first.parquet")
        for _ in range(2):
            with pytest.raises(InterruptedError):
                encode_chunks(
                    *(job(tmp_path, tmp_path / "notes"), CHUNKS),
                    actors=2, checkpoint=where, stored=set(ids[:8]) if known else None, batch=4,
                )  # fmt: skip
        assert folder.exists() is not known


@pytest.mark.parametrize("wrong", [{"actors": 0}, {"actors": 1, "batch": 0}])
def test_numbers_below_one_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="at least 1"):
        encode_chunks(job(tmp_path, tmp_path / "notes"), CHUNKS, checkpoint=tmp_path, **wrong)


def test_rows_are_counted():
    sink = RowCount()
    assert sink.write([table(CHUNKS), table(CHUNKS[:5])], None) == 17
    sink.on_write_complete(type("Result", (), {"write_returns": [17, 3]}))
    assert sink.rows == 20


def test_urls_choose_the_tier():
    redis = shared_tier("redis://host/0", 1 << 30)
    assert (redis.redis_url, redis.bulk_url, redis.redis_entry_bytes) == ("redis://host/0", None, 256 << 20)
    bulk = shared_tier("s3://bucket/kv", key="OTHER")
    assert (bulk.bulk_url, bulk.redis_url, bulk.remote_key) == ("s3://bucket/kv", None, "OTHER")
    assert redis.host_bytes == bulk.host_bytes == 0


def test_notes_count_batches(tmp_path):
    EncodingActor(job(tmp_path, tmp_path / "notes"))(table(CHUNKS))
    counts = begun(tmp_path / "notes")
    assert all(counts[one] == 1 for one, _ in CHUNKS)
