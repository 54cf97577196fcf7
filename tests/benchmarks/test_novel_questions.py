"""Novel questions on a tiny model: reuse of chunks lasts, that of an exact prefix cache does not."""

from statistics import fmean

import pytest

from benchmarks.novel_questions import FULL, PREFIX, measure, novel_prompts, warm_up
from benchmarks.serve.workload import random_documents
from families import wrapped
from ragcachekit import RagCache, StoreConfig, TreeConfig
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.model.kv import KVLayout

CHUNKS, QUESTIONS, TOKENS = 5, 20, 8


@pytest.fixture(scope="module")
def documents():
    return random_documents(wrapped("llama").config.vocab_size, 24, TOKENS, seed=1)


@pytest.fixture(scope="module")
def rows(documents, tmp_path_factory):
    model = wrapped("llama")
    budget = 2 * len(documents.chunks) * TOKENS * KVLayout.of(model).token_bytes
    engines = {}
    for name in (FULL, "reuse", PREFIX):
        engines[name] = RagCache(
            model,
            policy=name,
            encoder="standalone",
            store=StoreConfig(host_bytes=budget),
            tree=TreeConfig(host_bytes=budget) if name == PREFIX else None,
            encode_after=1,
            cache_dir=tmp_path_factory.mktemp("cache"),
        )
        warm_up(engines[name], documents, CHUNKS, [])
    try:
        return list(measure(engines, list(novel_prompts(documents, QUESTIONS, CHUNKS, 0)), 2))
    finally:
        for rag in engines.values():
            rag.close()


def test_no_two_prompts_have_the_same_question_or_order(documents):
    prompts = list(novel_prompts(documents, 24, CHUNKS, 0))
    assert len({prompt.segments[-1] for prompt in prompts}) == 24
    assert len({prompt.segments[1:-1] for prompt in prompts}) == 24
    assert all(len(set(prompt.segments[1:-1])) == CHUNKS for prompt in prompts)
    with pytest.raises(CorpusError, match="24 questions, and 25 are needed"):
        list(novel_prompts(documents, 25, CHUNKS, 0))


def test_reuse_of_chunks_lasts_and_that_of_prefixes_does_not(rows):
    shares = {
        name: [row["share"] for row in rows if row["policy"] == name] for name in (FULL, "reuse", PREFIX)
    }
    assert set(shares[FULL]) == {0}
    for row in rows:
        if row["policy"] == "reuse":
            assert row["exact_tokens"] + row["approximate_tokens"] >= CHUNKS * TOKENS
            assert row["evictions"] == 0
    assert fmean(shares[PREFIX]) < fmean(shares["reuse"])
    assert {row["same"] for row in rows if row["policy"] == FULL} == {True}


def test_an_answer_that_differs_from_full_gives_no_figures(documents, tmp_path):
    """The tiny model's random chunks are far from exact: ``reuse`` stands in for a broken prefix cache."""
    with (
        RagCache(wrapped("llama"), policy="full", cache_dir=tmp_path) as full,
        RagCache(wrapped("llama"), policy="reuse", encode_after=1, cache_dir=tmp_path) as broken,
    ):
        warm_up(broken, documents, CHUNKS, [])
        with pytest.raises(RagCacheError, match="no figures are given"):
            list(measure({FULL: full, PREFIX: broken}, list(novel_prompts(documents, 8, CHUNKS, 0)), 8))
