"""Staged searches: the request that is returned is that of the last stage, and no other one goes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit import Chunk, Prompt, RagCache, RagCacheError, SpeculativePipeline, Text
from ragcachekit.engine.speculation import PipelineStats
from speaking import byte_level, speaker


class FakeRequest:
    def __init__(self, prompt, options):
        self.prompt, self.options, self.cancelled = prompt, options, False

    def cancel(self):
        self.cancelled = True

    def failed(self):
        return False


class FakeRag:
    """Takes every prompt but those in ``refused``; at most one provisional request may be alive."""

    def __init__(self, waiting=0, refused=()):
        self.queue, self.refused, self.requests = SimpleNamespace(waiting=waiting), refused, []

    def submit(self, prompt, **options):
        if prompt in self.refused:
            raise RagCacheError(f"refused {prompt}")
        assert all(request.cancelled for request in self.requests)
        self.requests.append(FakeRequest(prompt, options))
        return self.requests[-1]

    @property
    def prompts(self):
        return [request.prompt for request in self.requests]

    @property
    def alive(self):
        return [request for request in self.requests if not request.cancelled]


def joined(documents):
    return " ".join(documents)


def test_the_example_of_the_paper():
    """RAGCache, figure 13: [D1, D3], then [D1, D2] until the end."""
    rag = FakeRag()
    pipeline = SpeculativePipeline(rag)
    request = pipeline.submit([["D1", "D3"], ["D1", "D2"], ["D1", "D2"], ["D1", "D2"]], joined)
    assert rag.prompts == ["D1 D3", "D1 D2"]
    assert rag.alive == [request]
    assert pipeline.stats == PipelineStats(searches=1, provisional=2, right=1)


lists = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2)


@given(
    searches=st.lists(st.tuples(st.lists(lists, min_size=1, max_size=5), st.integers(0, 2)), max_size=8),
    most=st.integers(1, 2),
)
def test_whatever_the_stages_the_last_one_is_answered(searches, most):
    rag, provisional, right = FakeRag(), 0, 0
    pipeline = SpeculativePipeline(rag, max_waiting=most)
    for stages, rag.queue.waiting in searches:
        rag.requests.clear()
        request = pipeline.submit(stages, joined)
        assert request.prompt == joined(stages[-1])
        assert rag.alive == [request]
        if rag.queue.waiting >= most:
            assert rag.requests == [request]
        wrong = sum(one != request for one in rag.requests)
        early = pipeline.stats.provisional - provisional
        assert wrong <= early <= wrong + 1
        right += early > wrong
        provisional += early
    assert pipeline.stats == PipelineStats(len(searches), provisional, right)


def test_lists_that_are_always_wrong_are_soon_not_submitted():
    rag = FakeRag()
    pipeline = SpeculativePipeline(rag)
    for number in range(20):
        rag.requests.clear()
        pipeline.submit([[f"{number} wrong"], [f"{number} too"], [f"{number}"]], joined)
    assert rag.prompts == ["19"]
    assert pipeline.stats.provisional == 2  # of the first search
    assert pipeline.stats.right == 0
    for number in range(2):  # right lists are seen without being submitted
        rag.requests.clear()
        pipeline.submit([[f"{number}"], [f"{number}"]], joined)
    assert pipeline.stats.right == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_of_the_search_ends_the_request(error):
    rag = FakeRag()

    def stages():
        yield ["a"]
        raise error

    with pytest.raises(error):
        SpeculativePipeline(rag).submit(stages(), joined)
    assert rag.prompts == ["a"]
    assert not rag.alive


@pytest.mark.parametrize("policy", ["full", "prefix", "reuse"])
def test_answers_are_those_without_speculation(tmp_path, policy):
    """Whatever the provisional lists: right from the start, wrong until the end, or changing."""
    texts = [f"The river of town {n} flows to the sea. " * 2 for n in range(6)]
    asked = [[texts[a], texts[b]] for a, b in ((0, 1), (2, 3), (4, 5), (1, 2))]
    stages = [
        [asked[0]] * 3,
        [asked[0], asked[2], asked[1]],
        [asked[2][::-1], asked[2], asked[2]],
        [[texts[1]], asked[3]],
    ]

    def prompt(documents):
        return Prompt([Text("Read. "), *map(Chunk, documents), Text(" Where does it flow?")])

    options = {"max_new_tokens": 12, "do_sample": False}
    model = speaker(num_hidden_layers=2, max_position_embeddings=1024)
    with RagCache(model, byte_level(), policy=policy, cold="never", cache_dir=tmp_path) as rag:
        rag.encode(texts)
        expected = [rag.generate(prompt(documents), **options).token_ids for documents in asked]
        pipeline = SpeculativePipeline(rag)
        for lists, ids in zip(stages, expected, strict=True):
            assert pipeline.submit(lists, prompt, **options).result().token_ids == ids
        assert rag.queue.drain(30)
        stats = rag.queue.stats()
        assert pipeline.stats.right >= 1
        assert stats.done + stats.cancelled == stats.submitted
        assert stats.submitted - stats.cancelled >= len(asked)
