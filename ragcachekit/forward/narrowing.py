"""Row cuts from layer to layer inside the model's own forward (CacheBlend, Cache-Craft)."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward.cache import LinkedCache, LinkedLayer, LinkRows, Projected
from ragcachekit.plan.link_plan import LinkPlan, apply_selection
from ragcachekit.policies.base import AttentionObserver, LayerwisePolicy, RowTracker, TrackingPolicy
from ragcachekit_kernels.dispatch import kv_deviation

_HOOKING = threading.Lock()


class Narrowing:
    """The rows of one linked forward of one prompt, layer by layer; those of ``plan`` run through layer 0.

    Before every other decoder layer the policy selects among the recomputed rows. The hidden states and
    positions of the others are cut. Rows that were never cached run through all layers.
    """

    def __init__(self, plan: LinkPlan, policy: LayerwisePolicy, cache: LinkedCache) -> None:
        self._plan = plan
        self._policy: LayerwisePolicy | RowTracker = policy
        self._cache = cache
        self._observer: AttentionObserver | None = None
        if isinstance(policy, TrackingPolicy):
            self._policy = self._observer = policy.track(plan.chunks, plan.question)
        cached = {p for chunk in plan.placed for p in range(chunk.start, chunk.stop)}
        self._always = frozenset(plan.rows) - cached | {len(plan.token_ids) - 1}
        self._chosen = [p for p in plan.rows if p not in self._always]
        self._total = len(self._chosen)
        self._rows = plan.rows
        self._slot = {p: i for i, p in enumerate(plan.rows)}
        last = len(plan.token_ids) - 1
        self._last_cached = int(last in cached and last in plan.rows)
        self._spent = [self._total + self._last_cached]
        rows = self._link_rows()
        for layer in cache.layers:
            layer.narrow(rows)

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
        rows = self._link_rows()
        for later in self._cache.layers[layer:]:
            later.narrow(rows)
        return _cut((args, kwargs), before, torch.tensor(index))

    def _deviation(self, layer: int, module: torch.nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
        linked: LinkedLayer = self._cache.layers[layer]
        at = torch.tensor(self._chosen, device=linked.values.device)
        before = linked.values[0].index_select(1, at)
        linked.narrow(self._link_rows(), projecting=True)
        with suppress(Projected):
            # Not the module itself: that would come through here again.
            module.forward(*args, **kwargs)
        return kv_deviation(before, linked.values[0], self._chosen).cpu()

    def _link_rows(self) -> LinkRows:
        return LinkRows.of(self._rows, self._observer)


def attach(model: Any, plan: LinkPlan, cache: LinkedCache) -> Narrowing | None:
    """Have the next forward over ``cache`` cut its rows, if the plan's policy is layer-wise.

    Raises ``ModelNotSupported`` if the decoder layers cannot be found.
    """
    if not isinstance(plan.policy, LayerwisePolicy) or not plan.rows:
        return None
    _hook(model, len(cache.layers))
    narrowing = Narrowing(plan, plan.policy, cache)
    cache.before_layer = narrowing.before
    return narrowing


def _hook(model: Any, kept: int) -> None:
    """Register our pre-hook on every decoder layer, once; it acts only for caches with ``before_layer``.

    Removing it after each call would change the model during other threads' forwards.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ModelNotSupported(
            f"the decoder layers of {type(model).__name__} are not in base_model.layers; "
            "a layer-wise policy cannot cut rows there: use another policy"
        )
    if len(layers) != kept:
        raise ModelNotSupported(
            f"{type(model).__name__} has {len(layers)} decoder layers and {kept} with KV of their own; "
            "a layer-wise policy cannot follow that: use another policy"
        )
    with _HOOKING:
        for number, layer in enumerate(layers):
            hooks = layer._forward_pre_hooks.values()
            if number and not any(getattr(hook, "func", None) is _before for hook in hooks):
                layer.register_forward_pre_hook(partial(_before, number), with_kwargs=True)


def _before(layer: int, module: torch.nn.Module, args: Any, kwargs: Any = None) -> Any:
    if kwargs is None:
        # Another thread is still registering this hook; its own forward begins after that.
        return None
    for value in (*kwargs.values(), *args):
        if isinstance(value, LinkedCache) and value.before_layer is not None:
            return value.before_layer(layer, module, args, kwargs)
    return None


def _cut(value: Any, rows: int, index: torch.Tensor) -> Any:
    """Rows ``index`` of all tensors with ``rows`` rows: hidden states, position ids, cosines and sines."""
    if isinstance(value, dict):
        return {name: _cut(item, rows, index) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(item, rows, index) for item in value)
    if isinstance(value, torch.Tensor) and 1 <= value.dim() <= 3:
        axis = 0 if value.dim() == 1 else 1
        if value.shape[axis] == rows:
            return value.index_select(axis, index.to(value.device))
    return value
