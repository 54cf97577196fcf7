"""Contexts: made, found, prolonged and forgotten."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ragcachekit import RagCache
from ragcachekit.server.contexts.context import PREFIX, Context, ContextFiles
from ragcachekit.server.contexts.encoding import ContextEncoder
from ragcachekit.server.errors import ApiError
from ragcachekit.server.tenants import Tenant

log = logging.getLogger(__name__)

MOST_CHUNKS = 4096
"""Chunks of one context."""

NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
"""Names of contexts."""


class ContextStore:
    """The contexts of all tenants, whose chunks are encoded. For one event loop.

    A context belongs to the namespace of the key that made it: keys of one namespace share them, to others
    its name is as unknown as one that does not exist. When it ends, its chunks are forgotten, except those
    that another context of the namespace has.

    Parameters
    ----------
    rag : RagCache
    folder : path, optional
        Where contexts are stored, for this user alone (modes 0700 and 0600); they survive a restart. None:
        in memory. Processes of one machine may share it. StoreError if others may write to it.
    clock : callable
        Unix time in seconds.
    timeout : float, optional
        Seconds in which the chunks of one context must be encoded.
    """

    def __init__(
        self,
        rag: RagCache,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
        timeout: float | None = None,
    ) -> None:
        self._rag, self._files, self._clock, self._timeout = rag, ContextFiles(folder), clock, timeout
        self._encoder = ContextEncoder(rag)
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by owner: no tenant waits for another
        self._pending = defaultdict[str, list[Context]](list)
        self._failed = defaultdict[str, dict[str, Context]](dict)
        self._used = list[tuple[str, str]]()

    async def create(
        self,
        tenant: Tenant,
        chunks: Sequence[str],
        *,
        model: str,
        lifetime: Callable[[float], float],
        system: str | None = None,
        display_name: str = "",
        charge: Callable[[int], object] | None = None,
    ) -> Context:
        """Encode chunks and store them under a new name; cancelled, it stores nothing.

        Parameters
        ----------
        lifetime : callable
            When the context expires, of the time when it is made; ApiError for a time that is not allowed.
        charge : callable, optional
            Called with the number of tokens before any is computed.

        Raises
        ------
        ApiError
            400 for chunks that cannot be encoded, 429 beyond the tenant's contexts or their tokens, 504
            after ``timeout``.
        """
        lifetime(self._clock())
        if not 0 < len(chunks) <= MOST_CHUNKS:
            message = f"Cached contents have 1 to {MOST_CHUNKS} parts with text, not {len(chunks)}."
            raise ApiError(400, message, param="contents", code="invalid_value")
        owner, tokens = _owner(tenant), await self._encoder.count((*chunks, system or ""))
        name, at = PREFIX + secrets.token_hex(16), (0.0, 0.0, 0.0)
        new = Context(name, tenant.namespace, model, display_name, system, tuple(chunks), (), tokens, *at)
        async with self._locks[owner]:
            if self._failed[owner]:
                await self._swept(owner)
            pending = self._failed[owner] | {context.name: context for context in self._pending[owner]}
            stored = {context.name: context for context in await asyncio.to_thread(self._live, owner)}
            self._check(tenant, [*(pending | stored).values(), new])
            self._pending[owner].append(new)
        try:
            if charge is not None:
                charge(tokens)
            async with asyncio.timeout(self._timeout):
                made = await self._encoded(owner, new, lifetime)
        except BaseException as error:
            self._pending[owner].remove(new)
            self._failed[owner][name] = new
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), param="contents", code="invalid_value") from error
            if isinstance(error, TimeoutError):
                message = f"The contents were not encoded within {self._timeout:g} s; give fewer at once."
                raise ApiError(504, message, kind="server_error", code="timeout") from error
            raise
        self._pending[owner].remove(new)
        return made

    def get(self, tenant: Tenant, name: str) -> Context:
        """The context of that name, perhaps of a file; ApiError 404 if unknown, expired or another's."""
        found = self._files.get(_owner(tenant), name) if NAME.fullmatch(name) else None
        if found is None or found.expires <= self._clock():
            message = f"CachedContent not found (or permission denied): {name!r}."
            raise ApiError(404, message, param="cached_content", code="cached_content_not_found")
        return found

    @asynccontextmanager
    async def using(self, tenant: Tenant, name: str) -> AsyncIterator[Context]:
        """The context of that name, as :meth:`get`, for a request that lasts as long as the block.

        Where the context ends meanwhile, its chunks are forgotten at once, and again after the block.
        """
        use = _owner(tenant), name
        self._used.append(use)
        try:
            yield await asyncio.to_thread(self.get, tenant, name)
        finally:
            self._used.remove(use)

    def all(self, tenant: Tenant) -> list[Context]:
        """The tenant's contexts, the oldest first."""
        return self._live(_owner(tenant))

    async def update(self, tenant: Tenant, name: str, lifetime: Callable[[float], float]) -> Context:
        """Change when a context expires; ApiError 404 as for :meth:`get`."""
        owner = _owner(tenant)
        async with self._locks[owner]:
            now = self._clock()
            found = await asyncio.to_thread(self.get, tenant, name)
            context = replace(found, updated=now, expires=lifetime(now))
            await asyncio.to_thread(self._files.put, owner, context)
        return context

    async def delete(self, tenant: Tenant, name: str) -> None:
        """Remove a context and forget its chunks.

        Raises
        ------
        ApiError
            404 as for :meth:`get`. 500 if a tier of the cache cannot confirm that it forgot; the name is
            unknown from then on, and the next sweep tries again.
        """
        owner = _owner(tenant)
        async with self._locks[owner]:
            context = replace(await asyncio.to_thread(self.get, tenant, name), expires=0.0)
            await asyncio.to_thread(self._files.put, owner, context)
            if not await self._swept(owner):
                message = "The cache could not confirm the deletion. It is tried again; the content is gone."
                raise ApiError(500, message, kind="server_error")

    async def expire(self) -> None:
        """Forget what has expired, of all tenants; what fails is logged and tried again the next time."""
        for owner in {*await asyncio.to_thread(self._files.owners), *self._failed}:
            async with self._locks[owner]:
                await self._swept(owner)

    async def run(self, every: float = 30.0) -> NoReturn:
        """Expire contexts until cancelled, with so many seconds between."""
        while True:
            try:
                await self.expire()
            except Exception:
                log.exception("the contexts cannot be listed; it is tried again")
            await asyncio.sleep(every)

    # -- steps, with the owner's lock held but for _encoded --------------------------------------------

    async def _encoded(self, owner: str, new: Context, lifetime: Callable[[float], float]) -> Context:
        ids = await self._encoder.encode(new.chunks, new.namespace, new.system)
        now = self._clock()
        new = replace(new, chunk_ids=ids, created=now, updated=now, expires=lifetime(now))
        storing = asyncio.get_running_loop().run_in_executor(None, self._files.put, owner, new)
        cancelled = None
        while not storing.done():  # what a thread stores must not appear after a sweep
            try:
                await asyncio.wait((storing,))
            except asyncio.CancelledError as again:
                cancelled = again
        if (error := cancelled or storing.exception()) is not None:
            raise error
        return new

    async def _swept(self, owner: str) -> bool:
        try:
            await asyncio.to_thread(self._sweep, owner)
        except Exception:
            log.exception("contexts that ended could not be forgotten; it is tried again")
            return False
        return True

    def _live(self, owner: str) -> list[Context]:
        now = self._clock()
        return [context for context in self._files.all(owner) if context.expires > now]

    @staticmethod
    def _check(tenant: Tenant, contexts: Sequence[Context]) -> None:
        used = (len(contexts), sum(context.tokens for context in contexts))
        limits = (tenant.limits.contexts, tenant.limits.context_tokens)
        for count, most, what in zip(used, limits, ("cached contents", "tokens in them"), strict=True):
            if most is not None and count > most:
                message = f"{tenant.name!r} may have {most} {what}; this would make it {count}. Delete some."
                raise ApiError(429, message, kind="insufficient_quota", code="insufficient_quota")

    def _sweep(self, owner: str) -> None:
        """Forget the chunks of contexts that have ended, then the contexts."""
        self._files.remove_leftovers(owner)
        # In this order: a context that is being made goes from pending to the files, or to the failed ones.
        ended, live = dict(self._failed[owner]), {c.name: c for c in list(self._pending[owner])}
        now = self._clock()
        for context in self._files.all(owner):
            if context.name not in ended and context.name not in live:
                (ended if context.expires <= now else live)[context.name] = context
        kept = {text.strip() for context in live.values() for text in context.chunks}
        for context in (*ended.values(), *self._files.vanished(owner)):
            in_use = (owner, context.name) in self._used  # by a request that has read its texts
            texts = [text for text in context.chunks if text.strip() not in kept]
            if texts:
                self._rag.forget(texts=texts, namespace=context.namespace)
            if not in_use:
                self._files.remove(owner, context.name)
                self._failed[owner].pop(context.name, None)


def _owner(tenant: Tenant) -> str:
    return hashlib.sha256(tenant.namespace.encode()).hexdigest()[:32]
