"""Chat and text completions, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ragcachekit import Answer
from ragcachekit.server.connection import CLIENT_GONE, while_connected
from ragcachekit.server.errors import ApiError
from ragcachekit.server.limits import Grant
from ragcachekit.server.openai.answers import usage_of
from ragcachekit.server.openai.schemas import ChatRequest, Completion, TextRequest
from ragcachekit.server.openai.streaming import EventStream
from ragcachekit.server.openai.work import Work, named_context
from ragcachekit.server.parsing import parsed
from ragcachekit.server.responses import api_error
from ragcachekit.server.services import Services


def router(services: Services) -> APIRouter:
    """The routes of one application."""
    routes, created = APIRouter(prefix="/v1"), int(time.time())
    model = {"id": services.model_name, "object": "model", "created": created, "owned_by": "ragcachekit"}

    @routes.get("/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [model]}

    @routes.get("/models/{name:path}")
    async def one_model(name: str) -> Mapping[str, Any]:
        if name != model["id"]:
            message = f"The model '{name}' does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(services, request, ChatRequest)

    @routes.post("/completions")
    async def text(request: Request) -> Response:
        return await _complete(services, request, TextRequest)

    return routes


async def _complete(services: Services, request: Request, kind: type[Completion]) -> Response:
    tenant, body = request.state.tenant, await parsed(request, kind)
    async with AsyncExitStack() as stack:
        context = None
        if (name := named_context(body)) is not None:
            context = await stack.enter_async_context(services.contexts.using(tenant, name))
        work = Work(services, tenant, body, context)
        # OpenAI's limits estimate by characters, too.
        expected = len(await request.body()) // 4 + work.expected_tokens
        grant = await stack.enter_async_context(services.usage.admit(tenant, expected))
        if not body.stream:
            answers = await while_connected(request.receive, work.answers())
            if answers is None:
                return Response(status_code=CLIENT_GONE)
            choices = [choice.whole(answer) for choice, answer in zip(work.choices, answers, strict=True)]
            whole = work.form.whole(choices, _counted(work, answers, grant))
            return JSONResponse(whole, headers=grant.headers)
        streams = [await stack.enter_async_context(stream) for stream in work.streams()]
        wanted = body.stream_options is not None and body.stream_options.include_usage

        def ended(answers: list[Answer]) -> dict[str, Any] | None:
            usage = _counted(work, answers, grant)
            return usage if wanted else None

        return EventStream(
            work,
            streams,
            stack.pop_all(),
            headers=grant.headers,
            heartbeat=services.config.heartbeat,
            ended=ended,
            error_body=lambda error: api_error(error, services.config.retry_after, request.scope).body(),
        )


def _counted(work: Work, answers: list[Answer], grant: Grant) -> dict[str, Any]:
    usage = usage_of(work.by_prompt(answers))
    grant.used(usage["total_tokens"])
    return usage
