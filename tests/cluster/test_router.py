"""Ray Serve's router around the balancer: groups of replicas, and requests without chunks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve.request_router import PendingRequest

from ragcachekit.cluster.balancer import routing_stats
from ragcachekit.cluster.router import ChunkRouter


def replica(name, *held):
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name), routing_stats=routing_stats(held) if held else {}
    )


@pytest.fixture
def router():
    """Without Serve: what its constructor needs is not there."""
    one = ChunkRouter.__new__(ChunkRouter)
    one._replica_queue_len_cache = SimpleNamespace(get=lambda _: None)
    one.initialize_state()
    return one


def request_of(**kwargs):
    return PendingRequest([], kwargs, None, future=asyncio.get_running_loop().create_future())


async def test_the_replica_that_holds_the_chunks_is_first(router):
    replicas = [replica("a", "x"), replica("b", "x", "y"), replica("c")]
    request = request_of(chunks={"x": 10, "y": 10})
    groups = await router.choose_replicas(replicas, request)
    assert groups[0] == [replicas[1]]
    assert {one.replica_id.unique_id for group in groups for one in group} == {"a", "b", "c"}
    assert request.routing_context.should_backoff


@pytest.mark.parametrize("kwargs", [{}, {"chunks": None}, {"chunks": {}}, {"chunks": {"new": 5}}])
async def test_without_known_chunks_two_are_drawn(router, kwargs):
    replicas = [replica("a", "x"), replica("b"), replica("c")]
    groups = await router.choose_replicas(replicas, request_of(**kwargs))
    assert len(groups[0]) == 2


async def test_without_a_request_two_are_drawn(router):
    assert len((await router.choose_replicas([replica("a"), replica("b"), replica("c")]))[0]) == 2


async def test_no_replicas_are_no_choice(router):
    assert [group for group in await router.choose_replicas([], request_of(chunks={"x": 1})) if group] == []


async def test_a_routed_request_is_noted(router):
    replicas, request = [replica("a"), replica("b"), replica("c")], request_of(chunks={"x": 10})
    await router.choose_replicas(replicas, request)
    router.on_request_routed(request, replicas[2].replica_id, None)
    assert (await router.choose_replicas(replicas, request))[0] == [replicas[2]]


async def test_queues_are_weighed(router):
    replicas, request = [replica("a", "x"), replica("b", "x", "y")], request_of(chunks={"x": 10, "y": 1})
    router._replica_queue_len_cache = SimpleNamespace(
        get=lambda one: 90 if one is replicas[1].replica_id else None
    )
    assert (await router.choose_replicas(replicas, request))[0] == [replicas[0]]
