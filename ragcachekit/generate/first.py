"""What is known when the model has said something about the first token of an answer: what, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class FirstScores(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that changes nothing and remembers the first token's distribution.

    It sees scores after the processors that were asked for (penalties), before temperature and the
    cuts of sampling. It makes nothing of the ids, so it may run on a permuted prompt.

    Parameters
    ----------
    items : sequence of int
        Which prompts of the batch are of interest.

    Attributes
    ----------
    log_probs : dict of int to torch.Tensor
        Per item ``[vocab]`` float64 in host memory; empty before the first token.
    """

    def __init__(self, items: Sequence[int] = (0,)) -> None:
        self.items = tuple(items)
        self.log_probs: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores``, as they came."""
        if not self.log_probs:
            rows = scores[list(self.items)].detach().float().cpu().double().log_softmax(-1)
            self.log_probs = dict(zip(self.items, rows, strict=True))
        return scores


class FirstLogits(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that changes nothing and notes when the first token's logits were there.

    Which is when the prefill ended: choosing a token, stopping criteria and streamers come later.

    Attributes
    ----------
    at : float or None
        On the clock of :func:`time.perf_counter`; None before the first token.
    """

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores``, as they came."""
        if self.at is None:
            scores[:, :1].tolist()  # waits for the device: nothing is there before that
            self.at = time.perf_counter()
        return scores
