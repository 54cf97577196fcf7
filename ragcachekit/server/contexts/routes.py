"""The routes of contexts, ``/v1beta/cachedContents``, with requests, responses and errors as Gemini's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ragcachekit.server.connection import CLIENT_GONE, while_connected
from ragcachekit.server.contexts.context import PREFIX, Context
from ragcachekit.server.contexts.store import ContextStore
from ragcachekit.server.contexts.wire import Change, NewContext, described
from ragcachekit.server.errors import ApiError
from ragcachekit.server.limits import Grant, Usage
from ragcachekit.server.parsing import parsed
from ragcachekit.server.tenants import Tenant

MOST_PER_PAGE = 1000


def router(
    store: ContextStore,
    usage: Usage,
    model: str,
    tenant: Callable[[Request], Tenant] = lambda request: request.state.tenant,
) -> APIRouter:
    """The routes of the contexts in ``store``.

    ``model`` is the name that requests must give, with or without ``models/``. ``tenant`` finds who asks, or
    raises ApiError; by default it is who :class:`.BodyLimit` found.
    """
    routes = APIRouter(prefix="/v1beta/cachedContents")

    @routes.post("")
    async def create(request: Request) -> Response:
        owner, size = tenant(request), len(await request.body()) // 4
        async with usage.admit(owner, size) as grant:
            return await made(request, owner, await parsed(request, NewContext), grant)

    async def made(request: Request, owner: Tenant, body: NewContext, grant: Grant) -> Response:
        if body.model.removeprefix("models/") != model:
            message = f"The model {body.model!r} does not exist; it is 'models/{model}'."
            raise ApiError(404, message, param="model", code="model_not_found")
        work = store.create(
            owner,
            body.chunks(),
            model=model,
            system=body.system(),
            display_name=body.display_name,
            lifetime=body,
            charge=grant.used,
        )
        context = await while_connected(request.receive, work)
        if context is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(_whole(context), headers=grant.headers)

    @routes.get("")
    async def all_of_them(request: Request) -> Response:
        async with usage.admit(tenant(request)) as grant:
            contexts = await asyncio.to_thread(store.all, tenant(request))
            return JSONResponse(_page(contexts, request), headers=grant.headers)

    @routes.get("/{key}")
    async def one(request: Request, key: str) -> Response:
        async with usage.admit(tenant(request)) as grant:
            found = await asyncio.to_thread(store.get, tenant(request), PREFIX + key)
            return JSONResponse(_whole(found), headers=grant.headers)

    @routes.patch("/{key}")
    async def update(request: Request, key: str) -> Response:
        change = await parsed(request, Change)
        mask = request.query_params.get("updateMask", "ttl")
        if {name.strip() for name in mask.split(",")} - {"ttl", "expireTime", "expire_time"}:
            raise ApiError(400, "Only 'ttl' or 'expireTime' can be changed.", param="updateMask")
        if change.ttl is None and change.expire_time is None:
            raise ApiError(400, "Missing required parameter: 'ttl' or 'expireTime'.", param="ttl")
        async with usage.admit(tenant(request)) as grant:
            changed = await store.update(tenant(request), PREFIX + key, change)
            return JSONResponse(_whole(changed), headers=grant.headers)

    @routes.delete("/{key}")
    async def delete(request: Request, key: str) -> Response:
        async with usage.admit(tenant(request)) as grant:
            await store.delete(tenant(request), PREFIX + key)
            return JSONResponse({}, headers=grant.headers)

    return routes


def _whole(context: Context) -> dict[str, Any]:
    return {**described(context), "chunkIds": context.chunk_ids}


def _page(contexts: list[Context], request: Request) -> dict[str, Any]:
    size, token = request.query_params.get("pageSize", "100"), request.query_params.get("pageToken", "")
    if not size.isdecimal() or not 0 < int(size[:9]) <= MOST_PER_PAGE:
        message = f"Invalid value for 'pageSize': 1 to {MOST_PER_PAGE}."
        raise ApiError(400, message, param="pageSize", code="invalid_value")
    places = {
        f"{context.created:017.6f}-{context.name.removeprefix(PREFIX)}": context for context in contexts
    }
    after = sorted(place for place in places if place > token)
    page: dict[str, Any] = {"cachedContents": [described(places[place]) for place in after[: int(size)]]}
    return {**page, "nextPageToken": after[int(size) - 1]} if len(after) > int(size) else page
