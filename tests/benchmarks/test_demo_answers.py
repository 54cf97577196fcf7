"""The demo's Answers part on a small world, with word counts for embeddings."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from langchain_core.embeddings import Embeddings
from rich.console import Console

from benchmarks.demo import answers as demo_answers
from benchmarks.demo import plot as demo_plot
from benchmarks.demo import run as demo
from benchmarks.demo.calibrate import (
    MAX_FALSE_HITS,
    calibrated,
    calibration_questions,
    choose_questions,
    workload,
)
from benchmarks.demo.chain import Asked, Wording, ask, build_chain
from benchmarks.demo.score import bootstrap, count_hits, scores, tokens_reused, wilson
from benchmarks.demo.store import ArticleStore, RememberedEmbeddings
from benchmarks.world.world import World, make_world, messages
from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError

SIZES = replace(demo_answers.QUICK, questions=9, calibration=12)
PARTS = {"policy": 28, "chain": 4, "query-cache": 1, "retrieval": 2, "check": 1}


class WordCounts(Embeddings):
    """Hashed counts of words; names, which are rarer, weigh more."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        row = np.full(256, 0.01)
        for word in re.findall(r"\w+", text):
            row[zlib.crc32(word.encode()) % 256] += 3.0 if word[0].isupper() else 1.0
        return (row / np.linalg.norm(row)).tolist()


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(0, people=12, companies=6, towns=6)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests")


@pytest.fixture(scope="module")
def report(digests: Path) -> BenchReport:
    return demo_answers.run(WordCounts(), sizes=SIZES, cache_dir=digests)


@pytest.fixture
def store(world: World) -> ArticleStore:
    return ArticleStore.from_articles(world.articles, WordCounts())


def part(report: BenchReport, name: str) -> list[dict]:
    return [row for row in report.rows if row["part"] == name]


def asked(world: World, number: int, search: int, *, right: bool = True, found: int | None = None) -> Asked:
    """A question as if it had been answered; ``found`` names the question whose evidence was returned."""
    question = world.questions[number]
    evidence = world.questions[number if found is None else found].evidence
    answer = question.answer if right else "nothing"
    return Asked(Wording(question, question.text), answer, evidence, search, (), {})


# -- the whole ----------------------------------------------------------------------------------------


def test_every_part_has_its_rows(report: BenchReport) -> None:
    assert {name: len(part(report, name)) for name in PARTS} == PARTS
    assert len(report.rows) == sum(PARTS.values())


def test_full_equals_the_models_own_generate_on_every_question(report: BenchReport) -> None:
    (check,) = part(report, "check")
    assert (check["n"], check["mismatches"]) == (SIZES.questions, 0)


def test_policies_spend_and_reuse_what_their_names_say(report: BenchReport) -> None:
    rows = {row["policy"]: row for row in part(report, "policy") if row["question_type"] == "all"}
    assert {row["n"] for row in rows.values()} == {SIZES.questions}
    assert (rows["full"]["tokens_reused"], rows["full"]["ratio_spent"]) == (0.0, 1.0)
    assert rows["full"]["agreement"] == 1.0
    assert rows["full"]["exact_match"] >= 0.7
    for policy in ("reuse", "lego0"):  # every chunk was encoded up front, as this policy's encoder wants it
        assert rows[policy]["tokens_reused"] > 0.85
        assert rows[policy]["ratio_spent"] == 0.0
    chain = rows[demo_answers.CHAIN]
    assert chain["encoder"] == demo_answers.CHAIN_ENCODER
    assert chain["ratio_spent"] < rows["deep:0.1"]["ratio_spent"] <= 0.11
    assert chain["tokens_reused"] > 0.8
    assert rows["lego0"]["encoder"] == "sinks:4"
    assert 0 < rows["lego:4"]["ratio_spent"] < rows["lego:16"]["ratio_spent"] < 1
    assert rows["lego:16"]["tokens_reused"] < rows["lego:4"]["tokens_reused"] < rows["reuse"]["tokens_reused"]


def test_scores_lie_in_their_intervals_and_add_up(report: BenchReport) -> None:
    for row in part(report, "policy") + part(report, "chain"):
        assert 0 <= row["low"] <= row["exact_match"] <= row["high"] <= 1
    rows = [row for row in part(report, "policy") if row["policy"] == "reuse"]
    right = {row["question_type"]: row["exact_match"] * row["n"] for row in rows}
    assert right["all"] == pytest.approx(right["a"] + right["b"] + right["c"])


def test_the_cached_chain_asks_every_question_in_four_wordings(report: BenchReport) -> None:
    (queries,) = part(report, "query-cache")
    total = next(row for row in part(report, "chain") if row["question_type"] == "all")
    assert queries["n"] == total["n"] == 4 * SIZES.questions
    assert total["questions"] == SIZES.questions
    assert (
        queries["harmful_hits"]
        <= queries["wrong_hits"]
        <= queries["hits"]
        == queries["hit_rate"] * queries["n"]
    )
    assert queries["hits"] > 0
    assert queries["max_false_hit_rate"] == MAX_FALSE_HITS


def test_retrieval_is_measured_both_ways(report: BenchReport) -> None:
    off, on = part(report, "retrieval")
    assert (off["query_cache"], on["query_cache"]) == ("off", "on")
    assert off["hit_ms"] is None
    assert on["hit_ms"] > 0
    for row in (off, on):
        assert row["total_ms"] == row["embed_ms"] + row["retrieval_ms"]
        assert row["n"] == 4 * SIZES.questions


def test_the_number_of_threads_is_put_back(digests: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="cannot take"):
        demo_answers.run(WordCounts(), sizes=replace(SIZES, questions=100_000), cache_dir=digests)
    assert torch.get_num_threads() == before


def test_a_full_that_differs_from_the_model_stops_the_demo(digests: Path, world: World) -> None:
    question = world.questions[0]
    sent = tuple(messages(world.articles[0].chunks, question.text))
    with RagCache.from_pretrained(demo_answers.READER, cache_dir=digests) as rag:
        told = rag.generate(list(sent), policy="full", max_new_tokens=demo_answers.MAX_TOKENS).text
        same = Asked(Wording(question, question.text), told, (), 0, sent, {})
        assert demo_answers._check_full(rag, [same])["mismatches"] == 0
        with pytest.raises(RagCacheError, match="1 of 2 questions"):
            demo_answers._check_full(rag, [same, replace(same, answer="something else")])


# -- what is shown ------------------------------------------------------------------------------------


def speed() -> BenchReport:
    row = {"policy": "full", "state": "-", "tier": "none", "prompt_tokens": 2000, "recompute_ratio": 1.0}
    row |= {"ttft_ms": 900.0, "ttft_ms_min": 890.0, "ttft_ms_max": 950.0, "speedup": 1.0, "runs": 3}
    warm = row | {"policy": "lego:16", "state": "warm", "tier": "host", "ttft_ms": 90.0, "speedup": 10.0}
    return BenchReport("demo-speed", "a shape", 0, (row, warm | {"ttft_ms_min": 80.0, "ttft_ms_max": 99.0}))


def test_the_table_and_the_summary_come_from_the_rows(report: BenchReport) -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(demo.answers_table(report))
    text = captured.get()
    assert all(policy in text for policy in (*demo_answers.POLICIES, f"{demo_answers.CHAIN} + query cache"))
    line = demo.summary(report, speed())
    (queries,) = part(report, "query-cache")
    assert f"{queries['hit_rate']:.0%} of the questions" in line
    assert "10.0x with lego:16" in line


def test_the_plot_is_an_image(report: BenchReport, tmp_path: Path) -> None:
    demo_plot.draw(report, speed(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# -- hits and intervals -------------------------------------------------------------------------------


def test_hits_on_another_questions_entry_are_wrong_and_some_are_harmful(world: World) -> None:
    same = next(i for i, q in enumerate(world.questions[1:], 1) if q.evidence == world.questions[0].evidence)
    other = next(i for i, q in enumerate(world.questions) if q.articles[0] != world.questions[0].articles[0])
    trail = [
        asked(world, 0, search=0),
        asked(world, 0, search=0),  # its own entry
        asked(world, other, search=1),
        asked(world, same, search=0),  # another's entry, which has what is needed
        asked(world, other, search=0, found=0),  # another's entry, which has not
        asked(world, same, search=2),
    ]
    hits = count_hits(trail)
    assert (hits.lookups, hits.hits, hits.wrong_hits, hits.harmful_hits) == (6, 3, 2, 1)
    assert hits.hit_rate == 0.5
    assert count_hits([]).hit_rate == 0.0


def test_wilson_is_that_of_the_textbook() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901, 0.9433), abs=1e-3)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 10)[0] == pytest.approx(0.0)
    with pytest.raises(ValueError, match="right"):
        wilson(3, 2)


def test_wordings_of_one_question_are_not_counted_as_independent(world: World) -> None:
    groups = [[i % 2 == 0] * 4 for i in range(20)]
    low, high = bootstrap(groups)
    alone = bootstrap([[value] for group in groups for value in group])
    assert high - low > 1.5 * (alone[1] - alone[0])
    assert bootstrap([[True], [True]]) == (1.0, 1.0)
    kind = world.questions[0].kind
    four = [asked(world, 0, search=i, right=i < 2) for i in range(4)]
    (score, _) = scores(four)
    assert (score.question_type, score.exact_match, score.n, score.questions) == (kind, 0.5, 4, 1)


def test_the_share_of_reused_tokens_counts_exact_and_approximate_ones(world: World) -> None:
    link = {"prompt_tokens": 50, "exact_tokens": 5, "approximate_tokens": 20}
    one = replace(asked(world, 0, search=0), report={"link": link})
    none = replace(one, report={"link": link | {"exact_tokens": 0, "approximate_tokens": 0}})
    assert tokens_reused([one, none]) == 0.25


# -- questions, store, chain --------------------------------------------------------------------------


def test_questions_are_balanced_and_calibration_uses_others(world: World) -> None:
    rng = random.Random(1)
    questions = choose_questions(world, 10, rng)
    assert sorted(q.kind for q in questions) == ["a"] * 4 + ["b"] * 3 + ["c"] * 3
    others = calibration_questions(world, questions, 12, rng)
    assert not set(others) & set(questions)
    assert len(others) == len(set(others))
    pairs = [(x, y) for x in others for y in others if x.relation == y.relation]
    assert any(x.articles[0] != y.articles[0] for x, y in pairs)
    texts = [wording.text for wording in workload(questions, rng)]
    assert len(set(texts)) == len(texts) == 40
    with pytest.raises(ValueError, match="kind a"):
        choose_questions(world, 10_000, rng)


def test_the_tolerance_keeps_to_its_bound(world: World) -> None:
    questions = calibration_questions(world, (), 30, random.Random(2))
    found = calibrated(questions, WordCounts())
    assert found.different_pairs == 2 * found.same_pairs == 2 * len(questions)
    assert found.false_hit_rate <= MAX_FALSE_HITS
    assert found.tolerance > 0


def test_the_store_returns_whole_articles_with_their_links(world: World, store: ArticleStore) -> None:
    person = next(article for article in world.articles if article.kind == "person")
    found = store.similarity_search(f"Where was {person.title} born?", k=8)
    titles = list(dict.fromkeys(document.metadata["title"] for document in found))
    assert titles[: 1 + len(person.links)] == [person.title, *person.links]
    chunks = {article.title: article.chunks for article in world.articles}
    assert tuple(d.page_content for d in found) == tuple(c for title in titles for c in chunks[title])
    assert len(found) == 8
    assert len(store.similarity_search("Where?", k=5)) == 4  # no half article
    with pytest.raises(ValueError, match="filter"):
        store.similarity_search("Where?", filter={})


def test_the_store_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="metadata"):
        ArticleStore.from_texts(["a"], WordCounts())
    with pytest.raises(ValueError, match="ids"):
        ArticleStore.from_texts(["a"], WordCounts(), [{"title": "A"}], ids=["1"])


def test_a_remembered_question_is_not_embedded_again() -> None:
    class Once(WordCounts):
        calls = 0

        def embed_query(self, text: str) -> list[float]:
            self.calls += 1
            return super().embed_query(text)

    inner = Once()
    known = RememberedEmbeddings(inner)
    known.remember(["Where?"])
    assert known.embed_query("Where?") == known.embed_query("Where?") == WordCounts().embed_query("Where?")
    assert inner.calls == 1


def test_the_chain_sends_what_the_reader_knows_and_shows_the_search(
    world: World, store: ArticleStore, digests: Path
) -> None:
    with RagCache.from_pretrained(demo_answers.READER, cold="now", cache_dir=digests) as rag:
        retriever = RagCacheRetriever.wrap(store.as_retriever(search_kwargs={"k": 8}), cache=rag)
        chain = build_chain(retriever, ChatRagCache(cache=rag, max_tokens=demo_answers.MAX_TOKENS))
        question = world.questions[0]
        first, second = ask(chain, [Wording(question, question.text)] * 2, "asking", progress=False)
    chunks = [document.page_content for document in store.similarity_search(question.text, k=8)]
    assert list(first.messages) == messages(chunks, question.text)
    assert first.search == second.search
    assert first.has_evidence
    assert first.report["link"]["approximate_tokens"] == 0
    assert second.report["link"]["approximate_tokens"] > 0
    assert count_hits([first, second]).hits == 1
