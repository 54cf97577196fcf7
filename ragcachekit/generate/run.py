"""Run the ordinary ``model.generate`` on linked prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.generate.first import FirstScores
from ragcachekit.generate.options import Way, way_in, without_refused_defaults
from ragcachekit.generate.stopping import StopStrings, Watch
from ragcachekit.generate.streaming import OrderedPrompt
from ragcachekit.link.base import LayerwisePolicy
from ragcachekit.link.choose import choose
from ragcachekit.link.linker import link, run_rows
from ragcachekit.link.narrow import Narrowing, attach
from ragcachekit.link.plan import LinkPlan
from ragcachekit.model.rope import Rope
from ragcachekit.types import LinkReport


@dataclass(frozen=True)
class Generated:
    """New token ids per prompt (padding after the end removed) and whether they end with an end token.

    ``first_token`` is on the clock of :func:`time.perf_counter`; ``linked`` likewise, when the
    cache was assembled. ``reports`` are the plans' own, after everything was decided.
    """

    token_ids: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    first_token: float
    linked: float
    cancelled: bool
    reports: tuple[LinkReport, ...]


def run_generate(
    model: Any,
    rope: Rope,
    plans: Sequence[LinkPlan],
    options: Mapping[str, Any],
    *,
    pad: int,
    cancel: threading.Event | None = None,
    stop: Sequence[str] = (),
    decode: Callable[[Sequence[int]], str] | None = None,
    first: FirstScores | None = None,
) -> Generated:
    """Generate after linked prompts: one link each, left-padded to one batch.

    A batch that keeps nothing is an ordinary call of generate. Everything in ``options`` goes to
    generate as it is. ``stop`` strings are looked for in the new tokens' text, for which ``decode`` is
    needed. ``first`` hears the first token's distribution.
    """
    way = way_in(options, model.generation_config)
    if rope.depends_on_length:
        # Phi-3's generate drops the cache and runs all ids again where its frequencies change: in order.
        way = Way.AHEAD
    if way is Way.AHEAD and len(plans) > 1:
        raise ValueError("these options need one prompt at a time")
    options = without_refused_defaults(options, model.generation_config)
    watch = Watch(cancel)
    options["stopping_criteria"] = [*options.get("stopping_criteria", ()), watch]
    if first is not None:
        options["logits_processor"] = [*(options.get("logits_processor") or ()), first]
    if streamer := options.get("streamer"):
        options["streamer"] = OrderedPrompt(streamer, plans[0].token_ids)
    beams = _effective(model, options, "num_beams") or 1
    linked_plans = _linked(model, rope, plans, way, beams, pad)
    inputs = linked_plans.inputs
    if stop and decode is not None:
        stops = StopStrings(stop, decode, inputs["input_ids"].shape[1])
        options["stopping_criteria"] = [*options["stopping_criteria"], stops]
    linked = time.perf_counter()
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    prompt = inputs["input_ids"].shape[1]
    ends = _ends(model, options)
    rows = [_trim(row, ends) for row in output[:, prompt:].tolist()]
    return Generated(
        tuple(rows),
        tuple(bool(row) and row[-1] in ends for row in rows),
        watch.first if watch.first is not None else time.perf_counter(),
        linked,
        watch.cancelled,
        linked_plans.reports(),
    )


@dataclass(frozen=True, eq=False)
class _Linked:
    """Arguments of generate, and the plans that became of the given ones."""

    inputs: dict[str, Any]
    plans: tuple[LinkPlan, ...]
    narrowing: Narrowing | None = None

    def reports(self) -> tuple[LinkReport, ...]:
        """After the linked forward."""
        plans = self.plans if self.narrowing is None else (self.narrowing.decided(),)
        return tuple(plan.report for plan in plans)


def _linked(model: Any, rope: Rope, plans: Sequence[LinkPlan], way: Way, beams: int, pad: int) -> _Linked:
    if way is Way.AHEAD:
        inputs, plan = link_ahead(model, rope, plans[0], pad, repeats=beams)
        return _Linked(inputs, (plan,))
    chosen = [choose(model, rope, plan, pad) for plan in plans]
    plans = tuple(plan for plan, _ in chosen)
    if not any(plan.pieces and (plan.kept or plan.policy) for plan in plans):
        return _Linked(_plain(plans, model.device, pad), plans)
    linked = link(plans, rope, model.device, pad, buffers=chosen[0][1] if len(plans) == 1 else None)
    narrowing = attach(model, plans[0], linked.cache) if len(plans) == 1 else None
    return _Linked(linked.as_kwargs(), plans, narrowing)


def _plain(plans: Sequence[LinkPlan], device: torch.device, pad: int) -> dict[str, Any]:
    width = max(len(plan.token_ids) for plan in plans)
    ids = torch.full((len(plans), width), pad)
    mask = torch.zeros(len(plans), width, dtype=torch.long)
    for item, plan in enumerate(plans):
        ids[item, width - len(plan.token_ids) :] = torch.tensor(plan.token_ids)
        mask[item, width - len(plan.token_ids) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def link_ahead(
    model: Any, rope: Rope, plan: LinkPlan, pad: int, repeats: int = 1
) -> tuple[dict[str, Any], LinkPlan]:
    """Run the linked forward now, over all tokens but the last; the ids come back in order.

    Costs one pass over the weights for the last token more than linking inside generate, and works
    with everything that generate offers for a pre-filled cache. Returns the arguments of generate and
    the plan as it was decided.
    """
    plan, buffers = choose(model, rope, plan, pad)
    # Rows that are cut inside the forward are those of the whole prompt, as in one pass.
    ahead = plan if isinstance(plan.policy, LayerwisePolicy) else plan.without_last()
    if not (ahead.pieces and (ahead.kept or ahead.policy)):
        return _plain([plan], model.device, pad), plan
    inputs = link([ahead], rope, model.device, pad, buffers=buffers)
    narrowing = attach(model, ahead, inputs.cache)
    if ahead.rows:
        run_rows(model, inputs, len(ahead.rows))
    if ahead is plan:
        inputs.cache.crop(-1)
    if repeats > 1:
        inputs.cache.batch_repeat_interleave(repeats)
    ids = torch.tensor([plan.token_ids], device=model.device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": inputs.cache}
    return arguments, plan if narrowing is None else narrowing.decided()


def _effective(model: Any, options: Mapping[str, Any], name: str) -> Any:
    config = options.get("generation_config", model.generation_config)
    return options[name] if name in options else getattr(config, name, None)


def _ends(model: Any, options: Mapping[str, Any]) -> frozenset[int]:
    ends = _effective(model, options, "eos_token_id")
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else map(int, ends))


def _trim(ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Cut the padding that follows a finished sequence in a batch; the end token itself stays."""
    for at, token in enumerate(ids):
        if token in ends:
            return tuple(ids[: at + 1])
    return tuple(ids)
