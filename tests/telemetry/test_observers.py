"""Observers are called once per request and lookup, and cost nothing but a log line when they fail."""

from __future__ import annotations

import contextvars
import time
from typing import Any

import numpy as np
import pytest

from queue_kit import held
from ragcachekit import CachedRetrieval, Observer, ProximityCache, QueueConfig, QueueFull, RagCache
from ragcachekit.errors import Cancelled, DeadlineExceeded, PromptTooLong
from ragcachekit.observers import QueryLookup, RequestStart
from ragcachekit.reports import GenerateReport

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="none")


class Recorder(Observer):
    def __init__(self) -> None:
        self.started: list[RequestStart] = []
        self.ended: list[tuple[str, GenerateReport | None, BaseException | None]] = []
        self.callers: list[str] = []
        self.lookups: list[QueryLookup] = []
        self.searches: list[QueryLookup] = []

    def request_started(self, start: RequestStart) -> str:
        self.started.append(start)
        self.callers.append(CALLER.get())
        return f"token {len(self.started)}"

    def request_ended(self, token: Any, report: Any, error: Any) -> None:
        self.ended.append((token, report, error))

    def looked_up(self, lookup: QueryLookup) -> None:
        self.lookups.append(lookup)

    def searched(self, lookup: QueryLookup) -> None:
        self.searches.append(lookup)


@pytest.fixture
def seen(rag: RagCache) -> Recorder:
    recorder = Recorder()
    rag.add_observer(recorder)
    return recorder


def test_generate(rag, seen, prompt) -> None:
    before = time.time_ns()
    answer = rag.generate(prompt, namespace="acme", max_new_tokens=2)
    (start,) = seen.started
    assert (start.operation, start.namespace) == ("text_completion", "acme")
    assert start.options == {"max_new_tokens": 2}
    assert before <= start.started_ns <= time.time_ns() - answer.report.total_ms * 1e6
    assert seen.ended == [("token 1", answer.report, None)]
    assert 0 < answer.report.link.plan_ms <= answer.report.link.link_ms


def test_stream_and_queue_keep_the_callers_context(rag, seen, prompt) -> None:
    CALLER.set("me")
    with rag.stream(prompt, max_new_tokens=2) as stream:
        assert "".join(stream) == stream.answer.text
    submitted = rag.submit(prompt, max_new_tokens=2).result()
    batch = rag.generate_batch([prompt, prompt], max_new_tokens=2)
    reports = [stream.answer.report, submitted.report, *(answer.report for answer in batch)]
    assert sorted(map(id, reports)) == sorted(id(report) for _, report, _ in seen.ended)
    assert seen.callers == ["me"] * 4
    assert sorted(token for token, *_ in seen.ended) == [f"token {n}" for n in (1, 2, 3, 4)]


def test_a_request_ends_before_its_result_is_there(rag, seen, prompt) -> None:
    """So that a scrape after an answer counts it."""
    for number in range(1, 6):
        rag.submit(prompt, max_new_tokens=1).result()
        assert len(seen.ended) == number


@pytest.mark.parametrize("how", ["generate", "submit"])
def test_a_refused_prompt_ends_with_its_error(rag, seen, how) -> None:
    with pytest.raises(PromptTooLong):
        getattr(rag, how)("river " * 2000)
    ((token, report, error),) = seen.ended
    assert (token, report, type(error)) == ("token 1", None, PromptTooLong)


def test_what_the_queue_ends(rag, seen, prompt) -> None:
    with held(rag):
        cancelled, late = rag.submit(prompt), rag.submit(prompt, deadline=0.01)
        cancelled.cancel()
        with pytest.raises(DeadlineExceeded):
            late.result()
        waiting = [rag.submit(prompt, max_new_tokens=1) for _ in range(QueueConfig().max_waiting)]
        with pytest.raises(QueueFull):
            rag.submit(prompt, max_new_tokens=1)
        for request in waiting:
            request.cancel()
    outcomes = [report.finish_reason if report else type(error).__name__ for _, report, error in seen.ended]
    assert sorted(set(outcomes)) == ["DeadlineExceeded", "QueueFull", "cancelled"]
    assert len(outcomes) == len(seen.started) == len(waiting) + 3


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, Cancelled])
def test_whatever_an_observer_raises_in_the_engines_thread_costs_no_answer(rag, prompt, raised) -> None:
    class Leaves(Observer):
        def request_ended(self, token: Any, report: Any, error: Any) -> None:
            raise raised

    rag.add_observer(Leaves())
    rag.add_observer(after := Recorder())
    with held(rag):
        requests = [rag.submit(prompt, max_new_tokens=2) for _ in range(3)]
    assert [len(request.result(60).token_ids) for request in requests] == [2] * 3
    assert len(after.ended) == 3
    assert len(rag.submit(prompt, max_new_tokens=2).result(60).token_ids) == 2


def test_query_lookups(rag, seen) -> None:
    cache = CachedRetrieval[str](ProximityCache(10, 0.5, "l2"))
    rag.add_query_cache(cache)
    place, question = "place", np.ones(4, np.float32)

    def ask(embedding: Any, text: str) -> Any:
        return cache.get(embedding, place, lambda: [("1", "one"), ("2", "two")], question=text)

    ask(question, "Does Ada live in Rome?")
    ask(question, "Does Ada live in Rome?")
    ask(question, "Does Ada not live in Rome?")
    ask(np.full(4, np.nan), "?")
    assert [lookup.result for lookup in seen.lookups] == ["miss", "hit", "refused", "failed"]
    assert [lookup.documents for lookup in seen.lookups] == [0, 2, 0, 0]
    assert [lookup.result for lookup in seen.searches] == ["miss", "refused", "failed"]
    assert [lookup.documents for lookup in seen.searches] == [2, 2, 2]
    assert all(lookup.search_seconds is None for lookup in seen.lookups)
    assert all(0 < (lookup.search_seconds or 0) < 5 for lookup in seen.searches)
    assert [s.started_ns for s in seen.searches] == pytest.approx(
        [seen.lookups[n].started_ns for n in (0, 2, 3)], abs=1e6
    )
    assert "Ada" not in repr(seen.lookups + seen.searches)
