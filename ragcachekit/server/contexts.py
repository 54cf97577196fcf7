"""Contexts: texts that clients store under a name, to ask about them later."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from pydantic import TypeAdapter

from ragcachekit import CancelScope, RagCache, to_thread
from ragcachekit.cancellation import Backoff
from ragcachekit.errors import PromptTooLong
from ragcachekit.files import read_regular, replace_file
from ragcachekit.server.errors import ApiError, invalid
from ragcachekit.server.keys import Tenant
from ragcachekit.server.schemas import document_blocks
from ragcachekit.store.disk_folder import claim_folder

log = logging.getLogger(__name__)

PREFIX = "cachedContents/"

NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
"""Names of contexts."""

MAX_CHUNKS = 4096
"""Chunks of one context."""

MAX_LEFTOVER_AGE = 3600.0
"""Seconds after which an unfinished file has no writer any more."""

_PLACE = "Zq7xContext"  # in no template
_TURN = 8  # chunks that one context encodes before it is another's turn
_SHARE = 0.5  # of the time is for encoding while requests run


@dataclass(frozen=True)
class Context:
    """Texts that a client stored under a name.

    - ``name``: ``cachedContents/`` and 128 random bits as hex.
    - ``namespace``: The tenant's, in which the chunks are encoded.
    - ``system``: Text of the system message; None: none.
    - ``chunks``, ``chunk_ids``: Texts in order, and their ids as ``RagCache.encode`` returns them; no ids
      while they are being encoded.
    - ``tokens``: Of all chunks and the system text.
    - ``created``, ``updated``, ``expires``: Unix time in seconds.
    """

    name: str
    namespace: str
    model: str
    display_name: str
    system: str | None
    chunks: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    tokens: int
    created: float
    updated: float
    expires: float


_CONTEXT = TypeAdapter(Context)


def texts_of(chunk_ids: Iterable[str], contexts: Iterable[Context], where: str) -> list[str]:
    """Texts of some of the contexts' chunks, in the order given; ApiError 404 for an id not ``where``."""
    known = {name: text for one in contexts for name, text in zip(one.chunk_ids, one.chunks, strict=True)}
    try:
        return [known[one] for one in chunk_ids]
    except KeyError as error:
        message = f"There is no chunk {error.args[0]!r} in {where}."
        raise ApiError(404, message, param="chunk_ids", code="chunk_not_found") from None


class ContextFiles:
    """Contexts by owner and name, in memory, or as JSON files in a folder that processes may share.

    What other processes write and remove is seen. A damaged file is no context, and logged. Names and owners
    become parts of a path: callers check them. StoreError for a folder that others may write to.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known = defaultdict[str, dict[str, tuple[object, Context]]](dict)
        if folder is not None:
            claim_folder(folder)
            folder.chmod(0o700)  # it may have been there before

    def owners(self) -> list[str]:
        """All owners that have, or had, a context."""
        stored = os.listdir(self._folder) if self._folder is not None else []
        return sorted({*stored, *self._known})

    def get(self, owner: str, name: str) -> Context | None:
        """The context of that name, if the owner has it."""
        known = self._known[owner].get(name)
        if (path := self._path(owner, name)) is None:
            return known[1] if known else None
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is None or known[0] != stamp:
                known = self._known[owner][name] = stamp, _CONTEXT.validate_json(read_regular(path))
            return known[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the cached content %s cannot be read: %r", path, error)
            return None

    def all(self, owner: str) -> list[Context]:
        """The owner's contexts, the oldest first."""
        names = list(self._known[owner])
        if self._folder is not None and (folder := self._folder / owner).is_dir():
            names = [PREFIX + path.stem for path in folder.glob("[!.]*.json")]
        found = [context for name in names if (context := self.get(owner, name)) is not None]
        return sorted(found, key=lambda context: (context.created, context.name))

    def put(self, owner: str, context: Context) -> None:
        """Store or replace a context; OSError if the disk refuses."""
        if (path := self._path(owner, context.name)) is None:
            self._known[owner][context.name] = None, context
        else:
            replace_file(path, _CONTEXT.dump_json(context).decode())
            self.get(owner, context.name)  # here, in the caller's thread, not at its next use

    def remove(self, owner: str, name: str) -> None:
        """Remove a context; nothing happens if there is none. OSError if the disk refuses."""
        if (path := self._path(owner, name)) is not None:
            path.unlink(missing_ok=True)
        self._known[owner].pop(name, None)

    def clean_up(self, owner: str) -> list[Context]:
        """Remove what killed writers left; returns the contexts that other processes have removed."""
        if self._folder is None:
            return []
        for path in (self._folder / owner).glob(".*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - MAX_LEFTOVER_AGE:
                    path.unlink()
        known = [context for _, context in list(self._known[owner].values())]
        return [one for one in known if not os.path.exists(self._path(owner, one.name) or "")]

    def _path(self, owner: str, name: str) -> Path | None:
        return self._folder and self._folder / owner / f"{name.removeprefix(PREFIX)}.json"


class ContextStore:
    """The contexts of all tenants, whose chunks are encoded. For one event loop.

    A context belongs to the namespace of the key that made it: keys of one namespace share it, and to all
    others its name is unknown. It is written before its chunks are encoded, so that a sweep finds it whatever
    ends its creation. Sweeps forget the chunks of contexts that have ended, except those that another context
    of the namespace has, and then remove the contexts.

    ``clock`` gives the Unix time; the chunks of one context must be encoded within ``timeout`` seconds.
    """

    def __init__(
        self,
        rag: RagCache,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
        timeout: float = 600.0,
    ) -> None:
        self._rag, self._files, self._clock, self._timeout = rag, ContextFiles(folder), clock, timeout
        self._encoding = asyncio.Lock()
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by owner: no tenant waits for another
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
        charge: Callable[[int], object] = lambda _: None,
    ) -> Context:
        """Encode chunks and store them under a new name; cancelled, it stores nothing.

        ``lifetime`` gives the time of expiry from that of the creation, and ``charge`` is called with the
        number of tokens before any is computed. ApiError 400, 429 beyond the tenant's limits, or 504.
        """
        now = self._clock()
        lifetime(now)
        if not 0 < len(chunks) <= MAX_CHUNKS:
            message = f"Cached contents have 1 to {MAX_CHUNKS} parts with text, not {len(chunks)}."
            raise invalid(message, "contents")
        owner, texts = _owner(tenant), [text for text in (*chunks, system) if text]
        new = Context(
            name=PREFIX + secrets.token_hex(16),
            namespace=tenant.namespace,
            model=model,
            display_name=display_name,
            system=system,
            chunks=tuple(chunks),
            chunk_ids=(),
            tokens=await to_thread(lambda: sum(map(self._rag.count_tokens, texts))),
            created=now,
            updated=now,
            expires=now + 2 * self._timeout,  # before that it has been made, or has failed
        )
        try:
            async with self._locks[owner]:
                await self._swept(owner)
                await _to_end(self._add, tenant, owner, new)
            charge(new.tokens)
            async with asyncio.timeout(self._timeout):
                ids = await self._encoded(new, max(0.0, lifetime(now) - now) or None)
            now = self._clock()
            made = replace(new, chunk_ids=ids, created=now, updated=now, expires=lifetime(now))
            async with self._locks[owner]:
                await _to_end(self._replace, owner, made)
        except BaseException as error:
            with suppress(ApiError, OSError):
                await _to_end(self._replace, owner, replace(new, expires=0.0))
            if isinstance(error, ValueError):
                raise invalid(str(error), "contents") from error
            if isinstance(error, TimeoutError):
                message = f"The contents were not encoded within {self._timeout:g} s; give fewer at once."
                raise ApiError(504, message, kind="server_error", code="timeout") from error
            raise
        return made

    def get(self, tenant: Tenant, name: str) -> Context:
        """The context of that name, perhaps of a file; ApiError 404 if unknown, expired or another's."""
        found = self._files.get(_owner(tenant), name) if NAME.fullmatch(name) else None
        if found is None or not self._is_live(found):
            raise _unknown(name)
        return found

    def holding(self, tenant: Tenant, chunk_ids: Iterable[str]) -> list[str]:
        """Names of the tenant's contexts that have one of these chunks."""
        wanted = set(chunk_ids)
        return [one.name for one in self.all(tenant) if not wanted.isdisjoint(one.chunk_ids)]

    @asynccontextmanager
    async def using(self, tenant: Tenant, name: str) -> AsyncIterator[Context]:
        """The context of that name, as :meth:`get`, for a request that lasts as long as the block.

        If the context ends meanwhile, its chunks are forgotten at once, and again after the block.
        """
        use = _owner(tenant), name
        self._used.append(use)
        try:
            yield await asyncio.to_thread(self.get, tenant, name)
        finally:
            self._used.remove(use)

    def all(self, tenant: Tenant) -> list[Context]:
        """The tenant's contexts, the oldest first."""
        return [one for one in self._files.all(_owner(tenant)) if self._is_live(one)]

    async def update(self, tenant: Tenant, name: str, lifetime: Callable[[float], float]) -> Context:
        """Change when a context expires; ApiError 404 as for :meth:`get`."""
        async with self._locks[_owner(tenant)]:
            now = self._clock()
            found = await asyncio.to_thread(self.get, tenant, name)
            context = replace(found, updated=now, expires=lifetime(now))
            await _to_end(self._files.put, _owner(tenant), context)
        return context

    async def delete(self, tenant: Tenant, name: str) -> None:
        """Remove a context and forget its chunks; ApiError 404 as for :meth:`get`.

        ApiError 500 if a tier of the cache cannot confirm that it forgot; the name is unknown from then on,
        and the next sweep tries again.
        """
        owner = _owner(tenant)
        async with self._locks[owner]:
            context = replace(await asyncio.to_thread(self.get, tenant, name), expires=0.0)
            await _to_end(self._files.put, owner, context)
            if not await self._swept(owner):
                message = "The cache could not confirm the deletion; it will be retried. The content is gone."
                raise ApiError(500, message, kind="server_error")

    async def expire(self) -> None:
        """Sweep the contexts of all tenants; what fails is logged and tried again the next time."""
        for owner in await asyncio.to_thread(self._files.owners):
            async with self._locks[owner]:
                await self._swept(owner)

    async def run(self, every: float = 30.0) -> NoReturn:
        """Sweep until cancelled, every so many seconds."""
        while True:
            try:
                await self.expire()
            except Exception:
                log.exception("could not list the contexts; will retry")
            await asyncio.sleep(every)

    # -- steps, in threads and with the owner's lock held, except _encoded ------------------------------

    def _is_live(self, context: Context) -> bool:
        return bool(context.chunk_ids) and context.expires > self._clock()

    def _add(self, tenant: Tenant, owner: str, new: Context) -> None:
        """Store a new context if the tenant may have it; ended ones count until they are forgotten."""
        contexts = [*self._files.all(owner), new]
        for count, most, what in (
            (len(contexts), tenant.limits.contexts, "cached contents"),
            (sum(context.tokens for context in contexts), tenant.limits.context_tokens, "tokens in them"),
        ):
            if most is not None and count > most:
                message = f"{tenant.name!r} may have {most} {what}; this would be {count}. Delete some."
                raise ApiError(429, message, kind="insufficient_quota", code="insufficient_quota")
        self._files.put(owner, new)

    def _replace(self, owner: str, context: Context) -> None:
        if self._files.get(owner, context.name) is None:
            raise _unknown(context.name)
        self._files.put(owner, context)

    async def _encoded(self, context: Context, retain: float | None) -> tuple[str, ...]:
        """The chunks' ids, once they are encoded after the system message; contexts encode by turns.

        Where only exact beginnings are reused, that of a prompt with all chunks in their order is computed.
        """
        before = await asyncio.to_thread(self._text_before, context.system)
        ahead = before is not None and self._rag.grade == "prefix"
        system = None if ahead else before
        # As one list: encoders with neighbours take them from it.
        await to_thread(self._rag.register, context.chunks, namespace=context.namespace)
        ids = list[str]()
        while len(ids) < len(context.chunks):
            turn = context.chunks[len(ids) : len(ids) + _TURN]
            async with self._encoding:
                with CancelScope(pause=Backoff(self._rag.queue, Event(), _SHARE)):
                    encode = partial(self._rag.encode, namespace=context.namespace, retain=retain)
                    ids += await to_thread(encode, turn, system=system)
                    try:
                        if ahead:
                            prompt = _messages(context.system, document_blocks(context.chunks[: len(ids)]))
                            await to_thread(encode, (), prompt=prompt)
                    except (PromptTooLong, ValueError) as error:  # the chunks can be used a few at a time
                        log.warning("%s is not computed whole (%d chunks): %s", context.name, len(ids), error)
                        ahead = False
        return tuple(ids)

    def _text_before(self, system: str | None) -> str | None:
        """The text before a prompt's first chunk, as the chat template renders it; None if it cannot."""
        try:
            text = self._rag.tokenizer.apply_chat_template(_messages(system, _PLACE), tokenize=False)
        except Exception:  # a template raises what it likes, as without a system role
            return None
        before, place, _ = str(text).partition(_PLACE)
        return before if place else None

    async def _swept(self, owner: str) -> bool:
        try:
            await _to_end(self._sweep, owner)  # a cancelled one would go on without the lock
        except Exception:
            log.exception("could not forget contexts that ended; will retry")
            return False
        return True

    def _sweep(self, owner: str) -> None:
        """Forget the chunks of contexts that have ended, then remove the contexts."""
        ended, kept, now = self._files.clean_up(owner), set[str](), self._clock()
        for context in self._files.all(owner):
            if context.expires > now:
                kept.update(text.strip() for text in context.chunks)
            else:
                ended.append(context)
        for context in ended:
            in_use = (owner, context.name) in self._used  # by a request that has read its texts
            if texts := [text for text in context.chunks if text.strip() not in kept]:
                self._rag.forget(texts=texts, namespace=context.namespace)
            if not in_use:
                self._files.remove(owner, context.name)


def _messages(system: str | None, content: Any) -> list[dict[str, Any]]:
    user = {"role": "user", "content": content}
    return [{"role": "system", "content": system}, user] if system else [user]


async def _to_end(work: Callable[..., object], *arguments: object) -> None:
    """Call ``work`` in a thread and wait for its end, however often the task is cancelled meanwhile."""
    task, cancelled = asyncio.get_running_loop().run_in_executor(None, work, *arguments), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if (failure := cancelled or task.exception()) is not None:
        raise failure


def _owner(tenant: Tenant) -> str:
    return hashlib.sha256(tenant.namespace.encode()).hexdigest()[:32]


def _unknown(name: str) -> ApiError:
    message = f"CachedContent not found (or permission denied): {name!r}."
    return ApiError(404, message, param="cached_content", code="cached_content_not_found")
