"""Ray Serve's request router by chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ragcachekit.cluster.balancer import Balancer

CHUNKS = "chunks"
"""Keyword argument of a request with its chunk ids and their tokens."""


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
