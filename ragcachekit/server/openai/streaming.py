"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragcachekit import Answer
from ragcachekit.engine.asyncio_api import AsyncAnswerStream
from ragcachekit.server.connection import while_connected
from ragcachekit.server.openai.work import Work

_HEARTBEAT = b": heartbeat\n\n"


class EventStream(Response):
    """The answers of ``streams``, which were entered, as events; ``stack`` is left in the end.

    ``ended`` gets all answers, ``charge`` the tokens computed when the stream ends, however it does;
    ``error_body`` makes the last event out of an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Work,
        streams: list[AsyncAnswerStream],
        stack: AsyncExitStack,
        *,
        headers: Mapping[str, str],
        heartbeat: float,
        ended: Callable[[list[Answer]], dict[str, Any] | None],
        charge: Callable[[int], object],
        error_body: Callable[[Exception], dict[str, Any]],
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work, self._streams, self._stack = work, streams, stack
        self._heartbeat, self._ended, self._error_body = heartbeat, ended, error_body
        self._charge = charge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await while_connected(receive, self._send(send))
            finally:
                self._charge(sum(stream.tokens for stream in self._streams))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = self._events()
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        choices, queue = self._work.choices, asyncio.Queue[tuple[int, str | Exception | None]]()
        pumps = [asyncio.create_task(_pump(n, stream, queue)) for n, stream in enumerate(self._streams)]
        try:
            for choice in choices:
                if (event := choice.begin()) is not None:
                    yield _data(event)
            going = len(pumps)
            while going:
                try:
                    async with asyncio.timeout(self._heartbeat):
                        number, piece = await queue.get()
                except TimeoutError:
                    yield _HEARTBEAT
                    continue
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    going -= 1
                    for event in choices[number].end(self._streams[number].answer):
                        yield _data(event)
                elif (event := choices[number].push(piece)) is not None:
                    yield _data(event)
            if (usage := self._ended([stream.answer for stream in self._streams])) is not None:
                yield _data(self._work.form.piece([], usage))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _data(self._error_body(error))
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(
    number: int, stream: AsyncAnswerStream, queue: asyncio.Queue[tuple[int, str | Exception | None]]
) -> None:
    end: Exception | None = None
    try:
        async for piece in stream:
            queue.put_nowait((number, piece))
    except Exception as error:
        end = error
    queue.put_nowait((number, end))


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
