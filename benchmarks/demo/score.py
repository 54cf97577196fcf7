"""How the demo's answers are scored: the known answer in them, and means with 95 % intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ragcachekit.commands.bench.resample import Bootstrap

PART = "answer"
MEANS = ("f1", "kl", "full_loss", "cached_loss")
SHARES = ("full_right", "cached_right", "same")


@dataclass(frozen=True)
class Answered:
    """One question; plain values.

    ``full`` and ``cached`` are answers, ``chunks`` and ``cached_chunks`` what was retrieved for them. ``kl``
    is KL(full || cached) of the first token in nats. ``full_loss`` and ``cached_loss`` are nats per token of
    full's answer, after full's prompt in full and after the cached prompt.
    """

    question: str
    known: str
    full: str
    cached: str
    full_right: bool
    cached_right: bool
    same: bool
    f1: float
    kl: float
    full_loss: float
    cached_loss: float
    chunks: tuple[int, ...]
    cached_chunks: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    recompute_ratio: float
    policy: str
    encoder: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Of the values that a work file holds."""
        places = {name: tuple(values[name]) for name in ("chunks", "cached_chunks")}
        return cls(**{**values, **places})


def contains(answer: str, known: str) -> bool:
    """Whether the known answer stands in ``answer`` as whole words, in any case and with any blanks."""
    wanted = r"\s+".join(map(re.escape, known.lower().split()))
    return re.search(rf"(?<!\w){wanted}(?!\w)", answer.lower()) is not None


def quality(answered: Sequence[Answered], seed: int) -> dict[str, Any]:
    """One row: means with bootstrap intervals, counts with Wilson's, and the share of tokens reused."""
    bootstrap, n = Bootstrap(len(answered), seed), len(answered)
    found: dict[str, Any] = {"part": "quality", "n": n}
    for name in MEANS:
        values = [getattr(one, name) for one in answered]
        low, high = bootstrap.of_mean(values)
        found |= {name: sum(values) / n, f"{name}_low": low, f"{name}_high": high}
    for name in SHARES:
        right = sum(getattr(one, name) for one in answered)
        low, high = wilson(right, n)
        found |= {name: right, f"{name}_low": low, f"{name}_high": high}
    loss = [one.cached_loss - one.full_loss for one in answered]
    low, high = bootstrap.of_mean(loss)
    return {
        **found,
        "loss_added": sum(loss) / n,
        "loss_added_low": low,
        "loss_added_high": high,
        "other_chunks": sum(one.chunks != one.cached_chunks for one in answered),
        "tokens_reused": sum(one.reused_tokens for one in answered)
        / sum(one.prompt_tokens for one in answered),
        "recompute_ratio": sum(one.recompute_ratio for one in answered) / n,
        "policy": answered[0].policy,
        "encoder": answered[0].encoder,
    }


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of ``right`` out of ``n``."""
    if not 0 <= right <= n or n < 1:
        raise ValueError(f"need 0 <= right <= n and n >= 1, got {right} of {n}")
    share = right / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)
