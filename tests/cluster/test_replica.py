"""A replica without Serve around it: ASGI both ways, clients that go away, what it says it holds."""

import asyncio
import gc
from contextlib import aclosing, asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from ragcachekit import RagCache
from ragcachekit.cluster.app import Replica
from ragcachekit.cluster.router import Balancer
from ragcachekit.errors import RagCacheError
from speaking import byte_level, speaker

SCOPE = {
    "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/echo",
    "raw_path": b"/echo", "query_string": b"a=1", "headers": [(b"x-one", b"1")], "client": None,
}  # fmt: skip


def opened(folder, events):
    rag = RagCache(
        speaker(), byte_level(), encoder="standalone", policy="lego:4", cold="never", cache_dir=folder
    )

    @asynccontextmanager
    async def life(_):
        events.append("begun")
        yield

    app = FastAPI(lifespan=life)

    @app.post("/echo")
    async def echo(request: Request):
        body = await request.body()
        return {"body": body.decode(), "query": request.url.query, "one": request.headers["x-one"]}

    @app.post("/endless")
    async def endless(request: Request):
        async def parts():
            try:
                while True:
                    yield b"more "
                    await asyncio.sleep(0.001)
            finally:
                events.append("stream ended")

        return StreamingResponse(parts())

    @app.post("/slow")
    async def slow(request: Request):
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    return rag, app


@pytest.fixture
async def replica(tmp_path):
    events = []
    rag, app = opened(tmp_path, events)
    one = Replica.__new__(Replica)
    await one.__init__(lambda: (rag, app))
    one.events, one.rag = events, rag
    yield one
    one.__del__()


def holds(replica, chunk):
    """Whether a router sends requests with this chunk to the replica, by what it publishes."""
    balancer = Balancer()
    balancer.update({name: {} for name in "abc"} | {"this": replica.record_routing_stats()})
    return balancer.rank({chunk: 100}, {})[0] == ["this"]


async def collect(replica, path="/echo", body=b"text", chunks=()):
    return [m async for m in replica.answer({**SCOPE, "path": path}, body, dict.fromkeys(chunks, 1))]


async def test_a_request_goes_through_the_application(replica):
    start, *bodies = await collect(replica)
    assert start["status"] == 200
    assert b"".join(m["body"] for m in bodies) == b'{"body":"text","query":"a=1","one":"1"}'
    assert replica.events == ["begun"]


async def test_a_stream_that_nobody_reads_ends(replica):
    async with aclosing(replica.answer({**SCOPE, "path": "/endless"}, b"", {})) as messages:
        assert (await anext(messages))["status"] == 200
        assert (await anext(messages))["body"] == b"more "
    assert replica.events[-1] == "stream ended"


async def test_a_request_that_nobody_waits_for_is_cancelled(replica):
    waiting = asyncio.ensure_future(collect(replica, "/slow"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert replica.events[-1] == "cancelled"
    before = len(asyncio.all_tasks())
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= before


async def test_it_publishes_the_chunks_in_memory(replica):
    (one,) = replica.rag.encode(["The river Spree flows in Berlin."])
    assert holds(replica, one)
    replica.rag.forget([one])
    assert not holds(replica, one)


async def test_it_publishes_the_contexts_that_it_served(replica):
    name, unknown = (f"cachedContents/{one * 32}" for one in "ab")
    others = ["chunk", "a/b" * 1000, name + "/more"]
    await collect(replica, chunks=[name, *others])
    await collect(replica, "/nowhere", chunks=[unknown])
    assert holds(replica, name)
    assert not any(holds(replica, one) for one in (unknown, *others))


async def test_the_engine_is_closed_once(tmp_path):
    rag, app = opened(tmp_path, [])
    one = Replica.__new__(Replica)
    await one.__init__(lambda: (rag, app))
    one.__del__()
    with pytest.raises(RagCacheError, match="closed"):
        rag.generate("hi")
    del one
    gc.collect()
