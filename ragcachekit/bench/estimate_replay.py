"""Prompts through tiers: the library's own store, encoder order and eviction, over KV without content."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from ragcachekit.bench.estimate_phantom import PhantomDisk, PhantomEncoder
from ragcachekit.bench.estimate_requests import Request, Use
from ragcachekit.link.base import GuidedPolicy, PlacedChunk, SelectionPolicy
from ragcachekit.link.planned import COMPUTED, Missing
from ragcachekit.link.warm import Warmer
from ragcachekit.store.base import Found, KVStore, LayerSource
from ragcachekit.store.eviction.registry import open_eviction
from ragcachekit.store.host import HostStore
from ragcachekit.store.null import NullStore
from ragcachekit.store.tiered import Tier, TieredStore
from ragcachekit.types import KVKey

HOST, DISK = "host", "disk"


@dataclass(frozen=True)
class Tiers:
    """What a replay has.

    Attributes
    ----------
    host_bytes : int
        0 for none.
    eviction : str
        Of the host tier.
    disk : bool
        Behind it one that holds everything.
    precomputed : bool
        The corpus is on that disk before the first question.
    """

    host_bytes: int
    eviction: str = "pgdsf"
    disk: bool = False
    precomputed: bool = False

    def __post_init__(self) -> None:
        if self.precomputed and not self.disk:
            raise ValueError("a corpus is encoded ahead onto the disk; add one")

    def open(self, encoder: PhantomEncoder, ahead: Sequence[Missing]) -> KVStore:
        """The tiers, joined as the library joins them; ``ahead`` is what is encoded ahead."""
        tiers: list[Tier] = []
        if self.host_bytes:
            tiers.append(HostStore(self.host_bytes, policy=open_eviction(self.eviction)))
        if self.disk:
            disk = PhantomDisk()
            if self.precomputed:
                Warmer(encoder, disk, lambda: True).now(ahead)
            tiers.append(disk)
        return TieredStore(tiers) if tiers else NullStore()


@dataclass(frozen=True, eq=False)
class Served:
    """How one request was served.

    Attributes
    ----------
    request : Request
    tiers : tuple of str
        Per use: ``host``, ``disk`` or ``computed``.
    """

    request: Request
    tiers: tuple[str, ...]

    @property
    def used(self) -> tuple[Use, ...]:
        """What came from a tier."""
        return tuple(u for u, tier in zip(self.request.uses, self.tiers, strict=True) if tier != COMPUTED)

    def count(self, tier: str) -> int:
        """Chunks that came from a tier; the text before the first chunk does not count."""
        pairs = zip(self.request.uses, self.tiers, strict=True)
        return sum(found == tier and not use.prefix for use, found in pairs)

    def without(self, keys: Collection[KVKey]) -> Served:
        """The same with these entries computed."""
        pairs = zip(self.request.uses, self.tiers, strict=True)
        return Served(self.request, tuple(COMPUTED if use.item.key in keys else tier for use, tier in pairs))


def replay(
    requests: Sequence[Request],
    tiers: Tiers,
    encoder: PhantomEncoder,
    ahead: Sequence[Missing] = (),
    done: Callable[[], object] = lambda: None,
) -> tuple[Served, ...]:
    """Serve the requests one after the other; what one misses is stored behind it.

    ``ahead`` is what is stored first, where the tiers are precomputed.
    """
    store = tiers.open(encoder, ahead)
    warmer = Warmer(encoder, store, lambda: True)
    served = []
    for request in requests:
        served.append(_serve(request, store, warmer))
        done()
    warmer.close()
    store.close()
    return tuple(served)


def _serve(request: Request, store: KVStore, warmer: Warmer) -> Served:
    """Everything is looked up, then what has to be read is read; what was missed is stored afterwards."""
    found: dict[KVKey, Found | LayerSource | None] = {}
    for use in request.uses:
        if use.item.key not in found:
            found[use.item.key] = store.open(use.item.key)
    for use in request.uses:
        opened = found[use.item.key]
        if opened is not None and not isinstance(opened, Found):
            opened.finished(use.kv)
            found[use.item.key] = Found(use.kv, opened.tier)
    missing = {use.item.key: use.item for use in request.uses if found[use.item.key] is None}
    tiers = tuple(_tier(found[use.item.key]) for use in request.uses)
    warmer.now(missing.values())
    return Served(request, tiers)


def _tier(found: Found | LayerSource | None) -> str:
    return COMPUTED if found is None else found.tier


def rows_chosen(policy: SelectionPolicy, chunks: Sequence[PlacedChunk], tokens: int) -> int:
    """How many of these chunks' rows a policy recomputes.

    A policy that watches the question has nothing to watch here: which rows it takes is unknown, how
    many is not.
    """
    if isinstance(policy, GuidedPolicy) and any(not chunk.exempt for chunk in chunks):
        layers = len(policy.look.layers or (0,))
        return len(policy.choose(chunks, [torch.ones(tokens)] * layers))
    return len(policy.select(chunks))
