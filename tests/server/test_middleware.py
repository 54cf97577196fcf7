"""What comes before a route: keys before bodies, bodies of bounded size and time, clients that stall."""

import asyncio
import json
import socket

import httpx
import pytest
from fastapi import FastAPI, Request

from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Limits, Tenant, add_key
from ragcachekit.server.middleware import BodyLimit
from server_kit import LONG, MODEL, QUESTION, engine, served, until

MOST = 10_000


def known(headers):
    if headers.get("authorization") == "Bearer good":
        return Tenant("good", "good")
    raise ApiError(401, "who?", headers={"WWW-Authenticate": "Bearer"})


def application(seconds=5.0):
    app = FastAPI()

    @app.post("/v1/echo")
    async def echo(request: Request):
        return {"size": len(await request.body()), "tenant": request.state.tenant.name}

    @app.get("/health")
    async def health():
        return "well"

    return BodyLimit(app, MOST, known, seconds=seconds)


@pytest.fixture(scope="module")
def url():
    with served(application()) as url:
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=10) as client:
        yield client


def connected(url):
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10)


def pieces(total, size=1000):
    for _ in range(total // size):
        yield b"x" * size


GOOD = {"Authorization": "Bearer good"}


def test_bodies_up_to_the_limit_arrive_whole(client):
    for body in (b"", b"x" * MOST, pieces(MOST)):
        answer = client.post("/v1/echo", content=body, headers=GOOD)
        assert answer.status_code == 200
        assert answer.json()["tenant"] == "good"
    assert answer.json()["size"] == MOST


@pytest.mark.parametrize("total", [MOST + 1000, 7 * MOST])
@pytest.mark.parametrize(("announced", "key"), [(True, "good"), (False, "good"), (False, "wrong")])
def test_larger_ones_and_strangers_get_an_answer_though_they_go_on_sending(client, total, announced, key):
    body = b"x" * total if announced else pieces(total)
    answer = client.post("/v1/echo", content=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == (413 if key == "good" else 401)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers.get("www-authenticate") == (None if key == "good" else "Bearer")


@pytest.mark.parametrize("mounted", ["", "/llm"])
async def test_no_path_leads_around_the_door(mounted):
    app = httpx.ASGITransport(application(), root_path=mounted)
    async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
        for path in ("/v1/echo", "//v1/echo", "/V1/echo", "/x/../v1/echo", "/%76%31/echo"):
            answer = await client.post(mounted + path)
            assert answer.status_code in (401, 404), path
        assert (await client.post(f"{mounted}/v1/echo", headers=GOOD)).json()["tenant"] == "good"
        assert (await client.get(f"{mounted}/health")).json() == "well"


def test_who_waits_for_a_word_before_sending_gets_the_answer_at_once(url):
    head = f"POST /v1/echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {MOST + 1}\r\n"
    with connected(url) as connection:
        connection.sendall(f"{head}Authorization: Bearer good\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_not_waited_for():
    with served(application(0.05)) as url, connected(url) as connection:
        head = "POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nAuthorization: Bearer good\r\n"
        connection.sendall(f"{head}\r\nabc".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


async def test_a_client_that_goes_away_reaches_no_route():
    async def never(scope, receive, send):
        raise AssertionError("the route was called")

    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        raise AssertionError("there is nobody to answer")

    headers = [(b"authorization", b"Bearer good")]
    scope = {"type": "http", "path": "/v1/echo", "headers": headers}
    await asyncio.wait_for(BodyLimit(never, MOST, known)(scope, receive, send), 5)


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
        until(lambda: not rag.queue.running)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            asked = {**ASKED, "max_tokens": 1}
            answer = await http.post("/v1/chat/completions", json=asked, headers={"x-api-key": key.decode()})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    ("client", "keyed", "sent", "seen"),
    [
        ("10.0.0.1", True, False, False),
        ("10.0.0.1", True, True, True),
        ("10.0.0.1", False, False, True),
        ("::1", True, False, True),
    ],
)
async def test_numbers_about_all_tenants_need_a_key(tmp_path, client, keyed, sent, seen):
    file = tmp_path / "keys.json"
    key = add_key(file, "a")
    with engine() as rag:
        config = ServerConfig(MODEL, file if keyed else None)
        app = create_app(rag, config, metrics=lambda: (b"numbers", "text/plain"))
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            headers = {"Authorization": f"Bearer {key if sent else 'wrong'}"}
            health, metrics = [await http.get(path, headers=headers) for path in ("/health", "/metrics")]
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert ("waiting" in health.json()) == seen
    assert metrics.status_code == (200 if seen else 401)
    assert (metrics.text == "numbers") == seen
