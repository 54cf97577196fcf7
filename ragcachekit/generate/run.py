"""Run transformers' ``model.generate`` on a linked prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from ragcachekit.cancellation import CancelScope
from ragcachekit.errors import Cancelled
from ragcachekit.forward.cache import LinkedCache
from ragcachekit.forward.linker import link, run_rows
from ragcachekit.forward.narrowing import Narrowing, attach
from ragcachekit.forward.own_rows import OwnRows, own_entries
from ragcachekit.forward.scoring_pass import choose
from ragcachekit.generate.hooks import DecodingLoop, FirstScores, FirstTokenTimer, StopStrings
from ragcachekit.generate.options import (
    effective,
    end_tokens,
    links_ahead,
    uses_beams,
    without_refused_defaults,
)
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.reports import LinkReport
from ragcachekit.store.loader import LoadFailed
from ragcachekit.types import KVKey

Replan = Callable[[PromptRequest, frozenset[KVKey]], LinkPlan]
"""Plans a request once more without some entries."""


@dataclass(frozen=True, eq=False)
class TokenChoice:
    """How the next tokens of a request are chosen, as generate prepared it from the request's options.

    ``generator`` goes on where the first token's draw ended; None: torch's global one.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    generator: torch.Generator | None = None


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
    - ``choice``: How to choose further tokens; None after several beams or a cancelled prefill.
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
    choice: TokenChoice | None = None


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
    capture_missing_rows: bool = False,
    replan: Replan | None = None,
    whole: bool = False,
    one_token: bool = False,
) -> Generated:
    """Generate after a linked prompt.

    ``options`` go to generate, ``seed`` to its sampling. ``decode`` is needed for ``stop`` strings.
    ``replan`` plans the prompt again if entries could not be loaded. ``capture_missing_rows`` observes rows
    of missing chunks, as they are to be stored. ``whole`` returns a cache with all rows, whatever the model
    drops outside its windows. ``one_token`` returns after the first token, for a batch that goes on.
    ``cancel``, or a scope around the call, ends the prefill between two layers and the answer between two
    tokens.
    """
    defaults = model.generation_config
    # Phi-3's generate drops the cache and runs all ids again where its frequencies change: in order.
    ahead = rope.depends_on_length or links_ahead(options, defaults)
    beams = (effective(options, defaults, "num_beams") or 1) if uses_beams(options, defaults) else 1
    options = _with_stop_strings(without_refused_defaults(options, defaults), defaults)
    seed, streamer = options.pop("seed", None), options.pop("streamer", None)
    with CancelScope(cancel) as scope:
        timer, first = FirstTokenTimer(scope), first or FirstScores(wanted=False)
        loop = None if beams > 1 else DecodingLoop(plan.token_ids, timer, streamer, one_token)
        options["logits_processor"] = [*(options.get("logits_processor") or ()), first]
        while True:
            try:
                linked = _linked(model, rope, plan, ahead, beams, capture_missing_rows, whole)
                with _seeded(model, seed) as random:
                    return _generated(model, linked, options, timer, loop, stop, decode, first, random)
            except Cancelled:
                if streamer is not None and not one_token:  # else the batch ends it
                    streamer.end()
                now = time.perf_counter()
                return Generated((), False, now, now, True, plan, plan.report)
            except LoadFailed as failed:  # before the first token: nobody has seen anything of this attempt
                plan = replanned(plan, failed, replan)


def _with_stop_strings(options: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """``stop_strings`` as the criterion that generate makes of them: it gives our loop no tokenizer."""
    strings, tokenizer = effective(options, defaults, "stop_strings"), options.get("tokenizer")
    if not strings or tokenizer is None:
        return options
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    if (config := options.get("generation_config")) is not None:
        config.stop_strings = None  # a copy: of filled_options
    return {
        **{name: value for name, value in options.items() if name not in ("stop_strings", "tokenizer")},
        "stopping_criteria": [*(options.get("stopping_criteria") or ()), criterion],
    }


@contextmanager
def _seeded(model: Any, seed: int | None) -> Iterator[Callable[[], torch.Generator | None]]:
    """Draw from random numbers of their own, where a seed is given; yields what gives a copy of them."""
    if seed is None:
        yield lambda: None
        return
    device = model.device if model.device.type == "cuda" else torch.device("cpu")

    def copied() -> torch.Generator:
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return torch.Generator(device).set_state(state)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield copied


def _generated(
    model: Any,
    linked: _Linked,
    options: Mapping[str, Any],
    timer: FirstTokenTimer,
    loop: DecodingLoop | None,
    stop: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    first: FirstScores,
    random: Callable[[], torch.Generator | None],
) -> Generated:
    inputs, cache = linked.inputs, linked.inputs.get("past_key_values")
    prompt = inputs["input_ids"].shape[1]
    criteria = [*(options.get("stopping_criteria") or ())]
    criteria += [StopStrings(stop, decode, prompt)] if stop else []
    criteria += [timer] if loop is None else []
    options = {**options, "stopping_criteria": StoppingCriteriaList(criteria), "custom_generate": loop}
    begun, before = time.perf_counter(), getattr(cache, "settling", 0.0)
    with torch.no_grad():
        output = model.generate(**inputs, **options)
    ends = end_tokens(options, model.generation_config)
    ids = _trim(output[0, prompt:].tolist(), ends)
    settling = getattr(cache, "settling", 0.0) - before
    prefill = first.at - begun - settling if linked.plain and first.at is not None else None
    return Generated(
        ids,
        bool(ids) and ids[-1] in ends,
        timer.first_token if timer.first_token is not None else time.perf_counter(),
        begun + settling,
        timer.cancelled,
        linked.plan,
        linked.report(),
        prefill,
        cache if loop is not None else None,
        linked.own,
        None if loop is None else TokenChoice(loop.processors, loop.criteria, loop.config, random()),
    )


def _trim(ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Cut the padding after a finished beam; the end token itself stays."""
    for at, token in enumerate(ids):
        if token in ends:
            return tuple(ids[: at + 1])
    return tuple(ids)


# -- linking -------------------------------------------------------------------------------------------


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
        return _with_forward(timed(plan), self.inputs.get("past_key_values"))


def _linked(
    model: Any, rope: Rope, plan: LinkPlan, ahead: bool, beams: int, capture: bool, whole: bool
) -> _Linked:
    # Where the knowledge tree captures an ordinary prefill, too.
    whole = beams == 1 and (whole or plan.prefix_match is not None)
    if ahead:
        inputs, plan = _run_ahead(model, rope, plan, repeats=beams)
        return _Linked(_whole(inputs, whole), plan, ahead=True)
    plan, buffers = choose(model, rope, plan)
    items = own_entries(plan) if capture and beams == 1 else ()
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
            inputs, done = _run_ahead(model, rope, plan)
            return inputs, replace(done, report=_with_forward(timed(done), inputs.get("past_key_values")))
        except LoadFailed as failed:
            plan = replanned(plan, failed, replan)


@torch.no_grad()
def _run_ahead(model: Any, rope: Rope, plan: LinkPlan, repeats: int = 1) -> tuple[dict[str, Any], LinkPlan]:
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


# -- reports -------------------------------------------------------------------------------------------


def replanned(plan: LinkPlan, failed: LoadFailed, replan: Replan | None) -> LinkPlan:
    """The plan without what failed or was lost; its report notes it and counts the time waited."""
    lost = {load.key: load for load in plan.loads if load.key in failed.keys or load.lost is not None}
    assert lost, "nothing else would come of it"
    assert plan.request is not None, "loads are begun by plans of requests"
    assert replan is not None, "plans with loads need replan="
    why = "; ".join(dict.fromkeys(load.lost or str(failed) for load in lost.values()))
    note = f"{len(lost)} of its entries could not be loaded ({why}): their rows were computed"
    waited = plan.request.waited_ms + sum(load.waited for load in lost.values()) * 1e3
    request = replace(plan.request, notes=(*plan.request.notes, note), waited_ms=waited)
    return replan(request, plan.without | lost.keys())


def timed(plan: LinkPlan) -> LinkReport:
    """The plan's report with what its loads took, once no load is waited for any more."""
    report, loads = plan.report, plan.loads
    if not loads:
        return report
    own: dict[KVKey, float] = {load.key: load.waited for load in loads}
    wait_ms = report.wait_ms + sum(own.values()) * 1e3
    # Waking up takes time too: a wait can end later than the load.
    load_ms = max(report.load_ms + _covered(load.span for load in loads) * 1e3, wait_ms)
    return replace(report, load_ms=load_ms, wait_ms=wait_ms)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans ran."""
    total, end = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total


def _with_forward(report: LinkReport, cache: Any) -> LinkReport:
    if not isinstance(cache, LinkedCache):
        return report
    return replace(report, kernels=cache.kernels)
