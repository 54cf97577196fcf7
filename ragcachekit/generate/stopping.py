"""Hooks into the generate loop: cancellation between tokens, stop strings, and when the first token came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from ragcachekit.model.cancellation import CancelScope


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Called after each token: notes the time of the first, stops when the request's scope is cancelled.

    From the first token on it takes this over from the layers, so that no token is lost.

    It makes nothing of the ids, so it may run on a permuted prompt.
    """

    def __init__(self, scope: CancelScope) -> None:
        self.first: float | None = None
        self.cancelled = False
        self._scope = scope

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``[batch]`` booleans: whether each sequence is done."""
        if self.first is None:
            input_ids[:, -1].tolist()  # waits for the device: the token is not there before that
            self.first = time.perf_counter()
            self._scope.between_layers = False
        self.cancelled = self._scope.requested
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose new text holds one of the stop strings.

    Not transformers' own ``stop_strings``: that one fails on word-level tokenizers (it needs to write
    "abcdef" with the vocabulary), and reads the prompt, which may be permuted here.

    Parameters
    ----------
    stop : sequence of str
    decode : callable
        Token ids to text.
    prompt : int
        Columns of the prompt, which are not looked at.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], prompt: int) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._prompt = prompt
        # A character is at most four byte tokens; the rest is slack for tokens without text.
        self._window = 4 * max(map(len, self._stop)) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """``[batch]`` booleans: whether each sequence is done."""
        start = max(self._prompt, input_ids.shape[1] - self._window)
        texts = [self._decode(row) for row in input_ids[:, start:].tolist()]
        done = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(done, device=input_ids.device)
