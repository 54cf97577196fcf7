"""Operations that a captured forward must not contain are found by running it once."""

from __future__ import annotations

import pytest
import torch

from ragcachekit.forward.cuda_graphs.capture import RefuseWaits
from ragcachekit.forward.cuda_graphs.captured_cache import NotCapturable

X, WHOLE = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([2, 0, 1])
META = torch.empty(3, device="meta")


class TestRefuseWaits:
    @pytest.mark.parametrize(
        "work",
        [
            lambda: X[0].item(),
            lambda: bool(X.any()),
            lambda: X.nonzero(),
            lambda: torch.where(X > 0),
            lambda: X[X > 0],
            lambda: X.masked_select(X > 0),
            lambda: X.clone().index_put_((X > 0,), X[:2]),
            lambda: X[None].clone().index_put_((WHOLE[:1] * 0, X[:1] > 0), torch.tensor(1.0)),
            lambda: X.unique(),
            lambda: torch.unique_consecutive(X),
            lambda: WHOLE.bincount(),
            lambda: torch.repeat_interleave(X, WHOLE),
            lambda: torch.equal(X, X),
            lambda: X.to("meta"),
            lambda: META.copy_(X),
            lambda: torch.ops.aten.lift_fresh(META),
        ],
    )
    def test_refused(self, work):
        with pytest.raises(NotCapturable, match=r"its forward .*\(aten\."), RefuseWaits():
            work()

    @pytest.mark.parametrize(
        "work",
        [
            lambda: X[WHOLE],
            lambda: X.index_select(0, WHOLE),
            lambda: X.clone().index_put_((WHOLE,), X),
            lambda: X.clone().index_put_((X > 0,), torch.tensor(1.0)),
            lambda: X.masked_fill(X > 0, 1.0),
            lambda: torch.where(X > 0, X, 0.0),
            lambda: torch.repeat_interleave(X, WHOLE, output_size=3),
            lambda: X.repeat_interleave(2),
            lambda: X.to(torch.float64),
            lambda: X.clone().copy_(X.double()),
            lambda: X.topk(2),
            lambda: torch.arange(3).cumsum(0).split([1, 2]),
            lambda: torch.nn.functional.scaled_dot_product_attention(*[X.view(1, 1, 3, 1)] * 3),
        ],
    )
    def test_let_through(self, work):
        expected = work()
        with RefuseWaits():
            out = work()
        torch.testing.assert_close(out, expected)
