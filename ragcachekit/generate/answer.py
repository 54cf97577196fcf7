"""Generate options with their defaults, and answers from what generate returned."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from ragcachekit.config import WHOLE, check_number, check_type
from ragcachekit.generate.detokenizer import cut_at_stop
from ragcachekit.generate.run import Generated
from ragcachekit.reports import Answer, GenerateReport

DEFAULT_NEW_TOKENS = 256
_LIMITS = {"max_new_tokens", "max_length", "max_time", "generation_config"}


def filled_options(options: Mapping[str, Any], tokens: int, *, pad: int, context: int) -> dict[str, Any]:
    """Add what generate needs for a prompt of ``tokens`` tokens; given options stay.

    Of ``max_new_tokens`` and ``max_length``, the one that leaves less room counts.
    ValueError if there is nothing to generate, TypeError for a limit that is no number.
    """
    options = {k: v for k, v in options.items() if v is not None or k not in (*_LIMITS, "max_tokens")}
    if "max_tokens" in options:
        if "max_new_tokens" in options:
            raise ValueError("max_tokens is another name of max_new_tokens; give one of them")
        options["max_new_tokens"] = options.pop("max_tokens")
    check_type("seed", options.get("seed"), (Integral, type(None)), WHOLE)
    for name in ("max_new_tokens", "max_length"):
        check_type(name, options.get(name, 1), Integral, f"{WHOLE} of tokens")
    check_number("max_time", options.get("max_time", 1))
    if "generation_config" in options:
        # Into a copy: transformers does not want other arguments beside a configuration.
        options["generation_config"] = config = copy.deepcopy(options["generation_config"])
        if config.pad_token_id is None:
            config.pad_token_id = pad
    else:
        options = {"pad_token_id": pad, **options}
    if not _LIMITS & options.keys():
        options["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, context - tokens)
    if "max_length" in options:
        room = options.pop("max_length") - tokens
        options["max_new_tokens"] = min(options.get("max_new_tokens", room), room)
    if options.get("max_new_tokens", 1) < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {options['max_new_tokens']}")
    return options


def answer_of(
    generated: Generated,
    begun: float,
    stop: Sequence[str],
    options: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
) -> Answer:
    """The answer to a prompt; ``begun`` in seconds of :func:`time.perf_counter`."""
    ids = generated.token_ids
    text, stopped = cut_at_stop(decode(ids), stop)
    ended = stopped or len(ids) < options.get("max_new_tokens", len(ids) + 1) or generated.ended
    report = GenerateReport(
        replace(generated.report, link_ms=(generated.linked - begun) * 1e3),
        len(ids),
        ttft_ms=(generated.first_token - begun) * 1e3,
        total_ms=(time.perf_counter() - begun) * 1e3,
        finish_reason="cancelled" if generated.cancelled else "stop" if ended else "length",
    )
    return Answer(text, ids, report)
