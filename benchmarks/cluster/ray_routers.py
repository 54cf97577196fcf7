"""The simulated routers as request routers of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from benchmarks.cluster.route_simulation import ROUTERS, Setting
from ragcachekit.cluster.router import CHUNKS

PLACE = f"{__name__}:SimulatedRouter"
"""Where Ray Serve finds :class:`SimulatedRouter`."""


class SimulatedRouter(RequestRouter):
    """Routes real requests as the router of that number in ``ROUTERS`` does."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take ``request_router_kwargs``: ``number``."""
        self._kind = list(ROUTERS.values())[int(kwargs["number"])]
        self._router: Any = None
        self._chosen: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica alone, as long as it is there; a request that is tried again keeps its own."""
        replicas = sorted(candidate_replicas, key=lambda one: one.replica_id.unique_id)
        if pending_request is None:
            return [replicas]
        if self._router is None:
            self._router = self._kind(Setting(replicas=len(replicas)))
        one = pending_request.metadata.internal_request_id
        if one not in self._chosen:
            queues = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas]
            self._chosen[one] = self._router.choose(pending_request.kwargs[CHUNKS], queues)
        return [[replicas[self._chosen[one]]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Forget the choice."""
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
