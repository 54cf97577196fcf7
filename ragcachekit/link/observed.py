"""A cache that sums, while chunks are encoded, the attention that each of their tokens gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.link.marks import mark_of, marked
from ragcachekit_kernels.dispatch import column_scores


class AttentionSums:
    """Sums over layers, heads and rows, per chunk of a batch; collected one layer at a time.

    Parameters
    ----------
    stretches : sequence of (int, int)
        Per batch item, where its chunk's rows begin and end.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]]) -> None:
        self._stretches = tuple(stretches)
        self.attended = [torch.zeros(stop - start) for start, stop in self._stretches]

    def saw(self, query: torch.Tensor, key: torch.Tensor, **options: Any) -> None:
        """One layer: ``[batch, heads, tokens, head_dim]`` over ``[batch, kv_heads, tokens, head_dim]``."""
        for item, (start, stop) in enumerate(self._stretches):
            sums = column_scores(
                query[item, :, start:stop], key[item, :, :stop], range(start, stop), **options
            )
            self.attended[item] += sums[start:].float().cpu()


def attention_sums(keys: torch.Tensor) -> AttentionSums | None:
    """What the layer that made ``keys`` wants its attention summed into, if anything."""
    mark = mark_of(keys)
    return mark if isinstance(mark, AttentionSums) else None


class _ObservedLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, sums: AttentionSums) -> None:
        super().__init__()
        self._sums = sums

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return marked(keys, self._sums), values


class ObservedCache(Cache):  # type: ignore[misc]
    """An ordinary dynamic cache for one forward of chunks on a model whose attention is ours.

    Parameters
    ----------
    stretches : sequence of (int, int)
        As for :class:`AttentionSums`.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]]) -> None:
        self._sums = AttentionSums(stretches)
        super().__init__(layer_class_to_replicate=partial(_ObservedLayer, self._sums))

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Per batch item; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return [{"attended": attended} for attended in self._sums.attended]
