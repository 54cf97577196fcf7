"""The contract of selection policies: which cached tokens are recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ragcachekit_kernels.dispatch import AttentionOptions


class PolicyAndEncoder(NamedTuple):
    """Names of a policy and of the encoder of the chunks that it selects from."""

    policy: str
    encoder: str

    def __str__(self) -> str:
        return f"{self.policy} on {self.encoder}"


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk at its position in a prompt.

    - ``is_exact``: Preceded by exactly the context in which it was encoded: needs no recomputation.
    - ``before``, ``context``: Ids of all segments that precede it in this prompt, and in its encoding.
    - ``sums``: All that was recorded with the KV (:class:`ragcachekit.model.kv.ChunkKV`).
    """

    chunk_id: str
    start: int
    tokens: int
    is_exact: bool
    before: tuple[str, ...] = field(default=(), compare=False, repr=False)
    context: tuple[str, ...] = field(default=(), compare=False, repr=False)
    sums: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens


class AttentionObserver(Protocol):
    """Callback of a linked forward, called before each layer computes attention."""

    def observe(
        self, layer: int, query: Tensor, key: Tensor, positions: Sequence[int], options: AttentionOptions
    ) -> None:
        """Query ``[heads, rows, head_dim]``, rotated, over key ``[kv_heads, tokens, head_dim]``."""


@runtime_checkable
class SelectionPolicy(Protocol):
    """Chooses which cached rows a prompt recomputes; rows that are not cached are always computed.

    ``select`` is thread safe, and the same chunks give the same positions: each at most once, in any order,
    and only in chunks that are not exact.

    Two attributes are optional. ``corrects``: its recomputed rows correct the kept ones
    (:mod:`ragcachekit.forward.correction`); not of a layer-wise policy, as all layers must compute the same
    rows. ``exact_only``: it keeps exact rows alone, so that chunks are not encoded for it.
    """

    @property
    def name(self) -> str:
        """Name with arguments, e.g. ``lego:16``."""

    @property
    def encoder(self) -> str | None:
        """The encoder that this policy requires, if any (``lego0``: ``sinks:4``)."""

    @property
    def reads_cache(self) -> bool:
        """False if nothing cached is used (``full``)."""

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Positions to recompute."""


@dataclass(frozen=True)
class Look:
    """Which attention of the question is recorded.

    Negative ``layers`` count from the last; None: every layer. ``per_chunk``: one softmax per chunk that is
    not exact (FusionRAG); else one over all keys. ``last``: only so many last rows of the question count.
    """

    layers: tuple[int, ...] | None = (-1,)
    per_chunk: bool = True
    last: int | None = None


@runtime_checkable
class GuidedPolicy(SelectionPolicy, Protocol):
    """A policy that chooses by the question's attention, which costs another pass of the question's rows.

    ``select`` is used instead if there is nothing to choose from.
    """

    @property
    def look(self) -> Look:
        """Which attention to record."""

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[Tensor]) -> list[int]:
        """Positions to recompute, as :meth:`select`.

        ``attention``, per recorded layer: ``[tokens]`` float32, the attention of the question's rows that
        are looked at to each key, summed over heads and rows.
        """


Deviation = Callable[[], Tensor]
"""Projects and stores this layer's K and V of the current rows; returns the squared deviation of V from the
linked value per row, ``[rows]`` float32, summed over heads and dimensions."""


@runtime_checkable
class LayerwisePolicy(SelectionPolicy, Protocol):
    """A policy that drops rows from layer to layer; ``select`` gives those of layer 0."""

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """Which of the recomputed ``rows`` (positions, ascending) run through ``layer`` and later ones.

        Called before every layer but the first, in order. ``total`` is the number of rows at layer 0;
        ``deviation`` is called at most once.
        """


@runtime_checkable
class TrackingPolicy(LayerwisePolicy, Protocol):
    """A layer-wise policy that observes the forward's attention."""

    def track(self, chunks: Sequence[PlacedChunk], question: Sequence[int]) -> RowTracker:
        """The state of one request, of all ``chunks`` and the positions of the ``question``."""


class RowTracker(AttentionObserver, Protocol):
    """One request's state of a :class:`TrackingPolicy`; used by one thread, for one forward."""

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """As :meth:`LayerwisePolicy.narrow`, after the layers before ``layer`` were observed."""


@dataclass(frozen=True)
class RatioPolicy:
    """Base of policies called ``kind:r``, which recompute a share ``ratio`` (0 < r <= 1) of cached tokens."""

    ratio: float
    encoder: str | None = None
    reads_cache = True
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"{self.kind}:r needs a ratio 0 < r <= 1, got {self.ratio:g}")

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.ratio:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return []


def share(ratio: float, count: int) -> int:
    """``ceil(ratio * count)``, not one more for 0.1 having no exact binary form."""
    return math.ceil(ratio * count - 1e-9)


def open_positions(chunks: Sequence[PlacedChunk]) -> list[int]:
    """All positions of chunks that are not exact, ascending."""
    return [p for chunk in chunks if not chunk.is_exact for p in range(chunk.start, chunk.stop)]


def top(positions: Sequence[int], scores: Tensor, count: int) -> list[int]:
    """The ``count`` positions with the highest scores (``[len(positions)]``), the earlier of equals."""
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    return [positions[i] for i in order.tolist()]


def first_then_top(chunks: Sequence[PlacedChunk], scores: Tensor, ratio: float) -> list[int]:
    """The share ``ratio`` of open positions: the first token of every chunk, then the highest ``scores``.

    ``scores`` has one for each of :func:`open_positions`.
    """
    positions = open_positions(chunks)
    count = share(ratio, len(positions))
    first = [chunk.start for chunk in chunks if not chunk.is_exact][:count]
    chosen = set(first)
    rest = [number for number, position in enumerate(positions) if position not in chosen]
    return first + top([positions[number] for number in rest], scores[rest], count - len(first))
