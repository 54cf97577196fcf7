"""Choice of a replica by the set of a request's chunks and by load; independent of Ray."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LEAD = 4  # requests that a replica may always be ahead


MAX_SHARE = 1.2
"""A replica that got more than this times the mean of the recent requests gets no more."""

QUEUED = 0.25
"""Tokens that a request under way is worth, as a share of the mean request's chunks."""

WINDOW = 64
"""Recent requests per replica that count as load."""

MAX_NOTED = 8192
"""Chunks per replica that are noted between two of its reports."""


def routing_stats(ids: Iterable[str]) -> dict[str, Any]:
    """What a replica that holds these chunks reports: eight bytes of each id's hash."""
    return {"chunks": b"".join(hashlib.sha256(one.encode()).digest()[:8] for one in ids)}


def _hash(chunk_id: str) -> int:
    return int.from_bytes(hashlib.sha256(chunk_id.encode()).digest()[:8], "little")


def _reported(stats: Mapping[str, object]) -> frozenset[int]:
    """Hashes of the chunks in a report; none in one of another form."""
    raw = stats.get("chunks")
    if not isinstance(raw, bytes) or len(raw) % 8:
        return frozenset()
    return frozenset(np.frombuffer(raw, "<u8").tolist())


@dataclass
class _Replica:
    """What is known of one replica: its last report, what it was sent since, and its recent load."""

    stats: Mapping[str, object] = field(default_factory=dict)
    reported: frozenset[int] = frozenset()
    sent: dict[int, None] = field(default_factory=dict)
    sent_before: dict[int, None] = field(default_factory=dict)
    load: float = 0.0

    def holds(self, chunk: int) -> bool:
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
                replica.stats, replica.reported = stats[name], _reported(stats[name])
                replica.sent_before, replica.sent = replica.sent, {}

    def rank(self, chunks: Mapping[str, int], queued: Mapping[str, int]) -> list[list[str]]:
        """Groups of replicas for a request, the best first; within a group the shorter queue decides.

        Parameters
        ----------
        chunks : mapping of str to int
            The request's chunk ids and their tokens.
        queued : mapping of str to int
            Requests under way at each replica, as far as known.
        """
        eligible = self._within_bound()
        rest = [[name] for name in sorted(self._replicas, key=lambda name: self._replicas[name].load)]
        held = self._held(chunks)
        if not any(held.get(name) for name in eligible):
            return [self._draw.sample(eligible, min(2, len(eligible))), *rest]
        total, shortest = sum(chunks.values()), min(queued.get(name, 0) for name in eligible)
        worth = QUEUED * max(self._mean_tokens, 1.0)

        def cost(name: str) -> tuple[float, float]:
            waiting = queued.get(name, 0) - shortest
            return total - held[name] + worth * waiting, self._replicas[name].load

        return [[name] for name in sorted(eligible, key=cost)] + rest

    def sent(self, name: str, chunks: Mapping[str, int]) -> None:
        """Note that a replica was sent a request."""
        if (replica := self._replicas.get(name)) is None:
            return
        decay = 1 - 1 / (WINDOW * len(self._replicas))
        for other in self._replicas.values():
            other.load *= decay
        replica.load += 1
        self._mean_tokens += (sum(chunks.values()) - self._mean_tokens) / 32
        for one in map(_hash, chunks):
            replica.sent.pop(one, None)
            replica.sent[one] = None
        while len(replica.sent) > MAX_NOTED:
            del replica.sent[next(iter(replica.sent))]

    def _held(self, chunks: Mapping[str, int]) -> dict[str, int]:
        """Tokens of the request's chunks that each replica probably holds."""
        pairs = [(_hash(one), tokens) for one, tokens in chunks.items()]
        return {
            name: sum(tokens for one, tokens in pairs if replica.holds(one))
            for name, replica in self._replicas.items()
        }

    def _within_bound(self) -> Sequence[str]:
        """Replicas that may get another request; at least the one with the least load."""
        mean = sum(one.load for one in self._replicas.values()) / max(len(self._replicas), 1)
        most = MAX_SHARE * mean + _LEAD
        return [name for name, one in self._replicas.items() if one.load <= most]
