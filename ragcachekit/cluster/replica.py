"""Replicas of Ray Serve: an engine each, which pass requests through the server's application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Scope

from ragcachekit.cluster.balancer import routing_stats
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.engine.request import to_thread
from ragcachekit.server.contexts import NAME

Opened = tuple[RagCache, FastAPI]
"""An engine and the server's application around it."""

_MAX_CONTEXTS = 4096  # names that a replica remembers


class Replica:
    """One engine and the server's application around it.

    ``open`` is called once, in the replica's process.
    """

    async def __init__(self, open: Callable[[], Opened]) -> None:  # type: ignore[misc]
        self._rag, self._app = await to_thread(open)
        self._names: dict[str, None] = {}
        self._answered = 0
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()  # the process ends with it

    async def answer(self, scope: Scope, body: bytes, chunks: Mapping[str, int]) -> AsyncIterator[Message]:
        """Run one HTTP request through the application; yields its ASGI messages.

        Closing it early, as when the client goes away, disconnects the request.
        """
        self._answered += 1
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        bodies = iter([body])

        async def receive() -> Message:
            for content in bodies:
                return {"type": "http.request", "body": content, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": self._app}, receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await sent.get()) is not None:
                if 200 <= message.get("status", 0) < 300:
                    self._note(chunks)
                yield message
            await task
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def record_routing_stats(self) -> dict[str, Any]:
        """What the replica holds, for the router, and how many requests it has had; Serve calls this."""
        held = routing_stats([*self._rag.chunks_in_memory(), *self._names])
        return {**held, "answered": self._answered}

    def __del__(self) -> None:
        """Write what is to be kept, and close the engine; Serve calls this after the last answer."""
        if (rag := self.__dict__.pop("_rag", None)) is not None:
            rag.flush()
            rag.close()

    def _note(self, chunks: Mapping[str, int]) -> None:
        """Remember names of contexts: the engine has only their chunks."""
        for name in chunks:
            if NAME.fullmatch(name):
                self._names.pop(name, None)
                self._names[name] = None
        while len(self._names) > _MAX_CONTEXTS:
            del self._names[next(iter(self._names))]
