"""Run the ordinary ``model.generate`` on a linked prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ragcachekit.store.load import LoadFailed


@dataclass(frozen=True)
class Generated:
    """What generating the answer to a prompt returned.

    - ``token_ids``, ``ended``: New token ids, and whether they end with an end token; empty for a request
      that was cancelled before its first token.
    - ``first_token``, ``linked``: When the first token came, and when the cache would have been assembled,
      had it been before the forward; in seconds of :func:`time.perf_counter`.
    - ``plan``, ``report``: The plan that ran in the end, and its report.
    - ``prefill``: Seconds of the forward alone, without loads, where known.
    - ``cache``: The prompt's cache, unless there are several beams.
    - ``own``: What was observed of entries that this prefill computed.
    """

    token_ids: tuple[int, ...]
    ended: bool
    first_token: float
    linked: float
    cancelled: bool
    plan: LinkPlan
    report: LinkReport
    prefill: float | None = None
    cache: Any = None
    own: OwnRows | None = None


def run_generate(
    model: Any,
    rope: Rope,
    plan: LinkPlan,
    options: Mapping[str, Any],
    *,
    decode: Callable[[Sequence[int]], str],
    cancel: threading.Event | None = None,
    stop: Sequence[str] = (),
    first: FirstScores | None = None,
    own: bool = False,
    replan: Replan | None = None,
    whole: bool = False,
) -> Generated:
    """Generate after a linked prompt.

    ``options`` go to generate, ``seed`` to its sampling. ``decode`` is needed for ``stop`` strings.
    ``replan`` plans the prompt again if entries could not be loaded. ``own`` observes rows of missing chunks,
    as they are to be stored. ``whole`` returns a cache with all rows, whatever the model drops outside its
    windows.
    ``cancel``, or a scope around the call, ends the prefill between two layers and the answer between two
    tokens.
    """
    # Phi-3's generate drops the cache and runs all ids again where its frequencies change: in order.
    ahead = rope.depends_on_length or links_ahead(options, model.generation_config)
    options = without_refused_defaults(options, model.generation_config)
    seed = options.pop("seed", None)
    beams = effective(options, model.generation_config, "num_beams") or 1
    with CancelScope(cancel) as scope:
        hooks = Hooks(options, plan.token_ids, scope, first, stop, decode)
        while True:
            try:
                linked = _linked(model, rope, plan, ahead, beams, own, whole)
                with _seeded(model, seed):
                    return _generated(model, linked, hooks, beams)
            except Cancelled:
                return _cancelled(plan, hooks)
            except LoadFailed as failed:
                # Before the first token: nothing but the streamer has seen anything of this attempt.
                plan = replanned(plan, failed, replan)
                if hooks.streamer is not None:
                    hooks.streamer.restart()


@contextmanager
def _seeded(model: Any, seed: int | None) -> Iterator[None]:
    """Draw from random numbers of their own, where a seed is given."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _cancelled(plan: LinkPlan, hooks: Hooks) -> Generated:
    if hooks.streamer is not None:
        hooks.streamer.end()
    now = time.perf_counter()
    return Generated((), False, now, now, True, plan, plan.report)


def _generated(model: Any, linked: _Linked, hooks: Hooks, beams: int) -> Generated:
    inputs, cache = linked.inputs, linked.inputs.get("past_key_values")
    prompt = inputs["input_ids"].shape[1]
    options = hooks.options(prompt)
    begun, before = time.perf_counter(), getattr(cache, "settling", 0.0)
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    ends = end_tokens(options, model.generation_config)
    ids = _trim(output[0, prompt:].tolist(), ends)
    settling, prefill = getattr(cache, "settling", 0.0) - before, hooks.prefill(begun)
    return Generated(
        ids,
        bool(ids) and ids[-1] in ends,
        hooks.watch.first if hooks.watch.first is not None else time.perf_counter(),
        begun + settling,
        hooks.watch.cancelled,
        linked.plan,
        linked.report(),
        prefill - settling if linked.plain and prefill is not None else None,
        cache if beams == 1 else None,
        linked.own,
    )


@dataclass(frozen=True, eq=False)
class _Linked:
    """Arguments of generate, and the plan as it runs."""

    inputs: dict[str, Any]
    plan: LinkPlan
    narrowing: Narrowing | None = None
    ahead: bool = False
    own: OwnRows | None = None

    @property
    def plain(self) -> bool:
        """Whether generate's prefill runs just the rows of the plan, through all layers."""
        return self.narrowing is None and not self.ahead

    def report(self) -> LinkReport:
        plan = self.plan if self.narrowing is None else self.narrowing.link_plan()
        return _told(timed(plan), self.inputs.get("past_key_values"))


def _linked(
    model: Any,
    rope: Rope,
    plan: LinkPlan,
    ahead: bool,
    beams: int,
    observe: bool,
    whole: bool,
) -> _Linked:
    # Where the knowledge tree captures an ordinary prefill, too.
    whole = beams == 1 and (whole or plan.beginning is not None)
    if ahead:
        inputs, plan = _ahead(model, rope, plan, repeats=beams)
        return _Linked(_whole(inputs, whole), plan, ahead=True)
    plan, buffers = choose(model, rope, plan)
    items = own_entries(plan) if observe and beams == 1 else ()
    own = OwnRows(plan, items) if items else None
    if not (plan.pieces and (plan.kept or plan.policy)):
        inputs = _plain(plan, model.device)
        if own is not None:
            inputs["past_key_values"] = own.cache()
        return _Linked(_whole(inputs, whole), plan, own=own)
    linked = link(plan, rope, model.device, buffers=buffers, observer=own)
    return _Linked(linked.as_kwargs(), plan, attach(model, plan, linked.cache), own=own)


def _whole(inputs: dict[str, Any], whole: bool) -> dict[str, Any]:
    """If ``whole``, use a cache that keeps all rows; the default one drops those outside sliding windows."""
    return {"past_key_values": DynamicCache(), **inputs} if whole else inputs


def _plain(plan: LinkPlan, device: torch.device) -> dict[str, Any]:
    ids = torch.tensor([plan.token_ids], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def link_ahead(
    model: Any, rope: Rope, plan: LinkPlan, replan: Replan | None = None
) -> tuple[dict[str, Any], LinkPlan]:
    """Run the linked forward now, over all tokens but the last; the ids are returned in order.

    Costs one more pass over the weights than linking inside generate, and works with every option for a
    pre-filled cache. Returns the arguments of generate and the plan as it ran.
    """
    while True:
        try:
            inputs, done = _ahead(model, rope, plan)
            return inputs, replace(done, report=_told(timed(done), inputs.get("past_key_values")))
        except LoadFailed as failed:
            plan = replanned(plan, failed, replan)


@torch.no_grad()
def _ahead(model: Any, rope: Rope, plan: LinkPlan, repeats: int = 1) -> tuple[dict[str, Any], LinkPlan]:
    plan, buffers = choose(model, rope, plan)
    # Rows that are cut inside the forward are those of the whole prompt, as in one pass.
    ahead = plan if isinstance(plan.policy, LayerwisePolicy) else plan.without_last()
    if not (ahead.pieces and (ahead.kept or ahead.policy)):
        return _plain(plan, model.device), plan
    inputs = link(ahead, rope, model.device, buffers=buffers)
    narrowing = attach(model, ahead, inputs.cache)
    if ahead.rows:
        run_rows(model, inputs, len(ahead.rows))
    inputs.cache.settle()  # without rows no layer did; and a failed load cannot be replanned later
    if ahead is plan:
        inputs.cache.crop(-1)
    if repeats > 1:
        inputs.cache.batch_repeat_interleave(repeats)
    arguments = {**_plain(plan, model.device), "past_key_values": inputs.cache}
    return arguments, plan if narrowing is None else narrowing.link_plan()


def _told(report: LinkReport, cache: Any) -> LinkReport:
    if not isinstance(cache, LinkedCache):
        return report
    return replace(report, kernels=cache.kernels)


def _trim(ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Cut the padding after a finished beam; the end token itself stays."""
    for at, token in enumerate(ids):
        if token in ends:
            return tuple(ids[: at + 1])
    return tuple(ids)
