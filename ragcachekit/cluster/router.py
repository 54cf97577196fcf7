"""Choice of a replica by the set of a request's chunks and by load, and Ray Serve's router around it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

CHUNKS = "chunks"
"""Keyword argument of a request with its chunk ids and their tokens."""

MAX_SHARE = 1.2
"""A replica that got more than this times the mean of the recent requests gets no more."""

QUEUED = 0.25
"""Tokens that a request under way is worth, as a share of the mean request's chunks."""

WINDOW = 64
"""Recent requests per replica that count as load."""

_LEAD = 4  # requests that a replica may always be ahead


def routing_stats(ids: Iterable[str]) -> dict[str, Any]:
    """What a replica that holds these chunks reports: eight bytes of each id's hash."""
    return {CHUNKS: b"".join(map(_digest, ids))}


def _digest(chunk_id: str) -> bytes:
    return hashlib.sha256(chunk_id.encode()).digest()[:8]


@dataclass
class _Replica:
    """What is known of one replica: its last report, what it was sent since, and its recent load."""

    stats: Mapping[str, object] = field(default_factory=dict)
    reported: frozenset[bytes] = frozenset()
    sent: set[bytes] = field(default_factory=set)
    sent_before: set[bytes] = field(default_factory=set)
    load: float = 0.0

    def holds(self, chunk: bytes) -> bool:
        return chunk in self.sent or chunk in self.sent_before or chunk in self.reported


class Balancer:
    """Ranks replicas for requests.

    A replica's cost for a request is what it would have to compute, in tokens, and what is queued before it.
    The cheapest replica is the first, except that none gets more than its bounded share of the requests. A
    request of which no replica holds anything goes to the better of two random replicas. What a replica was
    sent counts as held until its second report after that.

    One balancer sees the requests of one router; it is not thread-safe.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._draw = random.Random(seed)
        self._replicas: dict[str, _Replica] = {}
        self._mean_tokens = 0.0

    def update(self, stats: Mapping[str, Mapping[str, object]]) -> None:
        """Take the replicas' current :func:`routing_stats`, by name; those of other replicas are dropped."""
        kept = {name: self._replicas.get(name) for name in stats}
        least = min((one.load for one in kept.values() if one is not None), default=0.0)
        # A new replica has had no requests, and is not to be flooded with all of them.
        self._replicas = {name: one or _Replica(load=least) for name, one in kept.items()}
        for name, replica in self._replicas.items():
            if replica.stats is not stats[name] and replica.stats != stats[name]:
                raw = stats[name].get(CHUNKS)
                known = raw if isinstance(raw, bytes) else b""  # a report of another form has none
                replica.reported = frozenset(known[at : at + 8] for at in range(0, len(known), 8))
                replica.stats = stats[name]
                replica.sent_before, replica.sent = replica.sent, set()

    def rank(self, chunks: Mapping[str, int], queued: Mapping[str, int]) -> list[list[str]]:
        """Groups of replicas for a request, the best first; within a group the shorter queue decides.

        ``chunks`` are the request's chunk ids with their tokens, ``queued`` the requests under way at each
        replica, as far as known.
        """
        loads = {name: one.load for name, one in self._replicas.items()}
        most = MAX_SHARE * sum(loads.values()) / max(len(loads), 1) + _LEAD
        eligible = [name for name, load in loads.items() if load <= most]  # at least that with the least load
        rest = [[name] for name in sorted(loads, key=lambda name: loads[name])]
        pairs = [(_digest(one), tokens) for one, tokens in chunks.items()]
        held = {
            name: sum(tokens for one, tokens in pairs if self._replicas[name].holds(one)) for name in eligible
        }
        if not any(held.values()):
            return [self._draw.sample(eligible, min(2, len(eligible))), *rest]
        worth = QUEUED * max(self._mean_tokens, 1.0)
        ranked = sorted(eligible, key=lambda name: (worth * queued.get(name, 0) - held[name], loads[name]))
        return [[name] for name in ranked] + rest

    def sent(self, name: str, chunks: Mapping[str, int]) -> None:
        if (replica := self._replicas.get(name)) is None:
            return
        decay = 1 - 1 / (WINDOW * len(self._replicas))
        for other in self._replicas.values():
            other.load *= decay
        replica.load += 1
        self._mean_tokens += (sum(chunks.values()) - self._mean_tokens) / 32
        replica.sent.update(map(_digest, chunks))


class ChunkRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Sends requests to replicas that hold their chunks, unless those have too much to do.

    A request names its chunks in the keyword argument ``chunks``, replicas theirs in their routing stats.
    Where either is missing, this is Ray's power of two choices.
    """

    def initialize_state(self, **_: Any) -> None:
        """Make the balancer; Serve calls this once."""
        self._balancer = Balancer()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the best first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        self._balancer.update({name: one.routing_stats for name, one in replicas.items()})
        queued = {
            name: self.replica_queue_len_cache.get(one.replica_id) or 0 for name, one in replicas.items()
        }
        ranked = self._balancer.rank(_chunks_of(pending_request), queued)
        return [[replicas[name] for name in group] for group in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note what the replica will hold, until it publishes it."""
        self._balancer.sent(replica_id.unique_id, _chunks_of(pending_request))


def _chunks_of(request: PendingRequest | None) -> Mapping[str, int]:
    found = request.kwargs.get(CHUNKS) if request is not None else None
    return found if isinstance(found, Mapping) else {}
