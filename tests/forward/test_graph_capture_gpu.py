"""The same process captures, fails to and captures again, on a real GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from ragcachekit.forward.cuda_graphs import capture as graph_capture
from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture
def capture():
    return graph_capture.CudaGraphs(torch.device("cuda"))


@pytest.fixture
def weight():
    return torch.randn(64, 64, generator=torch.Generator("cuda").manual_seed(0), device="cuda")


def in_order(weight):
    """Products, random numbers, freeing memory and captures by others all work."""
    torch.testing.assert_close(
        weight @ weight, (weight.double() @ weight.double()).float(), rtol=1e-2, atol=0.1
    )
    state = torch.cuda.get_rng_state()
    first = torch.rand(8, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    torch.cuda.empty_cache()
    assert torch.equal(graph_capture.CudaGraphs(torch.device("cuda"))(lambda: weight * 2)(), weight * 2)


def test_a_capture_that_fails_harms_nobody(capture, weight):
    def waits():
        product = weight @ weight
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()  # which no run before the capture shows
        return product

    here = torch.cuda.current_stream()
    kept = capture(lambda: weight + 1)
    with pytest.raises(RuntimeError):
        capture(waits)
    assert torch.cuda.current_stream() == here
    in_order(weight)
    assert torch.equal(kept(), weight + 1)
    assert torch.equal(capture(lambda: weight + 3)(), weight + 3)


@pytest.mark.parametrize(
    "wait", [torch.Tensor.tolist, torch.Tensor.nonzero, lambda x: x[x > 0], torch.Tensor.cpu]
)
def test_what_waits_is_found_before(capture, weight, wait):
    with pytest.raises(NotCapturable, match="its forward"):
        capture(lambda: wait(weight @ weight))
    in_order(weight)


def test_a_pool_whose_graphs_are_gone_is_not_used_again(capture, weight):
    for round_ in range(3):
        replay = capture(lambda round_=round_: weight @ weight + round_)
        assert torch.equal(replay(), weight @ weight + round_)
        del replay
        gc.collect()
    in_order(weight)
