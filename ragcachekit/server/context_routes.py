"""The routes of contexts, ``/v1beta/cachedContents``, with requests, responses and errors as Gemini's."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ragcachekit.server.contexts import PREFIX, Context, ContextStore
from ragcachekit.server.errors import ApiError, invalid, parsed
from ragcachekit.server.middleware import CLIENT_GONE, while_connected
from ragcachekit.server.schemas import Some

HOUR = 3600.0
MAX_LIFETIME = 10 * 365 * 24 * HOUR


class _Body(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", strict=True)


class _Part(_Body):
    text: str


class _Content(_Body):
    role: str | None = None
    parts: Some[_Part]

    def texts(self) -> list[str]:
        return [part.text for part in self.parts if part.text.strip()]


class Lifetime(_Body):
    """When a context expires: ``ttl`` seconds from now, or a time; by default an hour from now."""

    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,10}(\.[0-9]{1,9})?s$")] | None = None
    expire_time: AwareDatetime | None = None

    def __call__(self, now: float) -> float:
        """The Unix time when it expires; ApiError 400 for both, for the past, and beyond ten years."""
        if self.ttl is not None and self.expire_time is not None:
            raise invalid("Invalid value for 'ttl': give either 'ttl' or 'expireTime'.", "ttl")
        if self.expire_time is not None:
            param, expires = "expireTime", self.expire_time.timestamp()
        else:
            param, expires = "ttl", now + (float(self.ttl[:-1]) if self.ttl else HOUR)
        if not now < expires <= now + MAX_LIFETIME:
            message = f"Invalid value for '{param}': a context expires after now, and within ten years."
            raise invalid(message, param)
        return expires


class NewContext(Lifetime):
    """Body of a request that makes a context; each part is a chunk, whatever its content's role."""

    model: str
    contents: Some[_Content]
    system_instruction: _Content | None = None
    display_name: str = Field("", max_length=128)


class Change(Lifetime):
    """Body of a request that changes a context: only when it expires can change."""

    name: str | None = None


def _described(context: Context) -> dict[str, Any]:
    """A context as a response; its texts are not part of one."""
    return {
        "name": context.name,
        "model": f"models/{context.model}",
        "displayName": context.display_name,
        "createTime": _time(context.created),
        "updateTime": _time(context.updated),
        "expireTime": _time(context.expires),
        "usageMetadata": {"totalTokenCount": context.tokens},
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def router(store: ContextStore, model: str) -> APIRouter:
    """The routes of the contexts in ``store``; requests must give ``model``, with or without ``models/``."""
    routes = APIRouter(prefix="/v1beta/cachedContents")

    @routes.post("")
    async def create(request: Request) -> Response:
        body = await parsed(request, NewContext)
        if body.model.removeprefix("models/") != model:
            message = f"The model {body.model!r} does not exist; it is 'models/{model}'."
            raise ApiError(404, message, param="model", code="model_not_found")
        work = store.create(
            request.state.tenant,
            [text for content in body.contents for text in content.texts()],
            model=model,
            system="\n".join(body.system_instruction.texts()) if body.system_instruction else None,
            display_name=body.display_name,
            lifetime=body,
            charge=request.state.grant.expect,
        )
        context = await while_connected(request.receive, work)
        return Response(status_code=CLIENT_GONE) if context is None else _whole(context)

    @routes.get("")
    async def list_all(request: Request) -> Response:
        found = await asyncio.to_thread(store.all, request.state.tenant)
        return JSONResponse({"cachedContents": list(map(_described, found))})

    @routes.get("/{key}")
    async def get(request: Request, key: str) -> Response:
        return _whole(await asyncio.to_thread(store.get, request.state.tenant, PREFIX + key))

    @routes.patch("/{key}")
    async def update(request: Request, key: str) -> Response:
        change = await parsed(request, Change)
        if {*request.query_params.get("updateMask", "ttl").split(",")} - {"ttl", "expireTime", "expire_time"}:
            raise invalid("Only 'ttl' or 'expireTime' can be changed.", "updateMask", None)
        if change.ttl is None and change.expire_time is None:
            raise invalid("Missing required parameter: 'ttl' or 'expireTime'.", "ttl", None)
        return _whole(await store.update(request.state.tenant, PREFIX + key, change))

    @routes.delete("/{key}")
    async def delete(request: Request, key: str) -> Response:
        await store.delete(request.state.tenant, PREFIX + key)
        return JSONResponse({})

    return routes


def _whole(context: Context) -> Response:
    return JSONResponse({**_described(context), "chunkIds": context.chunk_ids})
