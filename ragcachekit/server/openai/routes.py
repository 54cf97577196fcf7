"""Chat and text completions, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ragcachekit.server.connection import CLIENT_GONE, while_connected
from ragcachekit.server.errors import ApiError
from ragcachekit.server.openai.answers import cache_header, usage_of
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
    tenant, size = request.state.tenant, len(await request.body()) // 4  # OpenAI estimates so, too
    async with AsyncExitStack() as stack:
        grant = await stack.enter_async_context(services.usage.admit(tenant, size))
        body, context = await parsed(request, kind), None
        if (name := named_context(body)) is not None:
            context = await stack.enter_async_context(services.contexts.using(tenant, name))
        work = Work(services, tenant, body, context)
        grant.expect(work.expected_tokens(size), len(work.choices))
        if not body.stream:
            answers = await while_connected(request.receive, work.answers())
            if answers is None:
                return Response(status_code=CLIENT_GONE)
            choices = [choice.whole(answer) for choice, answer in zip(work.choices, answers, strict=True)]
            grant.used(sum(a.report.link.prompt_tokens + a.report.output_tokens for a in answers))
            prompts = work.by_prompt(answers)
            whole = work.form.whole(choices, usage_of(prompts))
            return JSONResponse(whole, headers={**grant.headers, **cache_header(prompts)})
        streams = [await stack.enter_async_context(stream) for stream in work.streams()]
        wanted = body.stream_options is not None and body.stream_options.include_usage

        return EventStream(
            work,
            streams,
            stack.pop_all(),
            headers=grant.headers,
            heartbeat=services.config.heartbeat,
            ended=lambda answers: usage_of(work.by_prompt(answers)) if wanted else None,
            charge=grant.used,
            error_body=lambda error: api_error(error, services.config.retry_after, request.scope).body(),
        )
