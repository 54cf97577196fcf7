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
    """OpenAI's: a token loses ``frequency`` each time it was generated, ``presence`` once; for one answer."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._prompt: int | None = None  # tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        new, given = input_ids[0, self._prompt :], scores
        scores = given.clone()
        scores[0, new] = given[0, new] - self._presence
        scores[0].index_add_(0, new, given.new_full(new.shape, -self._frequency))
        return scores


def sampling_options(body: Completion, max_new_tokens: int, vocab_size: int) -> dict[str, Any]:
    """Options of generate for the choice of tokens; the model's own where the request says nothing."""
    if body.min_tokens and body.min_tokens > max_new_tokens:
        raise invalid(f"Invalid 'min_tokens': an answer has at most {max_new_tokens} tokens.", "min_tokens")
    if not all(0 <= token < vocab_size for token in body.logit_bias or ()):
        raise invalid(f"Invalid 'logit_bias': its keys are token ids below {vocab_size}.", "logit_bias")
    given = {"repetition_penalty": body.repetition_penalty, "min_new_tokens": body.min_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if body.logit_bias:
        options["sequence_bias"] = {(token,): float(bias) for token, bias in body.logit_bias.items()}
    if body.temperature is not None and body.temperature < MIN_TEMPERATURE:
        return {**options, "do_sample": False}
    if body.seed is not None:
        options["seed"] = body.seed
    sampling = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    if sampling := {name: value for name, value in sampling.items() if value is not None}:
        options |= {"do_sample": True, "top_k": 0, "temperature": 1.0, "top_p": 1.0, **sampling}
        options["top_k"] = max(options["top_k"], 0)  # -1 is none, too
    return options
