"""A cache that sums, while chunks are encoded, the attention that each of their tokens gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.link.marks import mark_of, marked
from ragcachekit_kernels.dispatch import column_scores, sparse_attention


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


class ContextSums(AttentionSums):
    """What chunks of one prompt attend to, segment by segment (Cache-Craft section 3.1, inter and intra).

    Parameters
    ----------
    chunks : sequence of sequence of int
        Per chunk, the lengths of the segments before it, from the prompt's start on, then its own.
    """

    def __init__(self, chunks: Sequence[Sequence[int]]) -> None:
        super().__init__([(sum(lengths[:-1]), sum(lengths)) for lengths in chunks])
        self._lengths = [torch.tensor(lengths) for lengths in chunks]
        self._inter: list[list[torch.Tensor]] = [[] for _ in chunks]
        self._intra: list[list[torch.Tensor]] = [[] for _ in chunks]
        self._outward = [torch.zeros_like(attended) for attended in self.attended]

    def saw(self, query: torch.Tensor, key: torch.Tensor, **options: Any) -> None:
        """One layer: ``[1, heads, tokens, head_dim]`` over ``[1, kv_heads, tokens, head_dim]``."""
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query[0].to(wide), key[0].to(wide)
        for number, (start, stop) in enumerate(self._stretches):
            rows, keys, where = query[:, start:stop], key[:, :stop], range(start, stop)
            lengths = self._lengths[number]
            # Attention over a value that says which segment a key belongs to is attention per segment,
            # in the same blocks and under the same masks as any other attention.
            member = torch.repeat_interleave(torch.eye(len(lengths)), lengths, 0).to(key)
            value = member.expand(key.shape[0], -1, -1)
            mass = sparse_attention(rows, keys, value, where, **options).sum(0).float().cpu()
            self._inter[number].append(mass[:, :-1].sum(0))
            self._intra[number].append(mass[:, -1].sum())
            self._outward[number] += mass[:, :-1].sum(1)
            self.attended[number] += column_scores(rows, keys, where, **options)[start:].float().cpu()

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Per chunk; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return [
            {
                "attended": attended,
                "inter": torch.stack(inter),
                "intra": torch.stack(intra),
                "behind": lengths[:-1].float(),
                "outward": outward / len(inter),
            }
            for attended, inter, intra, lengths, outward in zip(
                self.attended, self._inter, self._intra, self._lengths, self._outward, strict=True
            )
        ]


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


class ContextCache(Cache):  # type: ignore[misc]
    """An ordinary dynamic cache for one forward of a prompt on a model whose attention is ours.

    Parameters
    ----------
    chunks : sequence of sequence of int
        As for :class:`ContextSums`.
    """

    def __init__(self, chunks: Sequence[Sequence[int]]) -> None:
        self._sums = ContextSums(chunks)
        super().__init__(layer_class_to_replicate=partial(_ObservedLayer, self._sums))

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Per chunk; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return self._sums.sums
