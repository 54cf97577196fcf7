"""What the retrievers of both frameworks share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

import ragcachekit
from ragcachekit.query.partition.partitioner import Partitioner
from ragcachekit.query.partition.rules import KeyRules
from ragcachekit.query.retrievers.retriever_cache import RetrieverCache, RetrieverSettings

RULES = KeyRules()


class Engine:
    namespace = "acme"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Sequence[str], str]] = []

    def register(self, texts: Sequence[str], namespace: str, sources: object = None) -> None:
        self.calls.append(("register", texts, namespace))

    def prefetch(self, texts: Sequence[str], namespace: str) -> None:
        self.calls.append(("prefetch", texts, namespace))

    def add_query_cache(self, cache: RetrieverCache[str]) -> None:
        self.cache = cache


def made(engine: Engine | None = None) -> RetrieverCache[str]:
    return RetrieverCache(RULES, str, cache=engine)


def test_settings_are_the_arguments() -> None:
    taken = set(inspect.signature(RetrieverCache).parameters) - {"rules", "text", "folder"}
    assert set(RetrieverSettings.__annotations__) == taken | {"namespace"}
    assert ragcachekit.RetrieverCache is RetrieverCache
    assert isinstance(made().partitioner, Partitioner)


def test_a_result_is_cached_only_if_the_partition_is_the_same_after_the_search() -> None:
    cache, place = made(), Partitioner(RULES).partition("n", 1, None, ())
    for after in (None, Partitioner(RULES).partition("n", 1, None, (1,))):
        asked = cache.ask([1.0, 0.0], place)
        assert asked is not None
        assert not asked.result.hit
        assert cache.answer(asked, ["found"], after).documents == ("found",)
        assert cache.stats().entries == 0
    cache.answer(asked, ["found"], place)
    again = cache.ask([1.0, 0.0], place)
    assert again is not None
    assert again.result.documents == ("found",)


def test_without_a_partition_or_an_embedding_nothing_is_looked_up() -> None:
    cache, place = made(), Partitioner(RULES).partition("n", 1, None, ())
    assert cache.ask([1.0], None) is None
    assert cache.ask(None, place) is None
    assert cache.ask(["text"], place) is None  # type: ignore[list-item]
    assert cache.stats().misses == 0


def test_texts_are_registered_unless_something_was_forgotten() -> None:
    engine = Engine()
    cache = made(engine)
    assert engine.cache is cache
    namespace, epoch = cache.namespace_of(engine, None), cache.epoch
    cache.register(engine, namespace, ["a"], epoch)
    assert engine.calls == [("register", ["a"], "acme"), ("prefetch", ["a"], "acme")]
    cache.clear()
    cache.register(engine, namespace, ["b"], epoch)
    assert len(engine.calls) == 2
    assert [cache.namespace_of(engine, "own"), cache.namespace_of(None, None)] == ["own", "default"]


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs cache=RagCache\(\.\.\.\) or None, got 'x'"):
        RetrieverCache(RULES, str, cache="x")
