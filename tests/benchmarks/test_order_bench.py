"""The bench of document order on a tiny model: visits, shares, and figures that add up."""

import zlib

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from benchmarks.datasets import Passages
from benchmarks.order import ORDERS, counted, in_visits, measure, parts_of, summary
from langchain_ragcachekit.vector_store import RagCacheVectorStore
from ragcachekit import TreeConfig
from speaking import ONE, THREE, TWO, byte_level, speaker

TEXTS = [ONE, TWO, THREE]


class Words(Embeddings):
    """Counts of hashed words."""

    def embed_query(self, text):
        vector = [0.0] * 32
        for word in text.split():
            vector[zlib.crc32(word.encode()) % 32] += 1.0
        return vector

    def embed_documents(self, texts):
        return list(map(self.embed_query, texts))


def about(article, number):
    return Passages(f"question {number} of {article}?", ("x",), (article,), document=(article, "more"))


def test_users_take_turns_and_visits_are_about_one_article():
    questions = [about(article, number) for article in "abcd" for number in range(6)]
    asked = in_visits(questions, users=2, visit=3, seed=1)
    assert sorted(one.question for one in asked) == sorted(one.question for one in questions)
    assert [one.question for one in asked] == [one.question for one in in_visits(questions, 2, 3, 1)]
    for user in (0, 1):
        turns = [one.relevant[0] for one in asked[user::2]]
        assert all(len(set(turns[at : at + 3])) == 1 for at in range(0, len(turns), 3))


def test_questions_without_an_article_come_one_by_one():
    questions = [Passages(f"question {n}?", ("x",), (f"passage {n}",)) for n in range(9)]
    assert {one.question for one in in_visits(questions, 4, 5, 0)} == {one.question for one in questions}


@pytest.fixture(scope="module")
def rows():
    questions = [f"{' '.join(text.split()[-2:])} {word}" for text in TEXTS for word in ("river", "town")]
    asked = [Passages(question, ("Berlin",), (ONE,)) for question in questions]
    tree = TreeConfig(host_bytes=1 << 26)
    store = RagCacheVectorStore(Words())
    store.add_documents([Document(text, metadata={"number": n}) for n, text in enumerate(TEXTS)])
    return list(measure(speaker(), byte_level(), store, asked, k=3, tree=tree, new_tokens=3))


def test_the_cached_order_reuses_more_and_all_ask_the_same(rows):
    found, by_id, cached = ([row for row in rows if row["order"] == name] for name in ORDERS)
    for own in (found, by_id, cached):
        assert [row["question"] for row in own] == [1, 2, 3, 4, 5, 6]
    assert [row["chunks_reused"] for row in by_id] == [0, 3, 3, 3, 3, 3], "all are in every prompt"
    assert not any(row["moved"] for row in found)
    assert any(row["moved"] for row in cached)
    assert [row["chunks_reused"] for row in cached] == [0, 3, 3, 3, 3, 3], "all, in one order"
    assert sum(row["exact_tokens"] for row in cached) > sum(row["exact_tokens"] for row in found)


def test_the_summary_is_of_the_rows(rows):
    found, _, cached = summary(rows, 0)
    own = [row for row in rows if row["order"] == "cached"]
    assert cached["share"] == sum(row["exact_tokens"] for row in own) / sum(
        row["prompt_tokens"] for row in own
    )
    assert (found["f1_change"], found["f1_change_low"], found["f1_change_high"]) == (0, 0, 0)
    assert cached["f1_change"] == pytest.approx(cached["f1"] - found["f1"])
    assert cached["f1_change_low"] <= cached["f1_change"] <= cached["f1_change_high"]
    assert cached["share"] > found["share"]


@pytest.mark.parametrize(
    ("order", "reused", "moved"), [("found", 5, 0), ("by id", 12 + 3 + 5, 2), ("cached", 12 + 12, 2)]
)
def test_what_is_counted_without_a_model(order, reused, moved):
    found, sizes = [[2, 1], [1, 2], [0, 1, 2], [1, 0]], [3, 5, 7]
    expected = {"questions": 4, "share": reused / (12 + 12 + 15 + 8), "moved": moved / 4}
    assert counted(found, sizes, order) == pytest.approx(expected)


def test_passages_are_cut_into_equal_parts():
    assert parts_of("a b c d e f g", 3) == ["a b c", "d e f g"]
    assert parts_of("a b", 3) == ["a b"]
