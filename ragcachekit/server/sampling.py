"""How a request's tokens are chosen: its parameters as options of generate, and OpenAI's penalties."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from ragcachekit.server.errors import invalid
from ragcachekit.server.schemas import Completion

MIN_TEMPERATURE = 1e-3
"""Below this, decoding is greedy: logits divided by it would overflow."""


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties: a token loses ``frequency`` each time it was generated, and ``presence`` once.

    ``bias`` is added to the scores of token ids. For one answer.
    """

    def __init__(self, frequency: float, presence: float, bias: dict[int, float]) -> None:
        self._frequency, self._presence, self._bias = frequency, presence, bias
        self._prompt: int | None = None  # tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        new, given = input_ids[0, self._prompt :], scores
        scores = given.clone()
        scores[0, new] = given[0, new] - self._presence
        scores[0].index_add_(0, new, given.new_full(new.shape, -self._frequency))
        for token, bias in self._bias.items():
            scores[0, token] += bias
        return scores


def penalties(body: Completion, vocab_size: int) -> list[Penalties]:
    """A request's processor for one answer, if it needs one; ApiError 400 for ids that are not tokens."""
    bias = body.logit_bias or {}
    if not all(0 <= token < vocab_size for token in bias):
        raise invalid(f"Invalid 'logit_bias': its keys are token ids below {vocab_size}.", "logit_bias")
    frequency, presence = body.frequency_penalty or 0.0, body.presence_penalty or 0.0
    return [Penalties(frequency, presence, bias)] if frequency or presence or bias else []


def sampling_options(body: Completion, max_new_tokens: int) -> dict[str, Any]:
    """Options of generate for the choice of tokens; the model's own where the request says nothing."""
    if body.min_tokens and body.min_tokens > max_new_tokens:
        raise invalid(f"Invalid 'min_tokens': an answer has at most {max_new_tokens} tokens.", "min_tokens")
    given = {"repetition_penalty": body.repetition_penalty, "min_new_tokens": body.min_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if body.temperature is not None and body.temperature < MIN_TEMPERATURE:
        return {**options, "do_sample": False}
    if body.seed is not None:
        options["seed"] = body.seed
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    if sampling := {name: value for name, value in sampling.items() if value is not None}:
        options |= {"do_sample": True, "top_k": 0, "temperature": 1.0, "top_p": 1.0, **sampling}
        options["top_k"] = max(options["top_k"], 0)  # -1 is none, too
    return options
