"""How one request of a batch chooses its tokens: as generate would under the same options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragcachekit.generate.options import REFUSED, effective, end_tokens, only_observes

COLDEST = 1e-6  # what is drawn below does not differ, and 1 / temperature overflows
DEFAULT_TOP_K = 50  # of generate, where neither options nor model say otherwise

_DECODED = {
    *("do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("max_new_tokens", "max_time", "eos_token_id", "pad_token_id", "bos_token_id", "streamer", "use_cache"),
}
# What greedy decoding and sampling do not read, whatever its value.
_UNREAD = {
    *("max_length", "transformers_version", "_from_model_config", "decoder_start_token_id"),
    *("length_penalty", "early_stopping", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "is_assistant"),
    *("max_matching_ngram_size", "compile_config", "disable_compile", "max_cache_len", "cache_config"),
}
_ONE_IS_NONE = {
    *("typical_p", "encoder_repetition_penalty", "num_beams", "num_beam_groups"),
    *("num_return_sequences", "guidance_scale"),
}


def not_decoded(options: Mapping[str, Any], defaults: Any) -> str | None:
    """Name of an option, over the generation config ``defaults``, that a batch cannot follow, or None."""
    # Names of its own in a model's config are read by nobody.
    known = vars(GenerationConfig()).keys() - options.keys() - REFUSED.keys()
    given: dict[str, Any] = {name: getattr(defaults, name, None) for name in known} | dict(options)
    for name, value in given.items():
        if name not in _DECODED | _UNREAD and _says_something(name, value) and not only_observes(name, value):
            return name
    return None if effective(options, defaults, "max_new_tokens") else "an answer without max_new_tokens"


def _says_something(name: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, int | float) and value == 0):
        return False
    if isinstance(value, str | list | tuple | dict) and not value:
        return False
    return not (name in _ONE_IS_NONE and isinstance(value, int | float) and value == 1)


@dataclass(frozen=True)
class Sampling:
    """Limits and processors of one request, from options that :func:`not_decoded` does not name.

    ``max_time`` is in seconds. ``reads_ids``: whether a processor reads the tokens so far.
    """

    max_new_tokens: int
    max_time: float | None
    ends: frozenset[int]
    draws: bool
    processors: LogitsProcessorList
    reads_ids: bool
    generator: torch.Generator | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], defaults: Any, device: torch.device) -> Sampling:
        """Settings of generate with ``options`` over the model's generation config ``defaults``."""
        processors, penalty = LogitsProcessorList(), effective(options, defaults, "repetition_penalty")
        if reads_ids := penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        processors.extend(options.get("logits_processor") or ())
        if draws := bool(effective(options, defaults, "do_sample")):
            processors.extend(_cuts(options, defaults))
        return cls(
            effective(options, defaults, "max_new_tokens"),
            effective(options, defaults, "max_time"),
            end_tokens(options, defaults),
            draws,
            processors,
            reads_ids,
            # Not the seed itself, from which generate has drawn the first token.
            None if (seed := options.get("seed")) is None else torch.Generator(device).manual_seed(seed ^ 1),
        )

    def choose(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The next token ``[1]`` after ``ids``, out of ``logits`` ``[1, vocab]`` in float32."""
        read = torch.tensor([ids if self.reads_ids else ids[-1:]], device=logits.device)
        scores: torch.Tensor = self.processors(read, logits)
        if self.draws:
            return torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[0]
        return scores.argmax(-1)


class _Temperature:
    """Divides the distances from the row's largest logit, so that none of them overflows upwards."""

    def __init__(self, temperature: float) -> None:
        self._temperature = max(temperature, COLDEST)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (scores - scores.amax(-1, keepdim=True)) / self._temperature


def _cuts(options: Mapping[str, Any], defaults: Any) -> list[Any]:
    """The processors of sampling, in generate's order."""
    names = ("temperature", "top_k", "top_p", "min_p")
    temperature, top_k, top_p, min_p = (effective(options, defaults, name) for name in names)
    if top_k is None and "top_k" not in options:
        top_k = DEFAULT_TOP_K
    cuts: list[Any] = []
    if temperature not in (None, 1.0):
        cuts.append(_Temperature(temperature))
    if top_k:
        cuts.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        cuts.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        cuts.append(MinPLogitsWarper(min_p))
    return cuts
