"""The linked prefill: rows are selected by a scoring pass, linked, and cut from layer to layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ragcachekit.errors import LinkedPromptUsed, ModelNotSupported
from ragcachekit.forward.linker import (
    LinkedCache,
    LinkedLayer,
    LinkRows,
    MakeLayer,
    Projected,
    assemble,
    link,
    own_entries,
)
from ragcachekit.forward.rows import OwnRows, continue_snapshot
from ragcachekit.model.kv import ChunkKV, decoder_of
from ragcachekit.model.rope import Rope
from ragcachekit.model.snapshots import CACHE_ARGUMENTS, PAST
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest, apply_selection, plain_plan
from ragcachekit.plan.prefix_match import PrefixMatch
from ragcachekit.policies.base import (
    AttentionObserver,
    GuidedPolicy,
    LayerwisePolicy,
    RowTracker,
    TrackingPolicy,
)
from ragcachekit.reports import LinkReport
from ragcachekit.store.loader import LoadFailed
from ragcachekit.types import KVKey
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, Spans, column_scores, kv_deviation

Replan = Callable[[PromptRequest, frozenset[KVKey]], LinkPlan]
"""Plans a request once more without some entries."""

_HOOKING = threading.Lock()


@dataclass(frozen=True, eq=False)
class Prefill:
    """Arguments of generate that complete a linked prompt, and the plan as it runs.

    ``own`` observes the missing entries that this prefill computes.
    """

    inputs: dict[str, Any]
    plan: LinkPlan
    own: OwnRows | None = None
    narrowing: Narrowing | None = None
    snapshots: tuple[ChunkKV, ...] = ()  # of the steps that it ran ahead, of models that are not linked
    known: int = 0  # first tokens of the ids that generate must not be given

    def report(self) -> LinkReport:
        """The report, once the forward has run."""
        plan = self.plan if self.narrowing is None else self.narrowing.link_plan()
        report, linked = timed(plan), self.inputs.get("past_key_values")
        return replace(report, kernels=linked.kernels) if isinstance(linked, LinkedCache) else report


def prepare(model: Any, rope: Rope, plan: LinkPlan, *, capture: bool = False, whole: bool = False) -> Prefill:
    """Select the rows of a prompt and link it, for generate to run them as its prefill.

    ``capture`` observes rows of missing entries. ``whole`` gives prompts that reuse nothing a cache that
    keeps all rows; the default one drops those outside sliding windows.
    """
    if (match := plan.prefix_match) is not None and match.snapshots is not None:
        return _after_snapshot(model, plan, match)
    plan, buffers = choose(model, rope, plan)
    items = own_entries(plan) if capture and plan.missing else ()
    own = OwnRows(plan, items) if items else None
    if _reuses(plan):
        linked = link(plan, rope, model.device, buffers=buffers, observer=own)
        narrowing = attach(model, plan, linked.cache)
        return Prefill(linked.as_kwargs(), plan, own, narrowing)
    inputs = _whole_prompt(plan, model.device)
    if own is not None or whole:
        inputs["past_key_values"] = own.cache() if own is not None else DynamicCache()
    return Prefill(inputs, plan, own)


@torch.no_grad()
def prepare_ahead(
    model: Any, rope: Rope, plan: LinkPlan, *, repeats: int = 1, whole: bool = False
) -> Prefill:
    """Run the linked forward now, over all tokens but the last; generate gets the ids in order.

    Costs one more pass over the weights than :func:`prepare`, and works with every option for a pre-filled
    cache. ``repeats`` is the number of beams.
    """
    if (match := plan.prefix_match) is not None and match.snapshots is not None:
        if repeats == 1:
            return _after_snapshot(model, plan, match, ahead=True)
        assert plan.request is not None
        why = "several beams do not go on from a snapshot"
        return Prefill(_whole_prompt(plan, model.device), plain_plan(replace(plan.request, fallback=why)))
    plan, buffers = choose(model, rope, plan)
    # Rows that are cut inside the forward are those of the whole prompt, as in one pass.
    ahead = plan if isinstance(plan.policy, LayerwisePolicy) else plan.without_last()
    arguments = _whole_prompt(plan, model.device)
    if not _reuses(ahead):
        return Prefill(arguments | ({"past_key_values": DynamicCache()} if whole else {}), plan)
    inputs = link(ahead, rope, model.device, buffers=buffers)
    narrowing = attach(model, ahead, inputs.cache)
    if ahead.rows:
        check_finite(plan, inputs.run(model, len(ahead.rows)))
    inputs.cache.settle()  # without rows no layer did; and a failed load cannot be replanned later
    if ahead is plan:
        inputs.cache.crop(-1)
    if repeats > 1:
        inputs.cache.batch_repeat_interleave(repeats)
    plan = plan if narrowing is None else narrowing.link_plan()
    return Prefill({**arguments, "past_key_values": inputs.cache}, plan)


def _after_snapshot(model: Any, plan: LinkPlan, match: PrefixMatch, *, ahead: bool = False) -> Prefill:
    """A prompt of a model that is not linked; ``ahead``: all tokens but the last are run."""
    inputs = _whole_prompt(plan, model.device)
    ran = continue_snapshot(model, match, inputs["input_ids"], ahead=ahead)
    if ran is None:
        return Prefill(inputs, plan)
    if ran.argument == PAST:
        return Prefill({**inputs, PAST: ran.cache}, plan, None, None, ran.snapshots)
    # Generate leaves out what is in a cache under the usual name alone.
    inputs = {"input_ids": inputs["input_ids"], ran.argument: ran.cache}
    return Prefill(inputs, plan, None, None, ran.snapshots, ran.known)


def _reuses(plan: LinkPlan) -> bool:
    return bool(plan.pieces and (plan.kept or plan.policy))


def _whole_prompt(plan: LinkPlan, device: torch.device) -> dict[str, Any]:
    ids = torch.tensor([plan.token_ids], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class LinkedPrompt:
    """A linked prompt for one call of ``model.generate`` or one loop of your own; it has a ``report``.

    All tokens but the last are in the cache, and the ``input_ids`` ``[1, tokens]`` are in order: everything
    that generate offers for a pre-filled cache works. (``rag.generate`` links inside generate's own prefill
    and saves one pass over the weights.) For several beams or sequences repeat the cache first:
    ``inputs["past_key_values"].batch_repeat_interleave(n)``.
    """

    def __init__(self, inputs: dict[str, Any], report: LinkReport) -> None:
        self._inputs: dict[str, Any] | None = inputs
        self.input_ids: Tensor = inputs["input_ids"]
        self.report = report

    def __repr__(self) -> str:
        return f"LinkedPrompt({self.report})"

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for ``model.generate``.

        LinkedPromptUsed at the second use: the cache holds generated tokens by then.
        """
        if self._inputs is None:
            raise LinkedPromptUsed("this linked prompt was used already; call rag.link(prompt) again")
        inputs, self._inputs = self._inputs, None
        return inputs

    @property
    def cache(self) -> Cache | None:
        """The cache alone, for a loop of your own; None if nothing was reused. Counts as the one use."""
        inputs = self.inputs
        return next((inputs[name] for name in CACHE_ARGUMENTS if name in inputs), None)


def link_ahead(
    model: Any, rope: Rope, plan: LinkPlan, replan: Replan | None = None
) -> tuple[LinkedPrompt, LinkPlan]:
    """Link a prompt for another generate call (:func:`prepare_ahead`); returns the plan as it ran, too."""
    started_at, looked_up = time.perf_counter(), plan.report.load_ms
    while True:
        try:
            prefill = prepare_ahead(model, rope, plan)
            link_ms = looked_up + (time.perf_counter() - started_at) * 1e3
            report = replace(prefill.report(), link_ms=link_ms)
            ids = prefill.inputs["input_ids"][:, prefill.known :]
            return LinkedPrompt({**prefill.inputs, "input_ids": ids}, report), replace(
                prefill.plan, report=report
            )
        except LoadFailed as failed:
            plan = replanned(plan, failed, replan)


def replanned(plan: LinkPlan, failed: LoadFailed, replan: Replan | None) -> LinkPlan:
    """The plan without what failed or was lost; its report notes it and counts the time waited."""
    lost = {load.key: load for load in plan.loads if load.key in failed.keys or load.lost is not None}
    for load in lost.values():
        load.give_up()
    keys = failed.keys | lost.keys()
    assert plan.request is not None, "loads are begun by plans of requests"
    assert replan is not None, "plans with loads need replan="
    why = "; ".join(dict.fromkeys([load.lost or str(failed) for load in lost.values()] or [str(failed)]))
    note = f"{len(keys)} of its entries could not be loaded ({why}): their rows were computed"
    waited = plan.request.waited_ms + sum(load.waited for load in lost.values()) * 1e3
    request = replace(plan.request.with_note(note), waited_ms=waited, retries=plan.request.retries + 1)
    return replan(request, plan.without | keys)


def check_finite(plan: LinkPlan, computed: Tensor) -> None:
    """LoadFailed if what a linked prefill ``computed`` has NaN, as an entry has that a store altered."""
    if plan.pieces and plan.request is not None and computed.isnan().any():
        if keys := plan.request.fetch.drop_nan():
            raise LoadFailed(keys, "NaN")
        raise ValueError("the linked prefill gave NaN")


def timed(plan: LinkPlan) -> LinkReport:
    """The plan's report with what its loads took, once no load is waited for any more."""
    report, loads = plan.report, plan.loads
    if not loads:
        return report
    waits: dict[KVKey, float] = {load.key: load.waited for load in loads}
    wait_ms = report.wait_ms + sum(waits.values()) * 1e3
    seconds, end = 0.0, float("-inf")  # in which at least one of them was read
    for started, ended in sorted(load.span for load in loads):
        seconds += max(0.0, ended - max(started, end))
        end = max(end, ended)
    # Waking up takes time too: a wait can end later than the load.
    return replace(report, load_ms=max(report.load_ms + seconds * 1e3, wait_ms), wait_ms=wait_ms)


# -- the scoring pass of guided policies ---------------------------------------------------------------


class _Done(Exception):
    """Stops the forward after the last watched layer."""


class _Watcher:
    """Sums, per ``wanted`` layer, each key's attention from the question's rows, on the device."""

    def __init__(self, wanted: Sequence[int], spans: Spans | None, question: Sequence[int]) -> None:
        self._wanted, self._spans, self._question = wanted, spans, Rows(tuple(question))
        self._sums: dict[int, Tensor] = {}

    def observe(
        self, layer: int, query: Tensor, key: Tensor, positions: Sequence[int], options: AttentionOptions
    ) -> None:
        if layer in self._wanted:
            rows = query[:, -len(self._question) :]  # the question comes last
            self._sums[layer] = column_scores(rows, key, self._question, options, self._spans).float()
        if layer == max(self._wanted):
            raise _Done

    def attention(self) -> list[Tensor]:
        return list(torch.stack([self._sums[layer] for layer in self._wanted]).cpu())


@torch.no_grad()
def choose(model: Any, rope: Rope, plan: LinkPlan) -> tuple[LinkPlan, Sequence[MakeLayer] | None]:
    """The plan with the rows that its guided policy selects, and its buffers for :func:`link`.

    Rows that are computed anyway run over the linked cache at their real positions, up to the attention
    of the last watched layer. ValueError for a layer that the model does not have. Plans with another
    policy, or none, are returned unchanged.
    """
    policy = plan.policy
    if not isinstance(policy, GuidedPolicy):
        return plan, None
    layers = plan.pieces[0].kv.layers
    wanted = policy.look.layers if policy.look.layers is not None else tuple(range(layers))
    if not wanted or not all(-layers <= layer < layers for layer in wanted):
        raise ValueError(f"policy {policy.name} watches layers {wanted}; the model has {layers}")
    spans = Spans(tuple((c.start, c.stop) for c in plan.placed if not c.is_exact))
    question = plan.question[-policy.look.last :] if policy.look.last else plan.question
    per_chunk = spans if policy.look.per_chunk else None
    watcher = _Watcher([layer % layers for layer in wanted], per_chunk, question)
    buffers = assemble(plan, rope, model.device)
    inputs = link(plan, rope, model.device, buffers=buffers, observer=watcher)
    with suppress(_Done):
        inputs.run(model, len(plan.rows))
    return apply_selection(plan, policy.choose(plan.placed, watcher.attention())), buffers


# -- rows that are cut from layer to layer -------------------------------------------------------------


class Narrowing:
    """The rows of one linked forward of one prompt, layer by layer; those of ``plan`` run through layer 0.

    Before every other decoder layer the policy selects among the recomputed rows (CacheBlend, Cache-Craft).
    The hidden states and positions of the others are cut. Rows that were never cached run through all layers.
    """

    def __init__(self, plan: LinkPlan, policy: LayerwisePolicy, cache: LinkedCache) -> None:
        self._plan = plan
        self._policy: LayerwisePolicy | RowTracker = policy
        self._cache = cache
        self._observer: AttentionObserver | None = None
        if isinstance(policy, TrackingPolicy):
            self._policy = self._observer = policy.track(plan.chunks, plan.question)
        last = len(plan.token_ids) - 1
        cached = {p for chunk in plan.placed for p in range(chunk.start, chunk.stop)}
        self._always = frozenset(plan.rows) - cached | {last}
        self._chosen = [p for p in plan.rows if p not in self._always]
        self._total = len(self._chosen)
        self._rows = plan.rows
        self._slot = {p: i for i, p in enumerate(plan.rows)}
        self._last_cached = int(last in cached and last in plan.rows)
        self._spent = [self._total + self._last_cached]
        self._narrow(0)

    def link_plan(self) -> LinkPlan:
        """The plan after the forward; its ratio counts the rows of each layer."""
        return apply_selection(self._plan, self._chosen, self._spent, len(self._cache.layers))

    def before(self, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """New ``(args, kwargs)`` of decoder layer ``layer``."""
        layers = len(self._cache.layers)
        if args and args[0].dim() != 3:
            raise ModelNotSupported(
                f"{type(module).__name__} does not take hidden states as [batch, rows, width]; a layer-wise "
                "policy cannot cut rows there: use another policy"
            )
        if layer == layers - 1:
            self._cache.before_layer = None  # decoding steps have the same cache
        if self._rows != self._plan.rows:
            # Hidden states are those of the previous layer, positions still those of layer 0.
            now = torch.tensor([self._slot[p] for p in self._rows])
            args, kwargs = _cut((args, kwargs), len(self._plan.rows), now)
        deviation = partial(self._deviation, layer, module, args, kwargs)
        going = set(
            self._policy.narrow(layer, layers, self._chosen, self._total, deviation) if self._chosen else ()
        )
        if not going <= set(self._chosen):
            raise ValueError(f"policy {self._plan.report.policy} chose rows that were not in work")
        index = [i for i, p in enumerate(self._rows) if p in going or p in self._always]
        before, self._rows = len(self._rows), tuple(self._rows[i] for i in index)
        self._chosen = [p for p in self._chosen if p in going]
        self._spent.append(len(self._chosen) + self._last_cached)
        self._narrow(layer)
        return _cut((args, kwargs), before, torch.tensor(index))

    def _narrow(self, layer: int) -> None:
        rows = LinkRows(Rows(self._rows), self._observer)
        for later in self._cache.layers[layer:]:
            later.narrow(rows)

    def _deviation(self, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Tensor:
        linked: LinkedLayer = self._cache.layers[layer]
        at = torch.tensor(self._chosen, device=linked.values.device)
        before = linked.values[0].index_select(1, at)
        linked.narrow(LinkRows(Rows(self._rows), self._observer), projecting=True)
        with suppress(Projected):
            # Not the module itself: that would come through here again.
            module.forward(*args, **kwargs)
        return kv_deviation(before, linked.values[0], self._chosen).cpu()


def attach(model: Any, plan: LinkPlan, cache: LinkedCache) -> Narrowing | None:
    """Have the next forward over ``cache`` cut its rows, if the plan's policy is layer-wise.

    ModelNotSupported if the decoder layers cannot be found, or do not all have KV of their own.
    """
    if not isinstance(plan.policy, LayerwisePolicy) or not plan.rows:
        return None
    layers, kept = getattr(decoder_of(model), "layers", None), len(cache.layers)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != kept:
        count = len(layers) if isinstance(layers, torch.nn.ModuleList) else "no"
        raise ModelNotSupported(
            f"{type(model).__name__} has {count} decoder layers in base_model.layers and {kept} with KV of "
            "their own; a layer-wise policy cannot cut rows there: use another policy"
        )
    # The hooks stay: removing them would change the model during other threads' forwards.
    with _HOOKING:
        for number, layer in enumerate(layers):
            hooks = layer._forward_pre_hooks.values()
            if number and not any(getattr(hook, "func", None) is _before for hook in hooks):
                layer.register_forward_pre_hook(partial(_before, number), with_kwargs=True)
    narrowing = Narrowing(plan, plan.policy, cache)
    cache.before_layer = narrowing.before
    return narrowing


def _before(layer: int, module: torch.nn.Module, args: Any, kwargs: Any = None) -> Any:
    """Pre-hook of every decoder layer but the first; acts only for caches with ``before_layer``."""
    if kwargs is None:
        # Another thread is still registering this hook; its own forward begins after that.
        return None
    for value in (*kwargs.values(), *args):
        if isinstance(value, LinkedCache) and value.before_layer is not None:
            return value.before_layer(layer, module, args, kwargs)
    return None


def _cut(value: Any, rows: int, index: Tensor) -> Any:
    """Rows ``index`` of all tensors with ``rows`` rows: hidden states, position ids, cosines and sines."""
    if isinstance(value, dict):
        return {name: _cut(item, rows, index) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(item, rows, index) for item in value)
    if isinstance(value, Tensor) and 1 <= value.dim() <= 3:
        axis = 0 if value.dim() == 1 else 1
        if value.shape[axis] == rows:
            return value.index_select(axis, index.to(value.device))
    return value
