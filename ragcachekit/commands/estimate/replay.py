"""Replay of prompts through storage tiers: keys and sizes through the eviction policy, without KV."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ragcachekit.commands.estimate.requests import Request, Use
from ragcachekit.plan.link_plan import COMPUTED
from ragcachekit.store.eviction.base import Access
from ragcachekit.store.eviction.policies import open_eviction
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.types import KVKey

HOST, DISK = "host", "disk"


@dataclass(frozen=True)
class Tiers:
    """A host tier, and optionally a disk that holds everything, the corpus from the start if precomputed."""

    host_bytes: int
    eviction: str = "pgdsf"
    disk: bool = False
    precomputed: bool = False


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
    precomputed: Collection[KVKey],
    prefill_seconds: Callable[[int], float],
) -> tuple[Served, ...]:
    """Serve the requests one after the other; what one misses is stored before the next.

    ``precomputed`` are the keys of the corpus, ``prefill_seconds`` what eviction policies weigh as cost.
    """
    host = _HostTier(tiers, prefill_seconds)
    disk = set(precomputed if tiers.precomputed else ())
    served = []
    for request in requests:
        served.append(_serve(request, host, disk))
        if tiers.disk:
            disk.update(use.key for use in request.uses)
    return tuple(served)


def _serve(request: Request, host: _HostTier, disk: set[KVKey]) -> Served:
    """All entries are looked up, then those on the disk are read, then what was missed is stored."""
    uses = {use.key: use for use in request.uses}
    found = {key: HOST if host.get(key) else DISK if key in disk else COMPUTED for key in uses}
    for key, use in uses.items():
        if found[key] == DISK:
            host.put(use)
    for use in _as_encoded(use for key, use in uses.items() if found[key] == COMPUTED):
        host.put(use)
    host.release()
    return Served(request, tuple(found[use.key] for use in request.uses))


def _as_encoded(uses: Iterable[Use]) -> Iterator[Use]:
    """The order of the chunk encoder: one encoding after the other, the longest chunks first."""
    groups: defaultdict[str, list[Use]] = defaultdict(list)
    for use in uses:
        groups[use.key.encoding].append(use)
    for group in groups.values():
        yield from sorted(group, key=lambda use: use.chunk.tokens)[::-1]


class _HostTier:
    """Keys and sizes of the host tier; what a request uses is held until its end."""

    def __init__(self, tiers: Tiers, prefill_seconds: Callable[[int], float]) -> None:
        self._budget, self._prefill_seconds = tiers.host_bytes, prefill_seconds
        self._ranking: Ranking[KVKey] = Ranking(open_eviction(tiers.eviction))
        self._held: set[KVKey] = set()

    def get(self, key: KVKey) -> bool:
        if key not in self._ranking:
            return False
        self._ranking.hold(key)
        self._held.add(key)
        self._ranking.touch(key)
        return True

    def put(self, use: Use) -> None:
        if sum(map(self._ranking.size, self._held)) + use.nbytes > self._budget:
            return
        tokens = use.chunk.tokens
        access = Access(False, self._prefill_seconds(tokens), tokens)
        self._ranking.add(use.key, use.nbytes, access=access, hold=True)
        while self._ranking.nbytes > self._budget:
            self._ranking.evict()
        self._ranking.release(use.key)

    def release(self) -> None:
        for key in self._held:
            self._ranking.release(key)
        self._held.clear()
