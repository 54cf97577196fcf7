"""From plans to answers: linking, the generate loop, the reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ragcachekit.config import QueueConfig
from ragcachekit.forward.linked_prompt import LinkedPrompt
from ragcachekit.generate.batch import BatchDecoder
from ragcachekit.generate.options import check_options, filled_options
from ragcachekit.generate.run import Generated, Replan, link_ahead, run_generate
from ragcachekit.generate.streams import cut_at_stop
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.reports import Answer, GenerateReport


class Linked(NamedTuple):
    """A prompt linked for another generate call, and its plan as it ran."""

    prompt: LinkedPrompt
    plan: LinkPlan


class Generator:
    """Runs planned prompts on one model.

    ``run`` is :func:`~ragcachekit.generate.run.run_generate` on it.
    """

    def __init__(self, model: Any, rope: Rope, parser: PromptParser, context: int) -> None:
        self.model, self.rope, self._parser, self._context = model, rope, parser, context
        self.run = partial(run_generate, model, rope, decode=parser.decode)

    def batch_decoder(self, config: QueueConfig) -> BatchDecoder:
        """A batch of requests on this model."""
        nbytes, device = config.batch_bytes, self.model.device
        if nbytes is None:
            nbytes = torch.cuda.mem_get_info(device)[0] // 10 if device.type == "cuda" else 2 << 30
        return BatchDecoder(
            self.model,
            self.rope,
            decode=self._parser.decode,
            max_batch=config.max_batch,
            max_bytes=nbytes,
        )

    def check_options(self, options: Mapping[str, Any], *arguments: str) -> None:
        """Refuse options that could only fail later, by :func:`.check_options`."""
        check_options(options, self.model, ("namespace", "policy", "tools", "stop", *arguments))

    def options(self, options: Mapping[str, Any], tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        """The options of generate for a prompt of ``tokens``; ValueError or TypeError for bad ones."""
        if stop:
            _ = self._parser.tokens  # stop strings are text
        return filled_options(options, tokens, pad=self._parser.pad, context=self._context)

    def answer(
        self, generated: Generated, begun: float, options: Mapping[str, Any], stop: Sequence[str]
    ) -> Answer:
        """The answer with its report; ``begun`` in seconds of :func:`time.perf_counter`."""
        return answer_of(generated, begun, stop, options, self._parser.decode)

    def link(self, plan: LinkPlan, replan: Replan) -> Linked:
        """Link a prompt for another generate call."""
        begun, looked_up = time.perf_counter(), plan.report.load_ms
        inputs, plan = link_ahead(self.model, self.rope, plan, replan)
        report = replace(plan.report, link_ms=looked_up + (time.perf_counter() - begun) * 1e3)
        return Linked(LinkedPrompt(inputs, report), plan)


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
