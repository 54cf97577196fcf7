"""A question that repeats exactly is embedded once, in memory and on disk."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from ragcachekit.json_store import JsonStore
from ragcachekit.query.retrievers.embedding_cache import EmbeddingCache

PROGRAM = """
import sys
from ragcachekit.json_store import JsonStore
from ragcachekit.query.retrievers.embedding_cache import EmbeddingCache

cache = EmbeddingCache("model", store=JsonStore(sys.argv[1]))
cache.embed("what?", lambda text: [0.1, 0.5, -0.0])
cache.embed("who?", lambda text: [0.25, 0.5])
"""


class Embedder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, text: str) -> list[float]:
        self.calls.append(text)
        return vector(text)

    async def awaited(self, text: str) -> list[float]:
        return self(text)


def vector(text: str) -> list[float]:
    rng = random.Random(text)
    return [rng.random() for _ in range(4)]


def never(text: str) -> list[float]:
    raise AssertionError(f"{text} was embedded again")


async def test_a_repeated_text_is_embedded_once_sync_and_async() -> None:
    cache, embedder = EmbeddingCache("model"), Embedder()
    first = cache.embed("what?", embedder)
    assert first.tolist() == (await cache.aembed("what?", embedder.awaited)).tolist() == vector("what?")
    assert (await cache.aembed("who?", embedder.awaited)).tolist() == vector("who?")
    assert cache.embed("who?", never).tolist() == vector("who?")
    assert embedder.calls == ["what?", "who?"]
    assert cache.stats() == (2, 2, 0, 2)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0


def test_the_least_recently_used_goes_first() -> None:
    cache, embedder = EmbeddingCache("model", capacity=2), Embedder()
    for text in ("a", "b", "a", "c", "a", "b"):
        cache.embed(text, embedder)
    assert embedder.calls == ["a", "b", "c", "b"]
    assert cache.stats().entries == 2


def test_a_restart_and_other_processes_find_it_bit_by_bit(tmp_path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=120)
    cache = EmbeddingCache("model", store=JsonStore(tmp_path))
    found = cache.embed("what?", never)
    assert found.tobytes() == np.array([0.1, 0.5, -0.0]).tobytes()
    assert cache.embed("who?", never).tolist() == [0.25, 0.5]
    assert cache.stats() == (2, 0, 2, 0)
    assert EmbeddingCache("model 2", store=JsonStore(tmp_path)).get("what?") is None


def test_the_disk_is_bounded_and_keeps_other_keys(tmp_path) -> None:
    store = JsonStore(tmp_path)
    store.put({"other": 1})
    cache = EmbeddingCache("model", capacity=16, store=store)
    for number in range(200):
        cache.embed(str(number), vector)
    kept = store.keys("embedding:")
    assert 16 <= len(kept) <= 18
    assert store.get("other") == 1
    again = EmbeddingCache("model", store=store)
    assert [again.get(str(number)) is None for number in (0, 199)] == [True, False]
    cache.clear()
    assert store.keys() == ["other"]
    assert cache.get("199") is None


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [float("inf")], [], [[1.0]]])
def test_what_cannot_be_used_is_not_kept(tmp_path, bad) -> None:
    cache = EmbeddingCache("model", store=JsonStore(tmp_path))
    assert np.array_equal(cache.embed("what?", lambda _: bad), bad, equal_nan=True)
    assert cache.embed("what?", lambda _: [1.0]).tolist() == [1.0]


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"type": "<f4"},
        {"type": "O", "row": ""},
        {"type": "<f4", "row": "A"},
        {"type": "<f4", "row": ""},
        {"type": "<f8", "row": "AAAAAAAA+H8="},  # NaN
    ],
)
def test_a_damaged_value_is_embedded_again(tmp_path, value) -> None:
    store = JsonStore(tmp_path)
    EmbeddingCache("model", store=store).embed("what?", vector)
    store.put({store.keys()[0]: value})
    assert EmbeddingCache("model", store=store).embed("what?", lambda _: [2.0]).tolist() == [2.0]
    assert EmbeddingCache("model", store=store).embed("what?", never).tolist() == [2.0]


def test_errors_of_the_embedder_and_of_the_disk(tmp_path, monkeypatch, caplog) -> None:
    cache = EmbeddingCache("model", store=JsonStore(tmp_path))
    with pytest.raises(AssertionError):
        cache.embed("what?", never)

    def full(*_: object, **__: object) -> bool:
        raise OSError("disk full")

    monkeypatch.setattr(JsonStore, "put", full)
    for text in ("what?", "who?"):
        assert cache.embed(text, vector).tolist() == vector(text)
    assert caplog.text.count("disk full") == 1
    assert cache.embed("what?", never).tolist() == vector("what?")


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="name the embedding model"):
        EmbeddingCache("")
    with pytest.raises(ValueError, match="capacity"):
        EmbeddingCache("model", 0)


def test_threads_get_their_own_embeddings(tmp_path) -> None:
    cache, wrong = EmbeddingCache("model", 20, JsonStore(tmp_path)), list[str]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            text = str(rng.randrange(40))
            if cache.embed(text, vector).tolist() != vector(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = cache.stats()
    assert stats.memory_hits + stats.disk_hits + stats.misses == 1200
    assert stats.entries <= 20
