"""How one engine answers prompts: the policy that counts now, a plan, one forward, what follows behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragcachekit.config import ShadowConfig
from ragcachekit.generate.answer import answer_of, filled_options
from ragcachekit.generate.options import Way, way_in
from ragcachekit.generate.run import link_ahead, run_generate
from ragcachekit.link.base import LayerwisePolicy, SelectionPolicy
from ragcachekit.link.budgets import Budgets, Chosen
from ragcachekit.link.linked import LinkedPrompt
from ragcachekit.link.planned import LinkPlan
from ragcachekit.link.policies import open_policy
from ragcachekit.link.request import PromptRequest
from ragcachekit.model.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.model.rope import Rope
from ragcachekit.prepare import PromptLike
from ragcachekit.reports import Answer
from ragcachekit.shadow import Shadow, shadow_config
from ragcachekit.stock import Stock
from ragcachekit.types import KVKey


class Answerer:
    """Takes prompts from what is in stock to answers, and begins what is to happen behind these.

    Parameters
    ----------
    model, shadow
        As :class:`ragcachekit.RagCache` takes them.
    policy : SelectionPolicy
        What counts for prompts that bring no policy of their own.
    stock : Stock
    rope : Rope
    fingerprint : str
    folder : Path
        Where calibrated budgets are looked up.

    Attributes
    ----------
    shadow : Shadow
        Answers some of the prompts again.
    """

    def __init__(
        self,
        model: Any,
        policy: SelectionPolicy,
        stock: Stock,
        *,
        rope: Rope,
        fingerprint: str,
        folder: Path,
        shadow: float | ShadowConfig | None,
    ) -> None:
        self._model, self._policy, self._stock, self._rope = model, policy, stock, rope
        self._prompts = prompts = stock.prompts
        self._budgets = Budgets(folder, fingerprint, prompts.encodings(open_policy("full")).name)
        self.shadow = Shadow(
            shadow_config(shadow),
            model,
            rope,
            pad=prompts.pad,
            decode=prompts.decode,
            unchanged=prompts.unchanged,
        )

    def policy(self, space: str) -> str:
        """Name of the policy of prompts that bring none; warns once if its budget is not calibrated here."""
        return self._budgets.resolve(self._policy, space).label

    def chosen(self, policy: str | SelectionPolicy | None, space: str) -> Chosen:
        """What counts for a prompt now: a concrete policy, ``full`` while shadow mode advises against it."""
        chosen = self._budgets.resolve(self._policy if policy is None else open_policy(policy), space)
        why = self.shadow.fallback(space) if chosen.policy.reads_cache else None
        return chosen if why is None else Chosen(open_policy("full"), "full", fallback=why)

    def plan(self, prompt: PromptLike, space: str, policy: str | SelectionPolicy | None) -> LinkPlan:
        """What of a prompt is there and what is to compute.

        Raises
        ------
        ValueError, TypeError, PromptTooLong
            As :meth:`ragcachekit.prepare.Preparer.plan`.
        """
        epoch, chosen = self._stock.forgets.now(), self.chosen(policy, space)
        request = self._prompts.request(prompt, space, chosen.policy, epoch)
        return self.replan(
            replace(
                request,
                label=chosen.label,
                notes=(*request.notes, *chosen.notes),
                fallback=request.fallback or chosen.fallback,
            )
        )

    def replan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The plan of a request, without some entries."""
        return self._stock.noted(self._prompts.plan(request, without))

    def link(self, prompt: PromptLike, space: str, policy: str | SelectionPolicy | None) -> LinkedPrompt:
        """Link a prompt for somebody else's generate call."""
        plan = self.plan(prompt, space, policy)
        begun, looked_up = time.perf_counter(), plan.report.load_ms
        inputs, plan = link_ahead(self._model, self._rope, plan, self._prompts.pad, self.replan)
        report = replace(plan.report, link_ms=looked_up + (time.perf_counter() - begun) * 1e3)
        self._stock.after_link(plan)
        return LinkedPrompt(inputs, report)

    def answer(
        self,
        prompts: Sequence[PromptLike],
        space: str,
        policy: str | SelectionPolicy | None,
        options: Mapping[str, Any],
        stop: Sequence[str],
        cancel: threading.Event | None = None,
    ) -> list[Answer]:
        """Answer prompts in one left-padded batch, which :meth:`share_a_forward` must allow for several.

        ``options``, ``stop`` and ``cancel`` are those of :meth:`ragcachekit.RagCache.generate`.

        Raises
        ------
        PromptTooLong, GenerationNotSupported
        Cancelled
            If a scope around the call was cancelled. With ``cancel`` alone, what there is comes back.
        """
        raise_if_cancelled()
        begun = time.perf_counter()
        plans = [self.plan(prompt, space, policy) for prompt in prompts]
        if stop:
            _ = self._prompts.tokens  # stop strings are text
        pad, decode, longest = self._prompts.pad, self._prompts.decode, max(len(p.token_ids) for p in plans)
        options = filled_options(options, longest, pad=pad, context=self._prompts.context)
        first = self.shadow.draw(len(plans), options)
        model = self._model, self._rope
        generated = run_generate(
            *model,
            plans,
            options,
            pad=pad,
            cancel=cancel,
            stop=stop,
            decode=decode,
            first=first,
            replan=self.replan,
        )
        answers = [answer_of(generated, i, begun, stop, options, decode) for i in range(len(plans))]
        if generated.prefilled:
            with CancelScope(cancel):
                self.shadow.follow(plans, answers, first, options, stop)
                self._stock.after(generated)
        raise_if_cancelled()
        return answers

    def share_a_forward(
        self, space: str, policy: str | SelectionPolicy | None, options: Mapping[str, Any]
    ) -> bool:
        """Whether several prompts can be answered in one batch.

        In a batch all prompts turn by the longest one's frequencies, so there chunk KV would not fit where
        these depend on the length; and its rows must be the same ones in every layer.
        """
        ahead = way_in(options, self._model.generation_config) is Way.AHEAD
        layerwise = isinstance(self.chosen(policy, space).policy, LayerwisePolicy)
        return not (ahead or layerwise or self._rope.depends_on_length)
