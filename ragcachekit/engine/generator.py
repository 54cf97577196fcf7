"""From plans to answers: one forward, the generate loop, the reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ragcachekit.cancellation import CancelScope
from ragcachekit.engine.prompt_planner import PromptPlanner
from ragcachekit.engine.shadow import Shadow
from ragcachekit.forward.linked_prompt import LinkedPrompt
from ragcachekit.generate.answer import answer_of, filled_options
from ragcachekit.generate.options import links_ahead
from ragcachekit.generate.replan import Replan
from ragcachekit.generate.run import Generated, link_ahead, run_generate
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy, SelectionPolicy
from ragcachekit.reports import Answer


class Answered(NamedTuple):
    """Answers to the prompts of one batch, and the results of generating them."""

    answers: list[Answer]
    generated: Generated


class Linked(NamedTuple):
    """A prompt linked for another generate call, and its plan as it ran."""

    prompt: LinkedPrompt
    plan: LinkPlan


class Generator:
    """Runs planned prompts on one model."""

    def __init__(self, model: Any, rope: Rope, prompts: PromptPlanner, shadow: Shadow) -> None:
        self._model, self._rope, self._prompts, self._shadow = model, rope, prompts, shadow

    def answer(
        self,
        plans: Sequence[LinkPlan],
        begun: float,
        options: Mapping[str, Any],
        stop: Sequence[str],
        cancel: threading.Event | None,
        replan: Replan,
        own: bool = False,
    ) -> Answered:
        """Answer prompts in one left-padded batch; several only if :meth:`share_a_forward` allows.

        ``begun`` is when they came, in seconds of :func:`time.perf_counter`. The other parameters are those
        of :func:`~ragcachekit.generate.run.run_generate`.
        """
        if stop:
            _ = self._prompts.tokens  # stop strings are text
        pad, decode, longest = self._prompts.pad, self._prompts.decode, max(len(p.token_ids) for p in plans)
        options = filled_options(options, longest, pad=pad, context=self._prompts.context)
        first = self._shadow.draw(len(plans), options)
        generated = run_generate(
            self._model,
            self._rope,
            plans,
            options,
            pad=pad,
            cancel=cancel,
            stop=stop,
            decode=decode,
            first=first,
            own=own,
            replan=replan,
        )
        answers = [answer_of(generated, i, begun, stop, options, decode) for i in range(len(plans))]
        if generated.prefilled:
            with CancelScope(cancel):
                self._shadow.follow(plans, answers, first, options, stop)
        return Answered(answers, generated)

    def link(self, plan: LinkPlan, replan: Replan) -> Linked:
        """Link a prompt for another generate call."""
        begun, looked_up = time.perf_counter(), plan.report.load_ms
        inputs, plan = link_ahead(self._model, self._rope, plan, self._prompts.pad, replan)
        report = replace(plan.report, link_ms=looked_up + (time.perf_counter() - begun) * 1e3)
        return Linked(LinkedPrompt(inputs, report), plan)

    def share_a_forward(self, policy: SelectionPolicy, options: Mapping[str, Any]) -> bool:
        """Whether several prompts can be answered in one batch.

        Not where frequencies depend on the length (a batch uses those of the longest prompt), nor where the
        rows differ by layer.
        """
        ahead = links_ahead(options, self._model.generation_config)
        return not (ahead or isinstance(policy, LayerwisePolicy) or self._rope.depends_on_length)
