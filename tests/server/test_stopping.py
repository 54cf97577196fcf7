"""What must not hold up a stop or other tenants: stalled clients, a flush that hangs, bodies, metrics."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import pytest
import uvicorn

from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server import app as server_process
from ragcachekit.server.keys import Limits, Tenant, add_key
from ragcachekit.server.middleware import MAX_BODIES, MAX_TENANT_BODIES, Activity, BodyLimit
from server_kit import LONG, MODEL, QUESTION, engine, until

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50}


def scope(path, headers=(), method="POST"):
    return {
        **{"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": list(headers), "client": ("10.0.0.1", 1), "scheme": "http", "root_path": ""},
    }


def receiving(*bodies):
    parts = list(bodies)

    async def receive():
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        return await asyncio.Event().wait()

    return receive


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_frees_its_place(stream, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "a", limits=Limits(parallel=1)).encode()
    with engine() as rag:
        app = create_app(rag, ServerConfig(MODEL, file, heartbeat=0.05))

        async def send(message):
            await asyncio.Event().wait()

        for _ in range(2):  # the second gets 429, which it does not read either, if its place was not freed
            body = json.dumps({**ASKED, "stream": stream}).encode()
            async with asyncio.timeout(LONG):
                await app(scope("/v1/chat/completions", [(b"x-api-key", key)]), receiving(body), send)
            assert app.state.activity.running == 0
        until(lambda: not rag.queue.running)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            asked = {**ASKED, "max_tokens": 1}
            answer = await http.post("/v1/chat/completions", json=asked, headers={"x-api-key": key.decode()})
            assert answer.status_code == 200


async def test_a_flush_that_hangs_does_not_keep_the_stop(monkeypatch, caplog):
    with engine() as rag:
        seconds = []
        monkeypatch.setattr(rag, "flush", lambda timeout=None: seconds.append(timeout))
        app = create_app(rag, ServerConfig(MODEL, flush_timeout=0.25))
        async with app.router.lifespan_context(app):
            pass
    assert seconds == [0.25]
    assert "not done within 0.25 s" in caplog.text


STUCK = """
import asyncio, socket, sys
from contextlib import asynccontextmanager
from fastapi import FastAPI
from ragcachekit.server.middleware import Activity
from ragcachekit.server.app import serve

@asynccontextmanager
async def lifespan(_):
    yield
    print("stopping", flush=True)
    await asyncio.sleep(600)

app = FastAPI(lifespan=lifespan)
app.state.activity = Activity()
bound = socket.create_server(("127.0.0.1", 0))
print(bound.getsockname()[1], flush=True)
serve(app, bound)
"""


@pytest.fixture
def stuck():
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip()
            until(lambda: answers(f"http://127.0.0.1:{port}/"))
            yield process
        finally:
            process.kill()


def answers(url):
    try:
        return httpx.get(url).status_code == 404
    except httpx.TransportError:
        return False


def test_a_second_signal_ends_a_stop_that_hangs(stuck):
    stuck.send_signal(signal.SIGTERM)
    assert stuck.stdout.readline() == "stopping\n"
    until(lambda: stuck.send_signal(signal.SIGINT) or stuck.poll() is not None)
    assert stuck.returncode == -signal.SIGINT


def test_a_signal_that_is_sent_and_forwarded_counts_once(monkeypatch):
    now, raised = [100.0], []
    monkeypatch.setattr(server_process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server_process.signal, "raise_signal", raised.append)
    activity = Activity()
    server = server_process.GracefulServer(uvicorn.Config("unused:app"), activity)
    for seconds, ended in ((0, []), (0.01, []), (0.9, []), (1.0, [signal.SIGTERM])):
        now[0] = 100 + seconds
        server.handle_exit(signal.SIGTERM, None)
        assert activity.stopping
        assert raised == ended


def known(headers):
    return Tenant(headers["x-api-key"], "a")


async def test_bodies_in_memory_are_bounded_per_tenant_and_together():
    inside, go_on, most = [], asyncio.Event(), 1000

    async def hold(scope, receive, send):
        inside.append(scope["state"]["tenant"].name)
        await go_on.wait()

    door = BodyLimit(hold, most, known, seconds=5)
    tasks, answered = [], []

    async def send(message):
        answered.append(message)

    async def come(name):
        headers = [(b"x-api-key", name.encode()), (b"expect", b"100-continue")]
        tasks.append(asyncio.create_task(door(scope("/v1/x", headers), receiving(b"x" * most), send)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        statuses = [message["status"] for message in answered if "status" in message]
        answered.clear()
        return statuses

    for n in range(MAX_BODIES):
        assert await come(f"t{n // MAX_TENANT_BODIES}") == []
    assert await come("t0") == [429]
    assert await come("other") == [503]
    go_on.set()
    await asyncio.gather(*tasks)
    assert len(inside) == MAX_BODIES
    assert await come("t0") == []
    await asyncio.gather(*tasks)
    assert len(inside) == MAX_BODIES + 1


@pytest.mark.parametrize(
    ("client", "keyed", "public", "sent", "seen"),
    [
        ("10.0.0.1", True, False, False, False),
        ("10.0.0.1", True, False, True, True),
        ("10.0.0.1", True, True, False, True),
        ("10.0.0.1", False, False, False, True),
        ("127.0.0.1", True, False, False, True),
        ("::1", True, False, False, True),
    ],
)
async def test_numbers_about_all_tenants_need_a_key(tmp_path, client, keyed, public, sent, seen):
    file = tmp_path / "keys.json"
    key = add_key(file, "a")
    with engine() as rag:
        config = ServerConfig(MODEL, file if keyed else None, public_metrics=public)
        app = create_app(rag, config, metrics=lambda: (b"numbers", "text/plain"))
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            headers = {"Authorization": f"Bearer {key if sent else 'wrong'}"}
            health, metrics = [await http.get(path, headers=headers) for path in ("/health", "/metrics")]
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert ("waiting" in health.json()) == seen
    assert metrics.status_code == (200 if seen else 401)
    assert (metrics.text == "numbers") == seen
