"""What comes before a route: the API key, then headers and a body of bounded size."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcachekit.server.connection import api_path
from ragcachekit.server.errors import ApiError, overloaded
from ragcachekit.server.responses import response
from ragcachekit.server.tenants import Tenant

HEADER_BYTES = 32 << 10
"""Most bytes of all headers together."""

BODY_SECONDS = 60.0
"""Longest time for a body to arrive."""

OWN_BODIES, ALL_BODIES = 4, 16
"""How many bodies of the largest size may be in memory, for one tenant and for all."""

RETRY_AFTER = 1.0
_DRAINED = 8
_DRAIN_SECONDS = 5.0


class BodyLimit:
    """ASGI middleware that authenticates requests and reads their bodies, or refuses them.

    Refused are missing or wrong keys (401), bodies (413) and headers (431) that are too large, and bodies
    that arrive too slowly (408), or that would be too many bytes beside those of the tenant's other requests
    (429) or of all (503). The tenant is ``request.state.tenant`` afterwards. Only paths that begin with
    ``/v1`` are looked at.

    Parameters
    ----------
    app : ASGI application
    most : int
        Bytes of a body; a tenant's ``body_bytes`` can lower it.
    tenant : callable
        The tenant of a request's headers, or ApiError; :meth:`.ApiKeys.tenant`.
    seconds : float
        Longest time for a body to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        most: int,
        tenant: Callable[[Mapping[str, str]], Tenant],
        seconds: float = BODY_SECONDS,
    ) -> None:
        self._app, self._most, self._tenant, self._seconds = app, most, tenant, seconds
        self._budget = _Budget(most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on with its body in one piece."""
        if api_path(scope) is None:
            return await self._app(scope, receive, send)
        with self._budget.request() as hold:
            return await self._admit(hold, scope, receive, send)

    async def _admit(
        self, hold: Callable[[str, int], None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, arriving = Headers(scope=scope), _Arriving(receive)
        try:
            if sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES:
                message = f"The request's headers have more than {HEADER_BYTES} bytes."
                raise ApiError(431, message, code="headers_too_large")
            tenant = self._tenant(headers)
            own = tenant.limits.body_bytes
            most = self._most if own is None else min(own, self._most)
            body = await self._body(headers, arriving, most, partial(hold, tenant.name))
        except ApiError as error:
            if "expect" not in headers:  # else the client waits for a word before it sends the body
                await self._drain(arriving)
            return await response(error, scope)(scope, receive, send)
        if arriving.gone:
            return None
        scope.setdefault("state", {})["tenant"] = tenant
        return await self._app(scope, _replay(body, receive), send)

    async def _body(
        self, headers: Headers, arriving: _Arriving, most: int, hold: Callable[[int], None]
    ) -> bytes:
        parts, size, announced = list[bytes](), 0, headers.get("content-length", "")
        too_large = ApiError(413, f"The request's body has more than {most} bytes.", code="body_too_large")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise too_large
        try:
            async with asyncio.timeout(self._seconds):
                async for part in arriving:
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise too_large
                    hold(len(part))
        except TimeoutError:
            message = f"The request's body did not arrive within {self._seconds:g} s."
            raise ApiError(408, message, code="body_too_slow") from None
        return b"".join(parts)

    async def _drain(self, arriving: _Arriving) -> None:
        """Receive what the client still sends, within bounds: many read no answer before they sent all."""
        left = _DRAINED * self._most
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_DRAIN_SECONDS, self._seconds)):
                async for part in arriving:
                    left -= len(part)
                    if left < 0:
                        return


class _Budget:
    """How many bytes of bodies are in memory: those of running requests, by tenant."""

    def __init__(self, most: int) -> None:
        self._own, self._all, self._held = OWN_BODIES * most, ALL_BODIES * most, Counter[str]()

    @contextmanager
    def request(self) -> Iterator[Callable[[str, int], None]]:
        """A function that adds bytes of a tenant, or raises ApiError; they count until the block ends."""
        held = Counter[str]()

        def hold(tenant: str, size: int) -> None:
            if self._held[tenant] + size > self._own:
                message = f"The bodies of {tenant!r}'s requests have more than {self._own} bytes together."
                raise ApiError(
                    429, message, kind="requests", code="rate_limit_exceeded", retry_after=RETRY_AFTER
                )
            if self._held.total() + size > self._all:
                raise overloaded("The server holds too many requests; please try again later.", RETRY_AFTER)
            self._held[tenant] += size
            held[tenant] += size

        try:
            yield hold
        finally:
            self._held -= held


class _Arriving:
    """The parts of a body; ``gone``: the client went away before its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._ended, self.gone = receive, False, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        message = await self._receive()
        self.gone = message["type"] != "http.request"
        self._ended = self.gone or not message.get("more_body", False)
        return bytes(message.get("body", b""))


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
