"""Hooks into one call of generate: first logits and first token, cancellation, stop strings, the streamer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ragcachekit.cancellation import CancelScope
from ragcachekit.generate.detokenizer import OrderedPrompt


class FirstScores(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that records the first token's distribution and changes nothing.

    It runs after the requested processors (penalties), before temperature and the cuts of sampling.
    ``log_probs`` is ``[vocab]`` float64 on the host, None before and where it is not ``wanted``; ``at`` is
    when the prefill ended, None before.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self.log_probs: torch.Tensor | None = None
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            scores[:, :1].tolist()  # waits for the device: nothing is there before that
            self.at = time.perf_counter()
            if self._wanted:
                self.log_probs = scores[0].detach().float().cpu().double().log_softmax(-1)
        return scores


class ScoreObserver(LogitsProcessor):  # type: ignore[misc]
    """Base of logits processors that read the scores, after penalties and before cuts, and change nothing.

    The last of the ids that it is called with is the token before; the others may be missing.
    """


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that records when the first token came and stops cancelled requests.

    From the first token on it replaces cancellation between layers, so that no token is lost.
    """

    def __init__(self, scope: CancelScope) -> None:
        self.first: float | None = None
        self.cancelled = False
        self._scope = scope

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first is None:
            input_ids[:, -1].tolist()  # waits for the device: the token is not there before that
            self.first = time.perf_counter()
            self._scope.between_layers = False
        self.cancelled = self._scope.requested
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose new text, after ``prompt`` columns, contains a stop string.

    Not transformers' own ``stop_strings``, which fails on word-level tokenizers and reads the prompt, which
    may be permuted here.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], prompt: int) -> None:
        self._stop, self._decode, self._prompt = tuple(stop), decode, prompt
        # A character is at most four byte tokens; the rest is slack for tokens without text.
        self._window = 4 * max(map(len, self._stop), default=0) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        start = max(self._prompt, input_ids.shape[1] - self._window)
        done = [self.end(row) for row in input_ids[:, start:].tolist()]
        return torch.tensor(done, device=input_ids.device)

    def end(self, ids: Sequence[int]) -> bool:
        """Whether the last of these new ids complete a stop string."""
        text = self._decode(ids[-self._window :]) if self._stop else ""
        return any(stop in text for stop in self._stop)


class Hooks:
    """Our stopping criteria, logits processors and streamer, beside the user's."""

    def __init__(
        self,
        options: Mapping[str, Any],
        prompt: Sequence[int],
        scope: CancelScope,
        first: FirstScores | None,
        stop: Sequence[str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.watch = _Watch(scope)
        self._first, self._stop, self._decode = first or FirstScores(wanted=False), stop, decode
        given = options.get("streamer")
        self.streamer = OrderedPrompt(given, prompt) if given else None
        self._options = {
            **options,
            "logits_processor": [*(options.get("logits_processor") or ()), self._first],
            "streamer": self.streamer,
        }

    def options(self, prompt: int) -> dict[str, Any]:
        """Arguments of generate for a prompt of ``prompt`` columns, with these hooks among them."""
        criteria = [*self._options.get("stopping_criteria", ()), self.watch]
        if self._stop:
            criteria.append(StopStrings(self._stop, self._decode, prompt))
        return {**self._options, "stopping_criteria": criteria}

    def prefill(self, begun: float) -> float | None:
        """Seconds from ``begun``, when generate was called, to the first logits; None if there were none."""
        return None if self._first.at is None else self._first.at - begun
