"""Run the ordinary ``model.generate`` on linked prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.cancellation import CancelScope
from ragcachekit.errors import Cancelled
from ragcachekit.forward.cache import LinkedCache
from ragcachekit.forward.linker import link, run_rows
from ragcachekit.forward.narrowing import Narrowing, attach
from ragcachekit.forward.own_rows import OwnRows, own_entries
from ragcachekit.forward.scoring_pass import choose
from ragcachekit.generate.hooks import FirstScores, Hooks
from ragcachekit.generate.options import effective, end_tokens, links_ahead, without_refused_defaults
from ragcachekit.generate.replan import Replan, replanned, timed
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.reports import LinkReport
from ragcachekit.store.loading.load import LoadFailed


@dataclass(frozen=True)
class Generated:
    """What generating answers to the prompts of one batch returned.

    - ``token_ids``, ``ended``: New token ids per prompt, without padding, and whether they end with an end
      token; empty for a request that was cancelled before its first token.
    - ``first_token``, ``linked``: When the first token came, and when the cache would have been assembled,
      had it been before the forward; in seconds of :func:`time.perf_counter`.
    - ``plans``, ``reports``: The plans that ran in the end, and their reports.
    - ``prefill``: Seconds of the forward alone, without loads, where known.
    - ``cache``: The prompts' cache, unless there are several beams; their rows end before column ``width``.
    - ``own``: What was observed of entries that this prefill computed.
    """

    token_ids: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    first_token: float
    linked: float
    cancelled: bool
    plans: tuple[LinkPlan, ...]
    reports: tuple[LinkReport, ...]
    prefill: float | None = None
    cache: Any = None
    width: int = 0
    own: OwnRows | None = None


def run_generate(
    model: Any,
    rope: Rope,
    plans: Sequence[LinkPlan],
    options: Mapping[str, Any],
    *,
    pad: int,
    decode: Callable[[Sequence[int]], str],
    cancel: threading.Event | None = None,
    stop: Sequence[str] = (),
    first: FirstScores | None = None,
    own: bool = False,
    replan: Replan | None = None,
    whole: bool = False,
) -> Generated:
    """Generate after linked prompts: one link each, left-padded to one batch.

    ``options`` go to generate; ``decode`` is needed for ``stop`` strings. ``replan`` plans a prompt again
    whose entries could not be loaded. ``own`` observes rows of missing chunks, as they are to be stored.
    ``whole`` returns a cache with all rows, whatever the model drops outside its windows.
    ``cancel``, or a scope around the call, ends the prefill between two layers and the answer between two
    tokens.
    """
    # Phi-3's generate drops the cache and runs all ids again where its frequencies change: in order.
    ahead = rope.depends_on_length or links_ahead(options, model.generation_config)
    if ahead and len(plans) > 1:
        raise ValueError("these options need one prompt at a time")
    options = without_refused_defaults(options, model.generation_config)
    beams = effective(options, model.generation_config, "num_beams") or 1
    with CancelScope(cancel) as scope:
        hooks = Hooks(options, plans[0].token_ids, scope, first, stop, decode)
        while True:
            try:
                linked = _linked(model, rope, plans, ahead, beams, pad, own, whole)
                return _generated(model, linked, hooks, beams)
            except Cancelled:
                return _cancelled(plans, hooks)
            except LoadFailed as failed:
                # Before the first token: nothing but the streamer has seen anything of this attempt.
                plans = replanned(plans, failed, replan)
                if hooks.streamer is not None:
                    hooks.streamer.restart()


def _cancelled(plans: Sequence[LinkPlan], hooks: Hooks) -> Generated:
    if hooks.streamer is not None:
        hooks.streamer.end()
    now, count = time.perf_counter(), len(plans)
    reports = tuple(plan.report for plan in plans)
    return Generated(((),) * count, (False,) * count, now, now, True, tuple(plans), reports)


def _generated(model: Any, linked: _Linked, hooks: Hooks, beams: int) -> Generated:
    inputs, cache = linked.inputs, linked.inputs.get("past_key_values")
    prompt = inputs["input_ids"].shape[1]
    options = hooks.options(prompt)
    begun, before = time.perf_counter(), getattr(cache, "settling", 0.0)
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    ends = end_tokens(options, model.generation_config)
    rows = [_trim(row, ends) for row in output[:, prompt:].tolist()]
    settling, prefill = getattr(cache, "settling", 0.0) - before, hooks.prefill(begun)
    return Generated(
        tuple(rows),
        tuple(bool(row) and row[-1] in ends for row in rows),
        hooks.watch.first if hooks.watch.first is not None else time.perf_counter(),
        begun + settling,
        hooks.watch.cancelled,
        linked.plans,
        linked.reports(),
        prefill - settling if linked.plain and prefill is not None else None,
        cache if beams == 1 else None,
        prompt,
        linked.own,
    )


@dataclass(frozen=True, eq=False)
class _Linked:
    """Arguments of generate, and the plans as they run."""

    inputs: dict[str, Any]
    plans: tuple[LinkPlan, ...]
    narrowing: Narrowing | None = None
    ahead: bool = False
    own: OwnRows | None = None

    @property
    def plain(self) -> bool:
        """Whether generate's prefill runs just the rows of one plan, through all layers."""
        return len(self.plans) == 1 and self.narrowing is None and not self.ahead

    def reports(self) -> tuple[LinkReport, ...]:
        plans = self.plans if self.narrowing is None else (self.narrowing.link_plan(),)
        return tuple(_told(timed(plan), self.inputs.get("past_key_values")) for plan in plans)


def _linked(
    model: Any,
    rope: Rope,
    plans: Sequence[LinkPlan],
    ahead: bool,
    beams: int,
    pad: int,
    observe: bool,
    whole: bool,
) -> _Linked:
    # Where the knowledge tree captures an ordinary prefill, too.
    whole = beams == 1 and (whole or any(plan.beginning is not None for plan in plans))
    if ahead:
        inputs, plan = _ahead(model, rope, plans[0], pad, repeats=beams)
        return _Linked(_whole(inputs, whole), (plan,), ahead=True)
    chosen = [choose(model, rope, plan, pad) for plan in plans]
    plans = tuple(plan for plan, _ in chosen)
    items = own_entries(plans[0]) if observe and len(plans) == beams == 1 else ()
    own = OwnRows(plans[0], items) if items else None
    if not any(plan.pieces and (plan.kept or plan.policy) for plan in plans):
        inputs = _plain(plans, model.device, pad)
        if own is not None:
            inputs["past_key_values"] = own.cache()
        return _Linked(_whole(inputs, whole), plans, own=own)
    if len(plans) > 1:
        return _Linked(link(plans, rope, model.device, pad).as_kwargs(), plans)
    linked = link(plans, rope, model.device, pad, buffers=chosen[0][1], observer=own)
    return _Linked(linked.as_kwargs(), plans, attach(model, plans[0], linked.cache), own=own)


def _whole(inputs: dict[str, Any], whole: bool) -> dict[str, Any]:
    """If ``whole``, use a cache that keeps all rows; the default one drops those outside sliding windows."""
    return {"past_key_values": DynamicCache(), **inputs} if whole else inputs


def _plain(plans: Sequence[LinkPlan], device: torch.device, pad: int) -> dict[str, Any]:
    width = max(len(plan.token_ids) for plan in plans)
    ids = torch.full((len(plans), width), pad)
    mask = torch.zeros(len(plans), width, dtype=torch.long)
    for item, plan in enumerate(plans):
        ids[item, width - len(plan.token_ids) :] = torch.tensor(plan.token_ids)
        mask[item, width - len(plan.token_ids) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def link_ahead(
    model: Any, rope: Rope, plan: LinkPlan, pad: int, replan: Replan | None = None
) -> tuple[dict[str, Any], LinkPlan]:
    """Run the linked forward now, over all tokens but the last; the ids are returned in order.

    Costs one more pass over the weights than linking inside generate, and works with every option for a
    pre-filled cache. Returns the arguments of generate and the plan as it ran.
    """
    while True:
        try:
            inputs, done = _ahead(model, rope, plan, pad)
            return inputs, replace(done, report=_told(timed(done), inputs.get("past_key_values")))
        except LoadFailed as failed:
            (plan,) = replanned([plan], failed, replan)


@torch.no_grad()
def _ahead(
    model: Any, rope: Rope, plan: LinkPlan, pad: int, repeats: int = 1
) -> tuple[dict[str, Any], LinkPlan]:
    plan, buffers = choose(model, rope, plan, pad)
    # Rows that are cut inside the forward are those of the whole prompt, as in one pass.
    ahead = plan if isinstance(plan.policy, LayerwisePolicy) else plan.without_last()
    if not (ahead.pieces and (ahead.kept or ahead.policy)):
        return _plain([plan], model.device, pad), plan
    inputs = link([ahead], rope, model.device, pad, buffers=buffers)
    narrowing = attach(model, ahead, inputs.cache)
    if model.device.type != "cpu":
        inputs.cache.forward = "eager: linked ahead of generate"
    if ahead.rows:
        run_rows(model, inputs, len(ahead.rows))
    inputs.cache.settle()  # without rows no layer did; and a failed load cannot be replanned later
    if ahead is plan:
        inputs.cache.crop(-1)
    if repeats > 1:
        inputs.cache.batch_repeat_interleave(repeats)
    ids = torch.tensor([plan.token_ids], device=model.device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": inputs.cache}
    return arguments, plan if narrowing is None else narrowing.link_plan()


def _told(report: LinkReport, cache: Any) -> LinkReport:
    if not isinstance(cache, LinkedCache):
        return report
    return replace(report, forward=cache.forward, kernels=cache.kernels)


def _trim(ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Cut the padding after a finished sequence; the end token itself stays."""
    for at, token in enumerate(ids):
        if token in ends:
            return tuple(ids[: at + 1])
    return tuple(ids)
