"""What comes before a route: a stop, the API key, and a body of bounded size; and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any, TypeVar
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcachekit.server.errors import ApiError, api_path, response
from ragcachekit.server.keys import Tenant, Usage

log = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""Time in which a body must arrive."""

CLIENT_GONE = 499
"""Status when the client has disconnected."""

_MAX_DRAINED = 8  # bodies of the largest size
_DRAIN_SECONDS = 5.0
_Result = TypeVar("_Result")


class BodyLimit:
    """ASGI middleware that authenticates requests and reads their bodies, or refuses them.

    It refuses missing or wrong keys (401), requests beyond a key's limits (429), large bodies (413), and
    bodies that arrive too slowly (408). The tenant is
    ``request.state.tenant`` afterwards, and what it may use ``request.state.grant``, where ``usage`` counts
    requests. Other paths than ``/v1...`` pass.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        tenant: Callable[[Mapping[str, str]], Tenant],
        usage: Usage | None = None,
        seconds: float = BODY_SECONDS,
    ) -> None:
        self._app, self._max_bytes, self._tenant, self._seconds = app, max_bytes, tenant, seconds
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on with its body in one piece."""
        if api_path(scope) is None:
            return await self._app(scope, receive, send)
        request, body = Request(scope, receive), bytearray()
        parts = request.stream()
        with ExitStack() as stack:
            try:
                request.state.tenant = tenant = self._tenant(request.headers)
                if self._usage is not None:
                    request.state.grant = stack.enter_context(self._usage.admit(tenant))
                await self._read(request, parts, body)
            except ClientDisconnect:
                return None
            except ApiError as error:
                if "expect" not in request.headers:  # else the client waits for an answer before it sends
                    await self._drain(parts)
                return await response(error, scope)(scope, receive, send)
            return await self._app(scope, _replay(bytes(body), receive), send)

    async def _read(self, request: Request, parts: AsyncIterator[bytes], body: bytearray) -> None:
        message = f"The request's body has more than {self._max_bytes} bytes."
        too_large = ApiError(413, message, code="body_too_large")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._seconds):
                async for part in parts:
                    if len(body) + len(part) > self._max_bytes:
                        raise too_large
                    body += part
        except TimeoutError:
            message = f"The request's body did not arrive within {self._seconds:g} s."
            raise ApiError(408, message, code="body_too_slow") from None

    async def _drain(self, parts: AsyncIterator[bytes]) -> None:
        """Receive what the client still sends, within bounds: many read no answer before they sent all."""
        left = _MAX_DRAINED * self._max_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(min(_DRAIN_SECONDS, self._seconds)):
                async for part in parts:
                    left -= len(part)
                    if left < 0:
                        return


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


class Gate:
    """ASGI middleware that names the API's requests, and ends those whose client takes nothing for a time."""

    def __init__(self, app: ASGIApp, send_timeout: float) -> None:
        self._app, self._send_timeout = app, send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if api_path(scope) is None:
            return await self._app(scope, receive, send)
        name = f"req_{uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = name  # as OpenAI and Anthropic call it
            try:
                async with asyncio.timeout(self._send_timeout):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        try:
            await self._app(scope, receive, named)
        except _Stalled:
            log.warning("%s: the client read nothing for %g s", name, self._send_timeout)


class _Stalled(Exception):
    pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of work that is cancelled when the client goes away; None then. The body must be read."""
    tasks = task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait(tasks)


async def disconnected(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
