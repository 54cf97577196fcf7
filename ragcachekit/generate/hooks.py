"""Hooks into one call of generate: the decoding loop, the first scores, cancellation, stop strings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import MaxLengthCriteria

from ragcachekit.cancellation import CancelScope


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


class FirstTokenTimer(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that records when the first token came and stops cancelled requests.

    From the first token on it replaces cancellation between layers, so that no token is lost.
    """

    def __init__(self, scope: CancelScope) -> None:
        self.first_token: float | None = None
        self.cancelled = False
        self._scope = scope

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first_token is None:
            input_ids[:, -1].tolist()  # waits for the device: the token is not there before that
            self.first_token = time.perf_counter()
            self._scope.between_layers = False
        self.cancelled = self._scope.requested
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose new text, after ``prompt`` columns, contains a stop string.

    Not transformers' own ``stop_strings``, which fails on word-level tokenizers and reads the prompt, too.
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


class DecodingLoop:
    """transformers' own decoding loop, with the prompt's ids in order; generate's ``custom_generate``.

    A linked prefill gets the ids permuted. Logits processors, stopping criteria and the streamer get them as
    they are in the prompt, so every option of transformers that reads ids works. ``one_token`` ends the loop
    after the first token.

    Attributes
    ----------
    processors, criteria, config
        As generate prepared them from the request's options; None before the loop began.
    """

    def __init__(self, prompt: Sequence[int], timer: FirstTokenTimer, streamer: Any, one_token: bool) -> None:
        self._prompt, self._timer, self._streamer = prompt, timer, streamer
        self._one_token, self._prompt_given = one_token, False
        self.processors: LogitsProcessorList | None = None
        self.criteria: StoppingCriteriaList | None = None
        self.config: GenerationConfig | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        self.processors, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        prompt = torch.tensor([list(self._prompt)])
        if self._streamer is not None and not self._prompt_given:  # once, also where generate begins again
            self._prompt_given = True
            self._streamer.put(prompt)
        in_order, columns = prompt.to(input_ids.device), input_ids.shape[1]

        def ordered(ids: torch.Tensor) -> torch.Tensor:
            return torch.cat([in_order, ids[:, columns:]], -1)

        ends = [MaxLengthCriteria(columns + 1)] if self._one_token else [_Ordered(stopping_criteria, ordered)]
        streamer = None if self._streamer is None else _WithoutEnd(self._streamer, self._one_token)
        return model._sample(
            input_ids,
            LogitsProcessorList([_Ordered(logits_processor, ordered)]),
            StoppingCriteriaList([self._timer, *ends]),
            generation_config,
            streamer=streamer,
            **model_kwargs,
        )


class _Ordered:
    """A list of processors or criteria that is called with the ids in order."""

    def __init__(
        self, inner: Callable[..., torch.Tensor], order: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._inner, self._order = inner, order

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return self._inner(self._order(input_ids), scores)


class _WithoutEnd:
    """Passes tokens on and, if the request ``goes_on`` after generate, not the end."""

    def __init__(self, inner: Any, goes_on: bool) -> None:
        self._inner, self._goes_on = inner, goes_on

    def put(self, value: torch.Tensor) -> None:
        self._inner.put(value)

    def end(self) -> None:
        if not self._goes_on:
            self._inner.end()
