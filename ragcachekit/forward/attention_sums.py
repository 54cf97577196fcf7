"""A cache that sums, while chunks are encoded, the attention that each of their tokens gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.tagged_keys import tagged
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, column_scores, context_mass


class AttentionSums:
    """Sums over layers, heads and rows, per chunk of a batch; collected one layer at a time.

    ``stretches`` are the first row of each item's chunk and the row after its last. ``first`` are the indices
    of those first rows among the computed rows, where these are not the whole prompt. Sums stay on the device
    until they are read: copying each would wait for its layer.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]], first: Sequence[int] | None = None) -> None:
        self._stretches = tuple(stretches)
        self._first = [start for start, _ in self._stretches] if first is None else list(first)
        self._rows = [Rows(tuple(range(start, stop))) for start, stop in self._stretches]
        self._attended = [torch.zeros(stop - start) for start, stop in self._stretches]

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Per chunk, on the host; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return [{"attended": attended.cpu()} for attended in self._attended]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Add one layer; the model's own attention computes it."""
        self.observe(query, key, options)

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """One layer: ``[batch, heads, tokens, head_dim]`` over ``[batch, kv_heads, tokens, head_dim]``."""
        for item, (start, stop) in enumerate(self._stretches):
            at = self._first[item]
            rows, keys = query[item, :, at : at + stop - start], key[item, :, :stop]
            sums = column_scores(rows, keys, self._rows[item], options)
            self._attended[item] = self._attended[item].to(sums.device) + sums[start:].float()


class ContextSums(AttentionSums):
    """Attention of chunks of one prompt to its segments (Cache-Craft section 3.1, inter and intra).

    ``chunks`` are, per chunk, the lengths of the segments before it, then its own.
    """

    def __init__(self, chunks: Sequence[Sequence[int]], first: Sequence[int] | None = None) -> None:
        super().__init__([(sum(lengths[:-1]), sum(lengths)) for lengths in chunks], first)
        self._lengths = [tuple(lengths) for lengths in chunks]
        self._inter: list[list[torch.Tensor]] = [[] for _ in chunks]
        self._intra: list[list[torch.Tensor]] = [[] for _ in chunks]
        self._outward = [torch.zeros_like(attended) for attended in self._attended]

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """One layer: ``[1, heads, tokens, head_dim]`` over ``[1, kv_heads, tokens, head_dim]``."""
        for number, (start, stop) in enumerate(self._stretches):
            at = self._first[number]
            rows, keys = query[0, :, at : at + stop - start], key[0, :, :stop]
            mass = context_mass(rows, keys, self._rows[number], self._lengths[number], options)
            self._inter[number].append(mass.inter)
            self._intra[number].append(mass.intra)
            self._outward[number] = self._outward[number].to(mass.outward.device) + mass.outward
            self._attended[number] = self._attended[number].to(mass.columns.device) + mass.columns[start:]

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        return [
            {
                "attended": attended.cpu(),
                "inter": torch.stack(inter).cpu(),
                "intra": torch.stack(intra).cpu(),
                "behind": torch.tensor(lengths[:-1]).float(),
                "outward": (outward / len(inter)).cpu(),
            }
            for attended, inter, intra, lengths, outward in zip(
                self._attended, self._inter, self._intra, self._lengths, self._outward, strict=True
            )
        ]


class SummingObserver:
    """An observer that adds the attention of one prompt's linked forward to ``sums``."""

    def __init__(self, sums: AttentionSums) -> None:
        self._observed = sums

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        """One layer; see :class:`~ragcachekit.policies.base.AttentionObserver`."""
        self._observed.observe(query[None], key[None], options)


class SummingCache(Cache):  # type: ignore[misc]
    """A dynamic cache whose first forward, on a model with our attention, adds to ``observed``."""

    def __init__(self, observed: AttentionSums) -> None:
        super().__init__(layer_class_to_replicate=partial(_SummingLayer, observed))
        self.observed = observed

    @property
    def sums(self) -> list[dict[str, torch.Tensor]]:
        """Per chunk; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return self.observed.sums


class ObservedCache(SummingCache):
    """A :class:`SummingCache` for a batch of chunks, which are rows ``start .. stop - 1`` of its items."""

    def __init__(self, stretches: Sequence[tuple[int, int]]) -> None:
        super().__init__(AttentionSums(stretches))


class _SummingLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, sums: AttentionSums) -> None:
        super().__init__()
        self._sums: AttentionSums | None = sums

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        sums, self._sums = self._sums, None  # the prefill alone, not decoding
        return (keys if sums is None else tagged(keys, sums)), values
