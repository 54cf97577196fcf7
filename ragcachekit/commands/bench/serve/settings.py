"""What the serving bench measures: its settings, and the systems that they name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ragcachekit.commands.bench.shapes import dtype_named
from ragcachekit.config import QueueConfig, positive
from ragcachekit.policies.registry import open_policy

SEQUENTIAL, BATCHING, SHARING = BASELINES = ("sequential", "batching", "sharing")
EXACT = (*BASELINES, "full", "prefix")
CACHES = {"warm": 4.0, "half": 0.5}
"""Budget of the chunk KV, as a multiple of the KV of all documents (``warm``: whatever the encoder)."""
ORDERS = {"cache-aware": QueueConfig().window, "fifo": 0}
LOADS = (0.5, 1.0, 2.0)
"""Rates by default, in multiples of what :data:`SEQUENTIAL` answers."""
PATIENCE = 5.0
"""Deadline of a first token by default, over that of :data:`SEQUENTIAL` alone (RAGCache, section 7)."""
SHAPE = "smollm2-135m"
"""Weights by default."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What is served, and how.

    ``model`` is a folder, a hub id or ``sample``, else ``shape`` has random weights. Documents are cut from
    ``dataset`` or ``corpus``, else random tokens. ``systems`` are :data:`BASELINES` and policies of ours,
    each under every one of ``caches`` and ``orders``; see :attr:`compared` for ``sequential``. ``rates`` are
    requests per second, by default (None) :data:`LOADS`; all at once comes first. ``deadline`` is in seconds
    to the first token. ValueError for unknown names and what does not fit together.
    """

    shape: str | None = None
    model: str | None = None
    dataset: str | None = None
    corpus: str | os.PathLike[str] | None = None
    systems: tuple[str, ...] = (*BASELINES, "full", "prefix", "auto")
    caches: tuple[str, ...] = ("warm",)
    orders: tuple[str, ...] = ("cache-aware",)
    rates: tuple[float, ...] | None = None
    requests: int = 24
    documents: int = 64
    chunks: int = 5
    chunk_tokens: int = 190
    new_tokens: int = 32
    alpha: float = 1.0
    warm_up: int = 8
    max_batch: int = 16
    max_waiting: int = 256
    deadline: float | None = None
    runs: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape is not None and self.model is not None:
            raise ValueError("give a shape (random weights) or a model, not both")
        if self.model is None and (self.dataset or self.corpus):
            raise ValueError("a dataset or a corpus needs the tokenizer of a model; random weights have none")
        if self.dataset is not None and self.corpus is not None:
            raise ValueError("give a dataset or a corpus, not both")
        for name in ("requests", "documents", "chunks", "chunk_tokens", "new_tokens", "warm_up", "runs"):
            positive(name, getattr(self, name))
        if self.chunks > self.documents:
            raise ValueError(f"a prompt has {self.chunks} documents, and there are {self.documents} in all")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"deadline must be > 0 seconds, got {self.deadline:g}")
        if self.alpha < 0 or any(rate <= 0 for rate in self.rates or ()):
            raise ValueError("alpha must be >= 0, and rates > 0 requests per second")
        for what, given, known in (("cache", self.caches, CACHES), ("order", self.orders, ORDERS)):
            if not given or not set(given) <= set(known):
                raise ValueError(f"unknown {what} in {given}; known: {', '.join(known)}")
        for system in self.systems:
            if system not in BASELINES:
                _check_policy(system)
        dtype_named(self.dtype)

    @property
    def compared(self) -> bool:
        """Whether ``sequential`` is measured: asked for, or giving the rates, or checking an exact system."""
        return self.rates is None or not set(EXACT).isdisjoint(self.systems)


def _check_policy(system: str) -> None:
    try:
        open_policy(system)
    except ValueError as error:
        raise ValueError(
            f"{system!r} is no system: give {', '.join(BASELINES)} or a policy ({error})"
        ) from error


class Variant(NamedTuple):
    """One system as it is measured; baselines have no cache and no order of ours."""

    system: str
    cache: str = ""
    order: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


def variants(settings: ServeSettings) -> Iterator[Variant]:
    """The systems in the order in which they are measured."""
    yield Variant(SEQUENTIAL)
    for system in dict.fromkeys(settings.systems):
        if system in BASELINES:
            yield from [Variant(system)] if system != SEQUENTIAL else []
        else:
            each = itertools.product([system], settings.caches, settings.orders)
            yield from itertools.starmap(Variant, each)
