"""Weights of rows with large scores add up to 1: both passes over the keys have to see the same scores.

A float32 score of 1e6 is known to 1/16. Two computations that add the same products in another order, as BLAS
libraries do depending on the processor, differ by that much, and the weights by the exponential of it.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from ragcachekit_kernels import dispatch, scores_kernels
from ragcachekit_kernels.dispatch import AttentionOptions

pytestmark = pytest.mark.usefixtures("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM = 16
HEADS = 24
EXPONENTIALS = 1e-5
"""Relative error of sums of weights that does not come from the scores: a few float32 roundings."""

LIMITS = {
    "all keys": (60, None, None),
    "keys divided among programs": (600, None, None),
    "window": (200, None, 50),
    "spans": (200, ((0, 90), (90, 150)), None),
    "long spans": (1200, ((0, 600), (600, 1200)), None),
}


def drawn(tokens, magnitude, dtype=torch.float32, seed=0):
    """Query and key vectors with scores of about ``magnitude``; two keys of each 20 are the same."""
    random = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(*shape, generator=random) for shape in ((HEADS, 1, DIM), (1, tokens, DIM)))
    key[:, 1::20] = key[:, ::20]
    return ((x * math.sqrt(magnitude)).to(dtype).to(DEVICE) for x in (query, key))


def largest_sum(query, key, scale):
    """The largest sum of magnitudes that a score is made of: no score, no rounding of one is larger."""
    return scale * float((query.double().abs() @ key.double().abs().transpose(1, 2)).max())


def ulp(size):
    """The distance of float32 numbers of this size."""
    return 2.0 ** (math.floor(math.log2(size)) - 23)


@triton.jit
def dot_by_order(a, b, upcast: tl.constexpr):
    """Products that come out two ulp greater where the first operand has the more rows."""
    out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.shape[0] > b.shape[1]:
        out *= 1.0000002384185791
    return out


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("magnitude", "scale"), [(1e2, 1.0), (1e6, 0.3)])
def test_weights_of_a_row_add_up_to_one(magnitude, scale, limits):
    tokens, spans, window = LIMITS[limits]
    query, key = drawn(tokens, magnitude)
    ours = dispatch.column_scores(
        query, key, [tokens - 1], AttentionOptions(scale=scale, window=window), spans
    ).double()
    # The scores of both passes are the same. What is rounded is the log-sum-exp, by half an ulp, once more
    # where it is merged from parts; it is kept in units of unscaled products.
    tolerance = math.expm1(scale * ulp(largest_sum(query, key, 1.0))) + EXPONENTIALS
    for start, stop in spans or [(0, tokens)]:
        assert float(ours[start:stop].sum()) == pytest.approx(HEADS, rel=tolerance)


@pytest.mark.parametrize(("by_order", "scale"), [(False, 0.7), (True, 0.3)])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_key_far_above_all_others_gets_all(monkeypatch, by_order, scale, limits):
    """A score far above all others is the log-sum-exp: nothing is rounded, however large it is.

    Also where sums depend on the order of operands, as in BLAS libraries on some processors: both passes have
    to add the very same products.
    """
    if by_order:
        if DEVICE.type != "cpu":
            pytest.skip("only the interpreter looks functions up when it runs")
        monkeypatch.setattr(scores_kernels, "dot", dot_by_order)
    tokens, spans, window = LIMITS[limits]
    query, key = drawn(tokens, 1e6)
    best = [stop - 3 for _, stop in spans or [(0, tokens)]]
    query = query[:1] * torch.linspace(1, 2, HEADS, device=DEVICE)[:, None, None]
    key[:, best] = query[0] * 100
    ours = dispatch.column_scores(
        query, key, [tokens - 1], AttentionOptions(scale=scale, window=window), spans
    )
    want = torch.zeros(tokens).index_fill_(0, torch.tensor(best), HEADS)
    torch.testing.assert_close(ours.cpu(), want, rtol=EXPONENTIALS, atol=EXPONENTIALS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limits", LIMITS)
def test_of_16_bit_vectors(dtype, limits):
    tokens, spans, window = LIMITS[limits]
    query, key = drawn(tokens, 1e3, dtype)
    ours = dispatch.column_scores(
        query, key, [tokens - 1], AttentionOptions(scale=0.3, window=window), spans
    ).double()
    # Products of two such numbers are exact in float32. Sums of them may be taken in another order by either
    # pass: each is off by DIM roundings of at most half an ulp of what it is made of.
    tolerance = math.expm1(0.3 * (DIM + 1) * ulp(largest_sum(query, key, 1.0))) + EXPONENTIALS
    for start, stop in spans or [(0, tokens)]:
        assert float(ours[start:stop].sum()) == pytest.approx(HEADS, rel=tolerance)
