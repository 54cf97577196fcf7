"""Means of encodings of one chunk in several contexts (``average:n``)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ragcachekit.model.kv import ASKED, CONTEXTS, SENSITIVITY, ChunkKV, contexts_of


class RunningMean:
    """Running means of the encodings of one chunk, in float32 (Welford's method)."""

    def __init__(self) -> None:
        self._contexts: tuple[int, ...] = ()
        self._asked: tuple[Tensor, int] | None = None  # a mean, and of how many

    @classmethod
    def of(cls, kv: ChunkKV) -> Self:
        """The mean that ``kv`` is, to go on with."""
        mean, contexts = cls(), contexts_of(kv)
        mean.add(kv, 0)
        mean._contexts = contexts
        if mean._asked is not None:
            mean._asked = mean._asked[0], len(contexts)
        if SENSITIVITY in kv.sums:
            mean._squares = list((kv.sums[SENSITIVITY].square() * ((len(contexts) - 1) / 2)).unbind())
        return mean

    def add(self, kv: ChunkKV, context: int) -> None:
        """Add an encoding, keys without RoPE, and the number of its context."""
        # Copied: the means are updated in place, and the store may have the KV as another entry.
        sides = [[t.to("cpu", torch.float32, copy=True) for t in side] for side in (kv.keys, kv.values)]
        if ASKED in kv.sums and (self._asked is None or self._asked[0].shape == kv.sums[ASKED].shape):
            asked, n = self._asked or (torch.zeros_like(kv.sums[ASKED]), 0)
            self._asked = asked + (kv.sums[ASKED] - asked) / (n + 1), n + 1
        self._contexts, count = (*self._contexts, context), len(self._contexts) + 1
        if count == 1:
            self._dtypes = [[tensor.dtype for tensor in side] for side in (kv.keys, kv.values)]
            self._means = sides
            self._squares = [torch.zeros(kv.tokens) for _ in kv.keys]
            return
        for mean, new in zip(self._means[0], sides[0], strict=True):
            mean += (new - mean) / count
        for layer, (mean, new) in enumerate(zip(self._means[1], sides[1], strict=True)):
            moved = new - mean
            mean += moved / count
            self._squares[layer] = self._squares[layer] + (moved * (new - mean)).sum((0, 2))

    def result(self) -> ChunkKV:
        """The mean, with the sensitivity of its tokens if it is of two contexts or more."""
        keys, values = (
            tuple(tensor.to(dtype) for tensor, dtype in zip(side, dtypes, strict=True))
            for side, dtypes in zip(self._means, self._dtypes, strict=True)
        )
        sums, count = {CONTEXTS: torch.tensor(self._contexts, dtype=torch.float32)}, len(self._contexts)
        if count > 1:
            # Twice the variance: the mean square of the difference between two contexts.
            moved = 2 / (count - 1) * torch.stack(self._squares).clamp_min(0)
            sums[SENSITIVITY] = moved.sqrt()
        if self._asked is not None:
            sums[ASKED] = self._asked[0]
        return ChunkKV(keys, values, None, sums)
