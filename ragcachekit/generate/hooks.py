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


class _FirstLogits(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that changes nothing and notes in ``at`` when the prefill ended.

    Choosing a token, stopping criteria and streamers come later.
    """

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            scores[:, :1].tolist()  # waits for the device: nothing is there before that
            self.at = time.perf_counter()
        return scores


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that notes when the first token came and stops cancelled requests.

    From the first token on it takes cancelling over from the layers, so that no token is lost.
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


class _StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose new text, behind ``prompt`` columns, holds one of the stop strings.

    Not transformers' own ``stop_strings``: that one fails on word-level tokenizers (it needs to write
    "abcdef" with the vocabulary), and reads the prompt, which may be permuted here.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], prompt: int) -> None:
        self._stop, self._decode, self._prompt = tuple(stop), decode, prompt
        # A character is at most four byte tokens; the rest is slack for tokens without text.
        self._window = 4 * max(map(len, self._stop)) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        start = max(self._prompt, input_ids.shape[1] - self._window)
        texts = [self._decode(row) for row in input_ids[:, start:].tolist()]
        done = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(done, device=input_ids.device)


class Hooks:
    """Our stopping criteria, logits processors and streamer, beside the user's.

    Attributes
    ----------
    watch : StoppingCriteria
        ``first``: when the first token came; ``cancelled``: whether the request was.
    streamer : OrderedPrompt or None
        None where the user gave none. It is told ``prompt`` first.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        prompt: Sequence[int],
        scope: CancelScope,
        first: FirstScores | None,
    ) -> None:
        self.watch = _Watch(scope)
        self._logits = _FirstLogits()
        given = options.get("streamer")
        self.streamer = OrderedPrompt(given, prompt) if given else None
        ours = [self._logits] if first is None else [self._logits, first]
        self._options = {
            **options,
            "logits_processor": [*(options.get("logits_processor") or ()), *ours],
            "streamer": self.streamer,
        }

    def options(
        self, stop: Sequence[str], decode: Callable[[Sequence[int]], str] | None, prompt: int
    ) -> dict[str, Any]:
        """Arguments of generate for a prompt of so many columns, with these hooks among them."""
        criteria = [*self._options.get("stopping_criteria", ()), self.watch]
        if stop and decode is not None:
            criteria.append(_StopStrings(stop, decode, prompt))
        return {**self._options, "stopping_criteria": criteria}

    def prefill(self, begun: float) -> float | None:
        """Seconds from ``begun``, when generate was called, to the first logits; None if there were none.

        What the user's streamer did with the prompt is not counted: generate hands it over before the
        forward. It gets tokens after the logits, and other code of the user's never runs in a prefill
        that is measured (it is linked ahead).
        """
        if self._logits.at is None:
            return None
        given = self.streamer.given if self.streamer is not None else 0.0
        return self._logits.at - max(begun, given)
