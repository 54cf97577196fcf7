"""How large the inputs of ``bench kernels`` are: a model, a prompt, and which of its rows are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 512
"""Tokens of a chunk."""

QUESTION = 64
"""Rows of the question, which stands last."""


@dataclass(frozen=True)
class Sizes:
    """One model and prompt.

    Attributes
    ----------
    tokens, layers, heads, kv_heads, head_dim : int
    dtype : torch.dtype
    device : torch.device
    seed : int
    """

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
