"""Contexts: texts that clients store under a name, to ask about them later."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import Event, Lock
from typing import NoReturn

from ragcachekit import CancelScope, RagCache, to_thread
from ragcachekit.background import Backoff
from ragcachekit.files import make_folder, parse_json, read_regular, replace_file
from ragcachekit.server.errors import ApiError, invalid
from ragcachekit.server.keys import Tenant
from ragcachekit.store.disk_folder import claim_folder

log = logging.getLogger(__name__)

PREFIX = "cachedContents/"

NAME = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
"""Names of contexts."""

MAX_CHUNKS = 4096
"""Chunks of one context."""

LEFTOVER_AGE = 3600.0
"""Seconds after which an unfinished file has no writer any more."""

_PLACE = "Zq7xContext"  # in no template
_TURN = 4096  # characters, with the chunk that reaches it
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

    def texts_of(self, chunk_ids: Iterable[str]) -> tuple[str, ...]:
        """Texts of some of its chunks, in the order given; ApiError 404 for an unknown id."""
        known = dict(zip(self.chunk_ids, self.chunks, strict=True))
        ids = tuple(chunk_ids)
        for chunk_id in ids:
            if chunk_id not in known:
                message = f"There is no chunk {chunk_id!r} in {self.name}."
                raise ApiError(404, message, param="chunk_ids", code="chunk_not_found")
        return tuple(known[chunk_id] for chunk_id in ids)


class ContextFiles:
    """Contexts by owner and name, in memory or in a folder. Thread safe.

    With a folder, each is a JSON file of mode 0600 in a folder of its owner. Other processes may use the
    folder at the same time; what they write and remove is seen. A damaged file is no context, and logged.
    Names and owners become parts of a path: callers check them. StoreError if the folder belongs to another
    user or others may write to it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._lock = folder, Lock()
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
        if self._folder is None:
            return known[1] if known else None
        path = self._path(self._folder, owner, name)
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if known is None or known[0] != stamp:
                known = self._known[owner][name] = stamp, _context(read_regular(path))
            return known[1]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the cached content %s cannot be read: %r", path, error)
            return None

    def all(self, owner: str) -> list[Context]:
        """The owner's contexts, the oldest first."""
        names = list(self._known[owner])
        if self._folder is not None:
            folder = self._folder / owner
            files = os.listdir(folder) if folder.is_dir() else []
            names = [PREFIX + file[:-5] for file in files if file.endswith(".json") and file[0] != "."]
        found = [context for name in names if (context := self.get(owner, name)) is not None]
        return sorted(found, key=lambda context: (context.created, context.name))

    def put(self, owner: str, context: Context, *, new: bool = False) -> None:
        """Store a new context, or replace one: ApiError 404 if that is gone. OSError if the disk refuses."""
        with self._lock:
            if not new and self.get(owner, context.name) is None:
                raise _unknown(context.name)
            if self._folder is None:
                self._known[owner][context.name] = None, context
                return
            path = self._path(self._folder, owner, context.name)
            make_folder(path.parent)
            replace_file(path, json.dumps(asdict(context)))
            self.get(owner, context.name)  # here, in the caller's thread, not at its next use

    def remove(self, owner: str, name: str) -> None:
        """Remove a context; nothing happens if there is none. OSError if the disk refuses."""
        with self._lock:
            if self._folder is not None:
                self._path(self._folder, owner, name).unlink(missing_ok=True)
            self._known[owner].pop(name, None)

    def remove_leftovers(self, owner: str) -> None:
        """Remove the unfinished files of writers that were killed: they hold texts."""
        if self._folder is not None and (folder := self._folder / owner).is_dir():
            for path in folder.glob(".*"):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - LEFTOVER_AGE:
                        path.unlink()

    def vanished(self, owner: str) -> list[Context]:
        """Contexts that this process has used and another one has removed."""
        if self._folder is None:
            return []
        known = list(self._known[owner].items())
        return [c for name, (_, c) in known if not os.path.exists(self._path(self._folder, owner, name))]

    @staticmethod
    def _path(folder: Path, owner: str, name: str) -> Path:
        return folder / owner / f"{name.removeprefix(PREFIX)}.json"


def _unknown(name: str) -> ApiError:
    message = f"CachedContent not found (or permission denied): {name!r}."
    return ApiError(404, message, param="cached_content", code="cached_content_not_found")


def _context(text: bytes) -> Context:
    values = parse_json(text)
    given = {field.name: values[field.name] for field in fields(Context)}
    return Context(**{**given, "chunks": tuple(given["chunks"]), "chunk_ids": tuple(given["chunk_ids"])})


class ContextStore:
    """The contexts of all tenants, whose chunks are encoded. For one event loop.

    A context belongs to the namespace of the key that made it: keys of one namespace share it, and to all
    others its name is unknown. It is written before its chunks are encoded, so that whatever ends its
    creation, a sweep finds it. When a context has ended, a sweep forgets its chunks, except those that
    another context of the namespace has, and then removes it.

    Parameters
    ----------
    rag : RagCache
    folder : path, optional
        Where contexts are stored, for this user alone (modes 0700 and 0600); they survive a restart. None:
        in memory. Processes of one machine may share it. StoreError if others may write to it.
    clock : callable
        Unix time in seconds.
    timeout : float
        Seconds in which the chunks of one context must be encoded.
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
        self._abandoned = defaultdict[str, set[str]](set)  # by owner: names whose creation failed
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
        now = self._clock()
        lifetime(now)
        if not 0 < len(chunks) <= MAX_CHUNKS:
            message = f"Cached contents have 1 to {MAX_CHUNKS} parts with text, not {len(chunks)}."
            raise invalid(message, "contents")
        owner, texts = _owner(tenant), [text for text in (*chunks, system) if text]
        tokens = await to_thread(lambda: sum(map(self._rag.count_tokens, texts)))
        new = Context(
            name=PREFIX + secrets.token_hex(16),
            namespace=tenant.namespace,
            model=model,
            display_name=display_name,
            system=system,
            chunks=tuple(chunks),
            chunk_ids=(),
            tokens=tokens,
            created=now,
            updated=now,
            expires=now + 2 * self._timeout,  # before that it has been made, or has failed
        )
        try:
            async with self._locks[owner]:
                if self._abandoned[owner]:
                    await self._swept(owner)
                await _to_end(self._add, tenant, owner, new)
            if charge is not None:
                charge(tokens)
            async with asyncio.timeout(self._timeout):
                ids = await self._encoded(new)
            now = self._clock()
            made = replace(new, chunk_ids=ids, created=now, updated=now, expires=lifetime(now))
            await _to_end(self._files.put, owner, made)
        except BaseException as error:
            self._abandoned[owner].add(new.name)
            if isinstance(error, ValueError):
                raise invalid(str(error), "contents") from error
            if isinstance(error, TimeoutError):
                message = f"The contents were not encoded within {self._timeout:g} s; give fewer at once."
                raise ApiError(504, message, kind="server_error", code="timeout") from error
            raise
        return made

    def get(self, tenant: Tenant, name: str) -> Context:
        """The context of that name, perhaps of a file; ApiError 404 if unknown, expired or another's."""
        owner = _owner(tenant)
        found = self._files.get(owner, name) if NAME.fullmatch(name) else None
        if found is None or not self._is_live(owner, found) or not found.chunk_ids:
            raise _unknown(name)
        return found

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
        owner = _owner(tenant)
        return [one for one in self._files.all(owner) if one.chunk_ids and self._is_live(owner, one)]

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
                log.exception("the contexts cannot be listed; it is tried again")
            await asyncio.sleep(every)

    # -- steps, in threads and with the owner's lock held, except _encoded ------------------------------

    def _is_live(self, owner: str, context: Context) -> bool:
        return context.expires > self._clock() and context.name not in self._abandoned[owner]

    def _add(self, tenant: Tenant, owner: str, new: Context) -> None:
        """Store a new context if the tenant may have it; failed ones count until they are forgotten."""
        now = self._clock()
        contexts = [*(one for one in self._files.all(owner) if one.expires > now), new]
        used = (len(contexts), sum(context.tokens for context in contexts))
        limits = (tenant.limits.contexts, tenant.limits.context_tokens)
        for count, most, what in zip(used, limits, ("cached contents", "tokens in them"), strict=True):
            if most is not None and count > most:
                message = f"{tenant.name!r} may have {most} {what}; this would make it {count}. Delete some."
                raise ApiError(429, message, kind="insufficient_quota", code="insufficient_quota")
        self._files.put(owner, new, new=True)

    async def _encoded(self, context: Context) -> tuple[str, ...]:
        """The chunks' ids, once they are encoded after the system message; contexts encode by turns."""
        before = await asyncio.to_thread(self._text_before, context.system)
        # As one list: encoders with neighbours take them from it.
        await to_thread(self._rag.register, context.chunks, namespace=context.namespace)
        ids = list[str]()
        for turn in _turns(context.chunks):
            async with self._encoding:
                with CancelScope(pause=Backoff(self._rag.queue, Event(), _SHARE)):
                    ids += await to_thread(self._rag.encode, turn, namespace=context.namespace, system=before)
        return tuple(ids)

    def _text_before(self, system: str | None) -> str | None:
        """The text before a prompt's first chunk, as the chat template renders it; None if it cannot."""
        user = {"role": "user", "content": _PLACE}
        messages = [{"role": "system", "content": system}, user] if system else [user]
        try:
            text = self._rag.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template raises what it likes, as without a system role
            return None
        before, place, _ = str(text).partition(_PLACE)
        return before if place else None

    async def _swept(self, owner: str) -> bool:
        try:
            await asyncio.to_thread(self._sweep, owner)
        except Exception:
            log.exception("contexts that ended could not be forgotten; it is tried again")
            return False
        return True

    def _sweep(self, owner: str) -> None:
        """Forget the chunks of contexts that have ended, then remove the contexts."""
        self._files.remove_leftovers(owner)
        abandoned, live, ended = list(self._abandoned[owner]), list[Context](), list[Context]()
        for context in self._files.all(owner):
            (live if self._is_live(owner, context) else ended).append(context)
        kept = {text.strip() for context in live for text in context.chunks}
        for context in (*ended, *self._files.vanished(owner)):
            in_use = (owner, context.name) in self._used  # by a request that has read its texts
            texts = [text for text in context.chunks if text.strip() not in kept]
            if texts:
                self._rag.forget(texts=texts, namespace=context.namespace)
            if not in_use:
                self._files.remove(owner, context.name)
        self._abandoned[owner].difference_update(abandoned)


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


def _turns(chunks: Sequence[str]) -> Iterator[list[str]]:
    turn, size = list[str](), 0
    for chunk in chunks:
        turn.append(chunk)
        size += len(chunk)
        if size >= _TURN:
            yield turn
            turn, size = [], 0
    if turn:
        yield turn
