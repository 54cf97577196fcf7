"""Staged searches: the request that is returned is that of the last stage, and no other one goes on."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcachekit import RagCacheError, SpeculativePipeline
from ragcachekit.engine.speculation import PipelineStats


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


def ask(pipeline, stages):
    with pipeline.begin() as speculation:
        for documents in stages:
            speculation.offer(joined(documents))
        return speculation.submit(joined(documents))


def test_the_example_of_the_paper():
    """RAGCache, figure 13: [D1, D3], then [D1, D2] until the end."""
    rag = FakeRag()
    pipeline = SpeculativePipeline(rag)
    request = ask(pipeline, [["D1", "D3"], ["D1", "D2"], ["D1", "D2"], ["D1", "D2"]])
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
        request = ask(pipeline, stages)
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
        ask(pipeline, [[f"{number} wrong"], [f"{number} too"], [f"{number}"]])
    assert rag.prompts == ["19"]
    assert pipeline.stats.provisional == 2  # of the first search
    assert pipeline.stats.right == 0
    for number in range(2):  # right lists are seen without being submitted
        rag.requests.clear()
        ask(pipeline, [[f"{number}"], [f"{number}"]])
    assert pipeline.stats.right == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_of_the_search_ends_the_request(error):
    rag = FakeRag()

    def stages():
        yield ["a"]
        raise error

    with pytest.raises(error):
        ask(SpeculativePipeline(rag), stages())
    assert rag.prompts == ["a"]
    assert not rag.alive


def test_a_streamer_is_refused():
    with pytest.raises(ValueError, match="request's stream"):
        SpeculativePipeline(FakeRag()).begin(streamer=object())
