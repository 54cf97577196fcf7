"""The door: keys before bodies, bodies of bounded size and time, on a real server and by hand."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Tenant
from ragcachekit.server.middleware import MAX_HEADER_BYTES, BodyLimit
from ragcachekit.server.responses import parsed

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


@contextmanager
def serving(app):
    """The address of a real server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def address():
    with serving(application()) as address:
        yield address


@pytest.fixture
def client(address):
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=10) as client:
        yield client


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
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("key", ["good", "wrong"])
def test_larger_ones_and_strangers_get_an_answer_though_they_go_on_sending(client, total, announced, key):
    body = b"x" * total if announced else pieces(total)
    answer = client.post("/v1/echo", content=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == (413 if key == "good" else 401)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers.get("www-authenticate") == (None if key == "good" else "Bearer")


def test_large_headers_are_refused(client):
    answer = client.post("/v1/echo", headers={**GOOD, "X-Large": "x" * MAX_HEADER_BYTES})
    assert answer.status_code == 431


def test_other_paths_need_no_key(client):
    assert client.get("/health").json() == "well"


@pytest.mark.parametrize("mounted", ["", "/llm"])
async def test_no_path_leads_around_the_door(mounted):
    app = httpx.ASGITransport(application(), root_path=mounted)
    async with httpx.AsyncClient(transport=app, base_url="http://test") as client:
        for path in ("/v1/echo", "//v1/echo", "/V1/echo", "/x/../v1/echo", "/%76%31/echo"):
            answer = await client.post(mounted + path)
            assert answer.status_code in (401, 404), path
        assert (await client.post(f"{mounted}/v1/echo", headers=GOOD)).json()["tenant"] == "good"
        assert (await client.get(f"{mounted}/health")).json() == "well"


def test_who_waits_for_a_word_before_sending_gets_the_answer_at_once(address):
    head = f"POST /v1/echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {MOST + 1}\r\n"
    with socket.create_connection(address, 10) as connection:
        connection.sendall(f"{head}Authorization: Bearer good\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_not_waited_for():
    with serving(application(0.05)) as address, socket.create_connection(address, 10) as connection:
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


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    n: int = 1


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"{", "We could not parse the JSON body of your request", None),
        (b"", "We could not parse the JSON body of your request", None),
        (b"[" * 100_000, "recursion limit", None),
        (b'{"model": "m", "x": 1}', "Unrecognized request argument supplied: x", None),
        (b"{}", "Missing required parameter: 'model'", "model"),
        (b'{"model": "m", "n": "x"}', "Invalid value for 'n'", "n"),
        (b"3", "Invalid type for ''", None),
    ],
)
async def test_bodies_are_refused_as_openai_does(body, message, param):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    with pytest.raises(ApiError, match=message) as error:
        await parsed(Request({"type": "http"}, receive), Body)
    assert (error.value.status, error.value.param) == (400, param)
