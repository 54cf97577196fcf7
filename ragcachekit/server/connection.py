"""Where a request goes, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

CLIENT_GONE = 499
"""Status of a response that nobody reads."""

_Result = TypeVar("_Result")


def api_path(scope: Scope) -> str | None:
    """The path of a request to the API, ``/v1...``, without where the application is mounted; else None."""
    if scope["type"] != "http":
        return None
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if path.startswith("/v1") else None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of work that is cancelled when the client goes away; None then. The body must be read."""
    tasks = task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait(tasks)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
