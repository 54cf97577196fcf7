"""Replay of prompts through storage tiers: keys and sizes through the eviction policy, without KV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ragcachekit.plan.link_plan import COMPUTED
from ragcachekit.plan.row_cost import RowCost
from ragcachekit.store.eviction import Access, open_eviction
from ragcachekit.store.ranking import Ranking
from ragcachekit.types import ENCODING_PREFIX, KVKey

HOST, DISK = "host", "disk"


@dataclass(frozen=True, eq=False)
class Use:
    """One entry in one prompt: its tokens, the bytes of its KV, the rows it spares and costs."""

    key: KVKey
    tokens: int
    nbytes: int
    cost: RowCost

    @property
    def is_prefix(self) -> bool:
        """Whether it is the text before the first chunk."""
        return self.key.encoding.partition("@")[0] == ENCODING_PREFIX


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt as the engine plans it; ``fallback`` is the reason for a full prefill."""

    tokens: int
    uses: tuple[Use, ...]
    fallback: str | None

    @property
    def chunks(self) -> list[Use]:
        """The uses that are chunks."""
        return [use for use in self.uses if not use.is_prefix]


@dataclass(frozen=True)
class Tiers:
    """A host tier, and optionally a disk that holds everything, the corpus from the start if precomputed."""

    host_bytes: int
    eviction: str
    disk: bool
    precomputed: bool


@dataclass(frozen=True)
class Served:
    """One request, and for each of its uses ``host``, ``disk`` or ``computed``."""

    request: Request
    tiers: tuple[str, ...]

    def from_tier(self, tier: str) -> list[Use]:
        """The uses that came from a tier."""
        return [use for use, found in zip(self.request.uses, self.tiers, strict=True) if found == tier]


def replay(
    requests: Sequence[Request],
    tiers: Tiers,
    corpus: Collection[KVKey],
    prefill_seconds: Callable[[int], float],
) -> tuple[Served, ...]:
    """Serve the requests one after the other; what one misses is stored before the next.

    ``corpus`` are the keys that ``precompute`` stores, ``prefill_seconds`` what eviction policies weigh as
    cost.
    """
    host: Ranking[KVKey] = Ranking(open_eviction(tiers.eviction))
    disk = set(corpus if tiers.precomputed else ())
    served = []
    for request in requests:
        uses = {use.key: use for use in request.uses}
        found = {key: HOST if key in host else DISK if key in disk else COMPUTED for key in uses}
        held = [key for key in uses if found[key] == HOST]
        for key in held:
            host.hold(key)
            host.touch(key)
        room = tiers.host_bytes - sum(map(host.size, held))
        loaded = [use for key, use in uses.items() if found[key] == DISK]
        computed = [use for key, use in uses.items() if found[key] == COMPUTED]
        for use in (*loaded, *_as_encoded(computed)):
            if use.nbytes <= room:
                access = Access(False, prefill_seconds(use.tokens), use.tokens)
                host.add(use.key, use.nbytes, access=access, hold=True)
                while host.nbytes > tiers.host_bytes:
                    host.evict()
                host.release(use.key)
        for key in held:
            host.release(key)
        if tiers.disk:
            disk.update(uses)
        served.append(Served(request, tuple(found[use.key] for use in request.uses)))
    return tuple(served)


def _as_encoded(uses: Iterable[Use]) -> list[Use]:
    """The order of the chunk encoder: one encoding after the other, the longest chunks first."""
    groups: defaultdict[str, list[Use]] = defaultdict(list)
    for use in uses:
        groups[use.key.encoding].append(use)
    return [use for group in groups.values() for use in sorted(group, key=lambda use: use.tokens)[::-1]]
