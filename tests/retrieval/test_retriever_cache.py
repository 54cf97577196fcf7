"""What the retrievers of both frameworks share: the path of a question."""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ragcachekit.retrieval.plumbing import (
    Call,
    Framework,
    KeyRules,
    Partition,
    RetrieverCache,
    RetrieverSettings,
    finished,
)

PLACE = Partition("n", 1)


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


def made(engine: Engine | None = None, **settings: Any) -> RetrieverCache[str]:
    plain = Framework[str](KeyRules(), str, str, lambda text: None, lambda record, *_: record.text, str, str)
    return RetrieverCache(plain, rag=engine, **settings)


def call(
    embedding: object = (1.0, 0.0),
    partitions: Sequence[Partition | None] = (PLACE, PLACE),
    search: Callable[[Any], Any] = lambda embedding: ["found"],
) -> Call[str]:
    left = list(partitions)
    return Call("acme", "where?", lambda: left.pop(0), lambda: embedding, search)


def test_settings_are_the_arguments() -> None:
    taken = set(inspect.signature(RetrieverCache).parameters) - {"framework", "retriever", "store", "index"}
    assert set(RetrieverSettings.__annotations__) == taken | {"namespace"}


@pytest.mark.parametrize("after", [None, Partition("n", 2)])
def test_a_result_is_cached_only_if_the_partition_is_the_same_after_the_search(
    after: Partition | None,
) -> None:
    cache = made()
    assert finished(cache.retrieve(call(partitions=[PLACE, after])))[0] == ("found",)
    assert cache.stats().entries == 0
    finished(cache.retrieve(call()))
    found, result = finished(cache.retrieve(call(search=lambda embedding: pytest.fail("searched"))))
    assert found == ("found",)
    assert result is not None
    assert result.hit


@pytest.mark.parametrize("failing", [None, ["text"], "raises"])
def test_without_a_partition_or_an_embedding_the_search_answers(failing: object) -> None:
    cache, seen = made(), []

    def embed() -> object:
        if failing == "raises":
            raise ConnectionError("no embedder")
        return failing

    def search(embedding: Any) -> list[str]:
        seen.append(embedding)
        return ["found"]

    for place, embedding in ((PLACE, embed), (None, lambda: (1.0, 0.0))):
        answer = finished(cache.retrieve(Call("acme", "where?", lambda p=place: p, embedding, search)))
        assert answer == (("found",), None)
    assert seen == [None, None]
    assert (cache.stats().misses, cache.stats().entries) == (0, 0)


GOOD = [1.0] * 4
BAD = {
    "zeros": [0.0] * 4,
    "one NaN": [math.nan, *GOOD[1:]],
    "too huge for float32": [1e300] * 4,
    "another width": [1.0] * 3,
    "nothing": [],
    "a string": "embedding",
    "two of them": [GOOD] * 2,
    "ragged": [[1.0], [1.0, 2.0]],
    "objects": [object()] * 4,
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_embeddings_cost_no_answer(kind: str) -> None:
    cache, searched = made(), list[str]()
    for name, embedding in (("good", GOOD), ("bad", BAD[kind]), ("other", BAD[kind]), ("good", GOOD)):

        def search(_: Any, name: str = name) -> list[str]:
            searched.append(name)
            return ["found"]

        assert finished(cache.retrieve(call(embedding, search=search)))[0] == ("found",)
    assert searched.count("good") == 1
    assert {"bad", "other"} <= set(searched)


def test_a_failing_engine_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.register = None  # type: ignore[assignment,method-assign]
    assert finished(made(engine).retrieve(call()))[0] == ("found",)
    assert "could not register" in caplog.text


def test_asynchronous_functions_go_the_same_way() -> None:
    cache = made()

    async def search(embedding: Any) -> list[str]:
        await asyncio.sleep(0)
        return ["found"]

    async def both() -> list[bool]:
        results = [(await cache.retrieve(call(search=search)))[1] for _ in range(2)]
        return [result is not None and result.hit for result in results]

    assert asyncio.run(both()) == [False, True]
    cache.clear()
    with pytest.raises(RuntimeError, match="a synchronous retriever awaited"):
        finished(cache.retrieve(call(search=search)))


def test_texts_are_registered_unless_something_was_forgotten_meanwhile() -> None:
    engine = Engine()
    cache = made(engine)
    assert engine.cache is cache
    finished(cache.retrieve(call()))
    assert engine.calls == [("register", ["found"], "acme"), ("prefetch", ["found"], "acme")]

    def search(embedding: Any) -> list[str]:
        cache.clear()  # while the search is under way
        return ["found", " "]

    cache.clear()
    finished(cache.retrieve(call(search=search)))
    assert len(engine.calls) == 2
    assert cache.stats().entries == 0


def test_the_namespace_is_given_the_engines_or_the_default() -> None:
    assert [made(Engine()).namespace_of(name) for name in ("own", None)] == ["own", "acme"]
    assert made().namespace_of(None) == "default"


def test_a_guard_of_ones_own_is_asked_with_both_questions() -> None:
    asked: list[tuple[str, str]] = []

    def guard(question: str, cached: str) -> bool:
        asked.append((question, cached))
        return question.startswith("please")

    cache = made(tolerance=0.5, guard=guard)

    def ask(question: str) -> bool | str | None:
        made_call = Call("acme", question, lambda: PLACE, lambda: (1.0, 0.0), lambda embedding: ["found"])
        _, result = finished(cache.retrieve(made_call))
        assert result is not None
        return result.refused or result.hit

    assert [ask("where?"), ask("where?"), ask("please where?"), ask("when?")] == [False, True, True, "guard"]
    assert asked == [("please where?", "where?"), ("when?", "where?")]


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs rag=RagCache\(\.\.\.\) or None, got 'x'"):
        made("x")  # type: ignore[arg-type]
