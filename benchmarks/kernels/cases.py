"""One figure of ``bench kernels``: the sizes of its inputs, and the check of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 512
"""Tokens of a chunk."""

QUESTION = 64
"""Rows of the question, which comes last."""


@dataclass(frozen=True)
class Sizes:
    """One model and prompt."""

    tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def random(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Normal numbers; the same salt and shape, the same numbers."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + salt)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).to(
            self.dtype
        )

    @property
    def sets(self) -> int:
        """Sets of inputs that calls go round, so that a GPU's cache does not hold them."""
        return 2 if self.device.type == "cuda" else 1

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)


def row_sets(tokens: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Positions of the rows by name: a share of all tokens, LegoLink's, the question alone, all."""
    question = set(range(tokens - QUESTION, tokens))
    picked = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: round(0.15 * tokens)]
    lego = {start + i for start in range(0, tokens, CHUNK) for i in range(min(16, tokens - start))}
    sets = {"15%": set(picked.tolist()) | question, "lego:16": lego | question, "question": question}
    return {name: tuple(sorted(rows)) for name, rows in sets.items()} | {"full": tuple(range(tokens))}


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Allowed distance of an output vector: rounding weights and outputs to bfloat16 costs about 2e-3."""


@dataclass(frozen=True, eq=False)
class Case:
    """One figure: ``calls`` (one per set of inputs) that do ``work`` operations or bytes, as ``unit`` says.

    ``error`` is how far the result is from the float64 derivation: of attention and assembly the largest
    length of an output vector's difference over the length of that vector, so that a small output counts
    like a large one; of sums the largest difference over the largest sum. NaN if anything was not written.
    ``rows`` are positions of the query rows, for baselines of the same work.
    """

    kernel: str
    name: str
    work: float
    unit: str
    calls: Sequence[Callable[[], Any]]
    error: Callable[[], float]
    allowed: float
    rows: tuple[int, ...] = ()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest length of a difference over the length of the expected vector, along the last dimension."""
    expected = expected.double()
    away = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(away.max()) if bool(torch.isfinite(away).all()) else float("nan")


def largest(distances: Iterable[float], written: Iterable[torch.Tensor]) -> float:
    """The largest of the distances; NaN if one is, or if something in ``written`` is not finite."""
    worst = max(distances, key=lambda away: float("inf") if math.isnan(away) else away)
    return worst if all(bool(torch.isfinite(out).all()) for out in written) else float("nan")


def row_scores(query: torch.Tensor, key: torch.Tensor, row: int, scale: float) -> torch.Tensor:
    """Scores of one row over all keys in float64, ``[kv_heads, heads of each, keys]``."""
    heads = query[:, row].double().view(key.shape[0], -1, query.shape[-1])
    return heads @ key.double().transpose(1, 2) * scale
