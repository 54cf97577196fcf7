"""The sample world: repeatable, unambiguous, and answerable from the chunks that it names."""

import re
from collections import Counter

import pytest

from benchmarks.world.world import make_world


@pytest.fixture(scope="module")
def world():
    return make_world()


def test_the_same_seed_gives_the_same_world(world):
    assert make_world() == world
    assert make_world(seed=1) != world


def test_the_corpus_is_large_and_its_titles_are_unique(world):
    titles = [article.title for article in world.articles]
    assert len(titles) >= 300
    assert len(set(titles)) == len(titles)
    last_words = [title.split()[-1] for title in titles]
    assert len(set(last_words)) == len(last_words)
    chunks = [chunk for article in world.articles for chunk in article.chunks]
    assert len(set(chunks)) == len(chunks)


def test_every_article_has_chunks_of_a_fair_size_and_links_that_exist(world):
    titles = {article.title for article in world.articles}
    for article in world.articles:
        assert len(article.chunks) >= 2
        assert titles.issuperset(article.links)
        assert all(link in " ".join(article.chunks) for link in article.links)
        for chunk in article.chunks:
            assert 20 <= len(re.findall(r"\w+|[^\w\s]", chunk)) <= 45


def test_only_the_first_chunk_names_its_subject(world):
    for article in world.articles:
        first, *others = article.chunks
        assert article.title in first
        for chunk in others:
            assert article.title not in chunk
            assert f"his {article.kind}" in chunk


def test_every_kind_of_question_is_asked_often(world):
    counts = Counter(question.kind for question in world.questions)
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) >= 500
    assert len({question.text for question in world.questions}) == len(world.questions)


def test_answers_stand_in_the_chunks_that_are_named_as_evidence(world):
    by_title = {article.title: article for article in world.articles}
    for question in world.questions:
        chunks = [by_title[title].chunks[index] for title, index in question.evidence]
        assert question.articles == tuple(title for title, _ in question.evidence)
        assert question.articles[0] in question.text
        assert question.answer.split()[-1] in re.findall(r"\w+", chunks[-1])
        assert _place(question) == {"a": (1, 0), "b": (1, 1), "c": (2, 0)}[question.kind]
        if question.kind == "c":
            assert question.articles[1] in chunks[0]
            assert question.articles[1] not in question.text
            assert question.answer.split()[0] == question.articles[1]


def _place(question):
    return len(question.articles), question.evidence[-1][1]
