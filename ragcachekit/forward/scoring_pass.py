"""The scoring pass of guided policies: the question runs over the linked cache, its attention is summed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ragcachekit.forward.linker import Buffers, assemble, link, run_rows
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, apply_selection
from ragcachekit.policies.base import GuidedPolicy
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, Spans, column_scores


class _Done(Exception):
    """Stops the forward after the last watched layer."""


class _Watcher:
    """Sums, per watched layer, each key's attention from the question's rows, on the device."""

    def __init__(
        self,
        wanted: Sequence[int],
        spans: Sequence[tuple[int, int]] | None,
        question: Sequence[int],
    ) -> None:
        self._wanted = wanted
        self._spans = None if spans is None else Spans(tuple(spans))
        self._question = Rows(tuple(question))
        self._sums: dict[int, torch.Tensor] = {}

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        if layer in self._wanted:
            rows = query[:, -len(self._question) :]  # the question comes last
            sums = column_scores(rows, key, self._question, options, self._spans)
            self._sums[layer] = sums.float()
        if layer == max(self._wanted):
            raise _Done

    def attention(self) -> list[torch.Tensor]:
        return list(torch.stack([self._sums[layer] for layer in self._wanted]).cpu())


@torch.no_grad()
def choose(model: Any, rope: Rope, plan: LinkPlan) -> tuple[LinkPlan, Buffers | None]:
    """The plan with the rows that its guided policy selects, and its buffers for :func:`link`.

    Rows that are computed anyway run over the linked cache at their real positions, up to the attention
    of the last watched layer. ValueError for a layer that the model does not have. Plans with another
    policy, or none, are returned unchanged.
    """
    policy = plan.policy
    if not isinstance(policy, GuidedPolicy):
        return plan, None
    spans = [(c.start, c.stop) for c in plan.placed if not c.is_exact] if policy.look.per_chunk else None
    rows = plan.question[-policy.look.last :] if policy.look.last else plan.question
    watcher = _Watcher(_watched(policy, plan.pieces[0].kv.layers), spans, rows)
    buffers = assemble(plan, rope, model.device)
    inputs = link(plan, rope, model.device, buffers=buffers, observer=watcher)
    with suppress(_Done):
        run_rows(model, inputs, len(plan.rows))
    return apply_selection(plan, policy.choose(plan.placed, watcher.attention())), buffers


def _watched(policy: GuidedPolicy, layers: int) -> list[int]:
    wanted = policy.look.layers if policy.look.layers is not None else tuple(range(layers))
    if not wanted or not all(-layers <= layer < layers for layer in wanted):
        raise ValueError(f"policy {policy.name} watches layers {wanted}; the model has {layers}")
    return [layer % layers for layer in wanted]
