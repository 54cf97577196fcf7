"""The deployment that reads requests and passes each on to the replica that the router chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from ragcachekit.cluster.chunk_reader import ChunkReader
from ragcachekit.engine.asyncio_api import to_thread

_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

front = FastAPI(openapi_url=None)


@serve.ingress(front)
class Ingress:
    """Reads the chunks of each request, and passes it on to the replica that the router chooses.

    ``reader`` is called once, in the ingress's process. Bodies of more than ``max_body_bytes`` are refused.
    """

    def __init__(
        self, replicas: DeploymentHandle[Any], reader: Callable[[], ChunkReader], max_body_bytes: int
    ) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._reader, self._most = reader(), max_body_bytes

    @front.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def forward(self, request: Request) -> Response:
        """The replica's response, as it comes."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._most:
                return _too_large(self._most)
        chunks = await to_thread(self._reader.chunks, request.headers, bytes(body))
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        messages: Any = self._replicas.remote(scope, bytes(body), chunks=chunks)
        start = await anext(messages)
        response = StreamingResponse(_bodies(messages), start["status"])
        response.raw_headers = list(start["headers"])
        return response


async def _bodies(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message.get("body", b"")


def _too_large(most: int) -> Response:
    error = {"message": f"The body is larger than {most} bytes.", "type": "invalid_request_error"}
    return JSONResponse({"error": {**error, "param": None, "code": "request_too_large"}}, 413)
