"""Contexts: made, found, prolonged and forgotten."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ragcachekit import RagCache
from ragcachekit.engine.asyncio_api import to_thread
from ragcachekit.errors import RagCacheError
from ragcachekit.server.contexts.context import PREFIX, Context, ContextFiles
from ragcachekit.server.errors import ApiError
from ragcachekit.server.tenants import Tenant

log = logging.getLogger(__name__)

MOST_CHUNKS = 4096
"""Chunks of one context."""

NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
"""Names of contexts."""

_PLACE = "Zq7xContext"  # in no template


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
    """

    def __init__(
        self, rag: RagCache, folder: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._rag, self._files, self._clock = rag, ContextFiles(folder), clock
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by owner: no tenant waits for another
        self._pending = defaultdict[str, list[Context]](list)
        self._failed = defaultdict[str, dict[str, Context]](dict)
        self._encoding = asyncio.Semaphore(1)

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
            400 for chunks that cannot be encoded, 429 beyond the tenant's contexts or their tokens.
        """
        lifetime(self._clock())
        if not 0 < len(chunks) <= MOST_CHUNKS:
            message = f"Cached contents have 1 to {MOST_CHUNKS} parts with text, not {len(chunks)}."
            raise ApiError(400, message, param="contents", code="invalid_value")
        owner, tokens = _owner(tenant), await to_thread(self._count, (*chunks, system or ""))
        name, at = PREFIX + secrets.token_hex(16), (0.0, 0.0, 0.0)
        new = Context(name, tenant.namespace, model, display_name, system, tuple(chunks), (), tokens, *at)
        async with self._locks[owner]:
            pending = {context.name: context for context in self._pending[owner]}
            stored = {context.name: context for context in await asyncio.to_thread(self._live, owner)}
            self._check(tenant, [*(pending | stored).values(), new])
            self._pending[owner].append(new)
        try:
            if charge is not None:
                charge(tokens)
            made = await self._encoded(owner, new, lifetime)
        except BaseException as error:
            self._pending[owner].remove(new)
            self._failed[owner][name] = new
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), param="contents", code="invalid_value") from error
            raise
        self._pending[owner].remove(new)
        return made

    def get(self, tenant: Tenant, name: str) -> Context:
        """The context of that name; ApiError 404 if it is unknown, expired or another tenant's."""
        found = self._files.get(_owner(tenant), name) if NAME.fullmatch(name) else None
        if found is None or found.expires <= self._clock():
            message = f"CachedContent not found (or permission denied): {name[:100]!r}."
            raise ApiError(404, message, param="cached_content", code="cached_content_not_found")
        return found

    def all(self, tenant: Tenant) -> list[Context]:
        """The tenant's contexts, the oldest first."""
        return self._live(_owner(tenant))

    async def update(self, tenant: Tenant, name: str, lifetime: Callable[[float], float]) -> Context:
        """Change when a context expires; ApiError 404 as for :meth:`get`."""
        owner = _owner(tenant)
        async with self._locks[owner]:
            now = self._clock()
            context = replace(self.get(tenant, name), updated=now, expires=lifetime(now))
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
            context = replace(self.get(tenant, name), expires=0.0)
            await asyncio.to_thread(self._files.put, owner, context)
            try:
                await asyncio.to_thread(self._sweep, owner)
            except (RagCacheError, OSError) as error:
                _unconfirmed(error)

    async def expire(self) -> None:
        """Forget what has expired, of all tenants; what fails is logged and tried again the next time."""
        for owner in {*await asyncio.to_thread(self._files.owners), *self._failed}:
            async with self._locks[owner]:
                try:
                    await asyncio.to_thread(self._sweep, owner)
                except (RagCacheError, OSError):
                    log.exception("expired contexts could not be forgotten; it is tried again")

    async def run(self, every: float = 30.0) -> NoReturn:
        """Expire contexts until cancelled, with so many seconds between."""
        while True:
            await self.expire()
            await asyncio.sleep(every)

    # -- steps, in a thread and with the owner's lock held but for _count --------------------------------

    async def _encoded(self, owner: str, new: Context, lifetime: Callable[[float], float]) -> Context:
        async with self._encoding:  # several at once would take longer, and more memory
            before = await asyncio.to_thread(self._before, new.system)
            ids = await to_thread(self._rag.encode, new.chunks, namespace=new.namespace, system=before)
        now = self._clock()
        new = replace(new, chunk_ids=tuple(ids), created=now, updated=now, expires=lifetime(now))
        storing = asyncio.ensure_future(asyncio.to_thread(self._files.put, owner, new))
        try:
            await asyncio.shield(storing)
        finally:  # also where this is cancelled: what a thread stores must not appear after a sweep
            await asyncio.wait((storing,))
        return new

    def _before(self, system: str | None) -> str | None:
        """The text before a prompt's first chunk, as the chat template renders it; None if it cannot."""
        user = {"role": "user", "content": _PLACE}
        messages = [{"role": "system", "content": system}, user] if system else [user]
        try:
            text = self._rag.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template raises what it likes, as without a system role
            return None
        before, place, _ = str(text).partition(_PLACE)
        return before if place else None

    def _count(self, texts: Sequence[str]) -> int:
        return sum(self._rag.count_tokens(text) for text in texts if text)

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
            texts = [text for text in context.chunks if text.strip() not in kept]
            if texts:
                self._rag.forget(texts=texts, namespace=context.namespace)
            self._files.remove(owner, context.name)
            self._failed[owner].pop(context.name, None)


def _owner(tenant: Tenant) -> str:
    return hashlib.sha256(tenant.namespace.encode()).hexdigest()[:32]


def _unconfirmed(error: Exception) -> NoReturn:
    message = "The cache could not confirm the deletion. It is tried again; the cached content is gone."
    raise ApiError(500, message, kind="server_error") from error
