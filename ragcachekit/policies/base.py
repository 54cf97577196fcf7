"""The contract of selection policies: which cached tokens are recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from ragcachekit.types import KVKey
from ragcachekit_kernels.dispatch import AttentionOptions


@dataclass(frozen=True)
class PlacedChunk:
    """A cached chunk at its place in a prompt.

    Attributes
    ----------
    exempt : bool
        Exact where it stands (behind exactly what it was encoded behind): needs no recomputation.
    attended : torch.Tensor or None
        ``[tokens]`` float32: attention that each token got while the chunk was encoded, from its own
        tokens, summed over layers, heads and rows. None where nothing was recorded.
    before, behind : tuple of str
        Ids of all segments that stand before it in this prompt, and of what its KV was computed behind.
    sums : mapping of str to torch.Tensor
        All that was recorded with the KV (:class:`ragcachekit.model.kv.ChunkKV`).
    cached : bool
        False for a chunk that the request computes, which only a :class:`WatchingPolicy` gets to see.
    """

    chunk_id: str
    start: int
    tokens: int
    is_exact: bool
    attended: torch.Tensor | None = field(default=None, compare=False, repr=False)
    before: tuple[str, ...] = field(default=(), compare=False, repr=False)
    behind: tuple[str, ...] = field(default=(), compare=False, repr=False)
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    cached: bool = field(default=True, compare=False)

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens


class Observer(Protocol):
    """Callback of a linked forward, called before each layer computes attention."""

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        """Query ``[heads, rows, head_dim]``, rotated, over key ``[kv_heads, tokens, head_dim]``."""
        ...


@runtime_checkable
class SelectionPolicy(Protocol):
    """Chooses which cached rows a prompt recomputes. Implementations promise:

    - ``select`` returns positions inside non-exempt chunks only, in any order, each at most once;
    - the same chunks give the same positions (stateless, thread safe);
    - what is not cached is never their business: it is always computed.
    """

    @property
    def name(self) -> str:
        """As the user writes it, e.g. ``lego:16``."""
        ...

    @property
    def encoder(self) -> str | None:
        """The encoding this policy was designed for, where it insists on one (``lego0``: ``sinks:4``)."""
        ...

    @property
    def reads_cache(self) -> bool:
        """False if nothing cached is used at all (``full``)."""
        ...

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Positions to recompute."""
        ...


@runtime_checkable
class ExactPolicy(SelectionPolicy, Protocol):
    """A policy that keeps exact rows alone: chunks are not encoded for it where they could not be exact."""

    @property
    def exact_only(self) -> bool:
        """True."""
        ...


@dataclass(frozen=True)
class Look:
    """What the question's rows are watched for while they run over the linked cache.

    Attributes
    ----------
    layers : tuple of int or None
        Layers to watch; negative ones count from the last. None: every layer.
    per_chunk : bool
        One softmax per chunk that is not exempt (FusionRAG); else one over all keys.
    """

    layers: tuple[int, ...] | None = (-1,)
    per_chunk: bool = True


@runtime_checkable
class GuidedPolicy(SelectionPolicy, Protocol):
    """A policy that watches the question read the linked cache before it chooses.

    The question's rows run over the cache once more than they otherwise would; ``select`` is what
    is recomputed where that makes no sense (nothing to choose from).
    """

    @property
    def look(self) -> Look:
        """What to watch."""
        ...

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
        """Positions to recompute; promises as :meth:`select`.

        ``attention`` holds, per watched layer, ``[tokens]`` float32: what each key got from the
        question's rows, summed over heads and rows.
        """
        ...


Deviation = Callable[[], torch.Tensor]
"""Computes this layer's K and V of all rows in work, keeps them, and returns the squared deviation of V
from the linked value per row, ``[rows]`` float32, summed over heads and dimensions."""


@runtime_checkable
class LayerwisePolicy(SelectionPolicy, Protocol):
    """A policy whose rows get fewer from layer to layer; ``select`` gives those of layer 0."""

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """Which of the recomputed ``rows`` (positions, ascending) run through ``layer`` and go on.

        Asked before every layer but the first, in order; ``layers`` is their number, ``total`` that of
        the rows at layer 0. ``deviation`` is called at most once.
        """
        ...


@runtime_checkable
class WatchingPolicy(LayerwisePolicy, Protocol):
    """A layer-wise policy that sees the forward attend before it says which rows go on."""

    def watch(self, chunks: Sequence[PlacedChunk], question: Sequence[int]) -> RowWatch:
        """What sees one request's forward and narrows it.

        ``chunks`` are all of the prompt in order, also those that are not cached; ``question`` are
        positions of its rows.
        """
        ...


class RowWatch(Observer, Protocol):
    """One request's state of a :class:`WatchingPolicy`; used by one thread, for one forward."""

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """As :meth:`LayerwisePolicy.narrow`; the layers before ``layer`` have been seen."""
        ...


class WantedChunk(Protocol):
    """A cacheable segment of a prompt, as policies see it before anything is looked up."""

    @property
    def key(self) -> KVKey:
        """What the chunk store is asked for."""
        ...

    @property
    def before(self) -> tuple[str, ...]:
        """Ids of all segments that stand before it, texts too, in order."""
        ...


class Variants(Protocol):
    """Names of the ``in-prompt`` variants that the store holds."""

    def __contains__(self, key: KVKey) -> bool:
        """Whether this one is known."""
        ...

    def paths(self, key: KVKey, length: int) -> list[tuple[str, ...]]:
        """Beginnings of past prompts that end with the chunk of ``key`` and have ``length`` segments."""
        ...


@runtime_checkable
class VariantPolicy(SelectionPolicy, Protocol):
    """A policy that takes other variants of chunks than those that fit best."""

    def choose_variants(self, wanted: Sequence[WantedChunk], pool: Variants) -> Mapping[int, KVKey]:
        """Entries to use, by index into ``wanted``; for the others it is the usual one."""
        ...


def check_ratio(name: str, ratio: float) -> None:
    """ValueError unless ``0 < ratio <= 1``."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name}:r needs a ratio 0 < r <= 1, got {ratio:g}")


def share(ratio: float, count: int) -> int:
    """``ceil(ratio * count)``, not one more because 0.1 has no exact binary form."""
    return math.ceil(ratio * count - 1e-9)


def open_positions(chunks: Sequence[PlacedChunk]) -> list[int]:
    """All positions of chunks that are not exempt, ascending."""
    return [p for chunk in chunks if not chunk.is_exact for p in range(chunk.start, chunk.stop)]


def top(positions: Sequence[int], scores: torch.Tensor, count: int) -> list[int]:
    """The ``count`` positions with the highest scores (``[len(positions)]``), the earlier of equals."""
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    return [positions[i] for i in order.tolist()]
