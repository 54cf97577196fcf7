"""What capturing does to the process around it, above all when it fails; no GPU is needed for that."""

from __future__ import annotations

import gc

import pytest
import torch

from cuda_fakes import FakeCuda
from engine_kit import FOLDER, chunk, text
from families import build
from graph_kit import Rerun, plain_tables
from ragcachekit import GraphConfig, Prompt, RagCache
from ragcachekit.forward.cuda_graphs import graphed_forward as graphs
from ragcachekit.forward.cuda_graphs.capture import CudaGraphs, DeviceLock
from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

GPU = torch.device("cuda:0")
FAILED = RuntimeError("CUDA error: operation failed due to a previous error during capture")
ASKED = {"max_new_tokens": 4, "do_sample": False}
PROMPT = Prompt([text(3, 1), chunk(12, 2), text(4, 4)])
LONGER = Prompt([text(3, 1), chunk(12, 2), text(30, 5)])


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda().install(monkeypatch)


def ones():
    return torch.ones(1)


class TestStreamsAndPools:
    def test_warm_up_and_capture_share_one_stream_of_their_own(self, cuda):
        capture, here, on = CudaGraphs(GPU, warmups=2), cuda.current, []
        for _ in range(3):
            capture(lambda: on.append(cuda.current) or ones())
        (own,) = set(on)
        assert own is not here
        assert own.priority == -1
        assert len(on) == 3 * (2 + 1 + 1)
        assert [stream for _, stream in cuda.graphs] == [own] * 3
        assert cuda.streams == [here, own], "each stream keeps a workspace: one is enough"
        assert cuda.current is here

    def test_what_is_warmed_up_on_is_waited_for_on_both_sides(self, cuda):
        capture, here = CudaGraphs(GPU), cuda.current
        capture(ones)
        own = cuda.streams[-1]
        assert cuda.calls == [("wait", own, here), ("wait", here, own)]

    def test_graphs_share_a_pool_only_with_living_ones_of_the_same_capture(self, cuda):
        first, other = CudaGraphs(GPU), CudaGraphs(GPU)
        kept = [first(ones), first(ones), other(ones)]
        one, two, three = (pool for pool, _ in cuda.graphs)
        assert one == two != three
        kept.clear()
        gc.collect()
        first(ones)
        assert cuda.graphs[-1][0] not in (one, three)

    def test_replay_gives_the_captured_memory(self, cuda):
        out = torch.zeros(2)
        assert CudaGraphs(GPU)(lambda: out)() is out


class TestFailures:
    @pytest.mark.parametrize("where", ["begins", "ends"])
    def test_the_current_stream_and_the_allocator_are_restored(self, cuda, where):
        capture, here = CudaGraphs(GPU), cuda.current
        setattr(cuda, where, FAILED)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            capture(ones)
        assert cuda.current is here
        assert cuda.calls[-2:] == [("end allocation", 0, (0, 1)), ("generator", "a clone")]
        setattr(cuda, where, None)
        kept = capture(ones)
        assert kept() is not None
        assert cuda.current is here

    def test_an_allocator_that_has_ended_by_itself(self, cuda, monkeypatch):
        def ended(device, pool):
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
        here, cuda.ends = cuda.current, FAILED
        with pytest.raises(RuntimeError, match="previous error during capture"):
            CudaGraphs(GPU)(ones)
        assert cuda.current is here
        assert ("generator", "a clone") in cuda.calls

    def test_an_error_in_a_capture_that_ends_well_leaves_nothing_to_do(self, cuda):
        runs = iter([ones, ones, ones, ones])
        here = cuda.current
        with pytest.raises(StopIteration):
            CudaGraphs(GPU)(lambda: next(runs)())
        assert cuda.current is here
        assert not [call for call in cuda.calls if call[0] in ("end allocation", "generator")]

    def test_a_failed_warm_up_is_waited_for(self, cuda):
        here = cuda.current

        def run():
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            CudaGraphs(GPU)(run)
        assert cuda.current is here
        assert cuda.calls[-1] == ("wait", here, cuda.streams[-1])
        assert not cuda.graphs

    def test_what_waits_for_the_device_is_never_captured(self, cuda):
        x = torch.tensor([1.0, 0.0])
        with pytest.raises(NotCapturable, match="nonzero"):
            CudaGraphs(GPU)(lambda: torch.where(x > 0)[0])
        assert not cuda.graphs


class TestRunner:
    """The request is answered all the same, and its report says why not by a graph."""

    @pytest.fixture(autouse=True)
    def _fast(self, monkeypatch):
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
        plain_tables(monkeypatch)

    def rag(self, model, capture):
        options = {"policy": "lego:4", "cold": "now", "graphs": capture and GraphConfig(capture=capture)}
        return RagCache(model, cache_dir=FOLDER.name, **{**options, "graphs": options["graphs"] or "off"})

    def answers(self, capture, *prompts):
        """Forwards' names, after seeing that the tokens are those of eager forwards."""
        plain, rag = self.rag(build("llama"), None), self.rag(build("llama"), capture)
        ways = []
        for prompt in prompts:
            for each in (plain, rag):
                each.generate(prompt, max_new_tokens=1)
            answer = rag.generate(prompt, **ASKED)
            assert answer.token_ids == plain.generate(prompt, **ASKED).token_ids
            ways.append(answer.report.link.forward)
        return ways

    @pytest.mark.parametrize("where", ["begins", "ends"])
    def test_cuda_cannot_capture(self, cuda, monkeypatch, where):
        capture, here = CudaGraphs(GPU, warmups=1), cuda.current
        monkeypatch.setattr(
            "ragcachekit.forward.cuda_graphs.capture.RefuseWaits", _Nothing
        )  # tables of the test wait
        setattr(cuda, where, FAILED)
        (way,) = self.answers(capture, PROMPT)
        assert way.startswith(
            "eager: a forward over 16 rows cannot be captured: CUDA error: operation failed"
        )
        assert cuda.current is here
        assert len(cuda.graphs) <= 1, "it is not tried again"

    def test_the_forward_waits(self, cuda):
        (way,) = self.answers(CudaGraphs(GPU, warmups=1), PROMPT)  # the tables of this test do
        assert "rows cannot be captured: its forward makes the host wait for the device (aten." in way
        assert not cuda.graphs

    @pytest.mark.parametrize(
        "error", [ModuleNotFoundError("No module named 'triton'"), type("PTXASError", (Exception,), {})("no")]
    )
    def test_errors_of_any_kind(self, error):
        def capture(run):
            raise error

        (way,) = self.answers(capture, PROMPT)
        assert way == f"eager: a forward over 16 rows cannot be captured: {error}"

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory."),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        ],
    )
    def test_memory_is_short_for_many_rows_only(self, error, caplog):
        class Short(Rerun):
            def __call__(self, run):
                if run._inputs.room > 16:
                    self.captured += 1
                    try:
                        raise error
                    finally:
                        raise RuntimeError("CUDA error: capture failed")  # as ending it does
                return super().__call__(run)

        capture = Short()
        ways = self.answers(capture, PROMPT, LONGER, PROMPT)
        assert [way[:5] for way in ways] == ["graph", "eager", "graph"]
        assert "a forward over 64 rows cannot be captured" in ways[1]
        assert capture.captured == 2, "neither is tried again"
        assert len([r for r in caplog.records if "smaller ones are not affected" in r.message]) == 1

    def test_a_changed_model_gets_graphs_of_its_own(self, monkeypatch):
        made = []

        def capture_for(device):
            made.append(Rerun())
            return made[-1]

        monkeypatch.setattr(graphs, "capture_for", capture_for)
        monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
        model = build("llama")
        rag = RagCache(model, cache_dir=FOLDER.name, policy="lego:4", cold="now", graphs="auto")
        for _ in range(2):
            rag.generate(PROMPT, max_new_tokens=1)
            assert rag.generate(PROMPT, **ASKED).report.link.forward == "graph"
            model.model.layers[1].register_forward_hook(lambda *_: None).remove()
        handle = model.model.layers[1].register_forward_hook(lambda *_: None)
        assert "hooks" in rag.generate(PROMPT, **ASKED).report.link.forward
        handle.remove()
        assert rag.generate(PROMPT, **ASKED).report.link.forward == "graph"
        assert [capture.captured for capture in made] == [1, 0, 1]

    def test_a_model_that_moved_to_where_there_are_none(self, monkeypatch):
        monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
        rag = RagCache(build("llama"), cache_dir=FOLDER.name, policy="lego:4", cold="now", graphs="auto")
        rag.generate(PROMPT, max_new_tokens=1)
        assert rag.generate(PROMPT, **ASKED).report.link.forward == "eager: the model's device has no graphs"


class _Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def test_a_lock_is_free_again_when_waiting_fails(cuda):
    class Broken:
        def wait_event(self, event):
            raise RuntimeError("CUDA error: unspecified launch failure")

    lock = DeviceLock(torch.device("cpu"))
    lock._done = object()
    cuda.current = Broken()
    with pytest.raises(RuntimeError, match="unspecified launch failure"), lock:
        pass
    lock._done = None
    assert lock._lock.acquire(blocking=False)
