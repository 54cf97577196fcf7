"""Where remote tiers keep their entries: a Redis or Valkey server, or any fsspec file system."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from threading import Lock
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.base import concerns
from ragcachekit.store.entry import EntryDamaged, hashed
from ragcachekit.store.remote import RemoteStore, Usage, key_of_sealed
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

_HEAD_BYTES = 64 << 10  # in which a forget looks for a header
_BATCH = 100  # entries per step of a forget

# -- Redis -----------------------------------------------------------------------------------------------

_MAX_ENTRY_BYTES = 256 << 20  # Redis takes strings of up to 512 MB
_READ_BYTES = 1 << 20  # reading a megabyte at once is ten times as fast as redis-py's 64 KiB
_ROOT = "{ragcachekit}"  # begins all keys; the braces put them into one slot of a cluster
_TOKENS = f"{_ROOT}:tokens"  # hash: a token per namespace, which every forget of it changes

# KEYS: entry, tokens. ARGV: namespace, the token that the writer has, a new one in case there is none (the
# server may have evicted them), the entry. Returns the token; the entry is stored if it is the writer's. So a
# write that was sent before a forget is refused.
_SAVE = """
local token = redis.call('HGET', KEYS[2], ARGV[1])
if not token then
  token = ARGV[3]
  redis.call('HSET', KEYS[2], ARGV[1], token)
end
if token == ARGV[2] then redis.call('SET', KEYS[1], ARGV[4]) end
return token
"""


class RedisStore(RemoteStore):
    """Chunk KV in a Redis or Valkey server, which evicts by itself.

    Give the server a ``maxmemory`` and the policy ``allkeys-lru``, and nothing else to hold: its memory is
    this tier's budget, whatever its clients are. While it is down, all look-ups miss. Raises ValueError for a
    bad url (``redis://``, ``rediss://``, ``unix://``) or key, and StoreError if redis-py is not installed.
    """

    def __init__(self, url: str, *, key: bytes | str | None, entry_bytes: int, deadline: float) -> None:
        if entry_bytes > _MAX_ENTRY_BYTES:
            raise ValueError(f"entry_bytes must be at most {_MAX_ENTRY_BYTES}, got {entry_bytes}")
        self._client = _connected(url, deadline)
        self._tokens: dict[str, str] = {}  # by hashed namespace, as last seen
        super().__init__("redis", key=key, deadline=deadline, max_entry=entry_bytes)

    def connect(self) -> None:
        info = self._client.info("memory")
        if not int(info.get("maxmemory", 0)) or info.get("maxmemory_policy") == "noeviction":
            log.warning(
                "redis tier: the server does not evict; set its maxmemory, and maxmemory-policy allkeys-lru"
            )

    def read_blob(self, key: KVKey) -> bytes | None:
        blob: bytes | None = self._client.get(_redis_name(key))
        return blob

    def write_blob(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        space = hashed(key.namespace)
        token = self._tokens.get(space, "")
        for _ in range(2):
            # Asked after the token was read: if it is that of a later forget, this is False.
            if not wanted():
                break
            # The script's text, not its hash: a restarted server has no cached scripts.
            made = secrets.token_hex(8)
            arguments = space, token, made, blob
            now = self._client.eval(_SAVE, 2, _redis_name(key), _TOKENS, *arguments).decode()
            if now == token:
                return 0
            token = self._tokens[space] = now
        return None

    def delete_blob(self, key: KVKey) -> None:
        self._client.unlink(_redis_name(key))

    def has_blob(self, key: KVKey) -> bool:
        return bool(self._client.exists(_redis_name(key)))

    def forget_blobs(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        space, cursor = hashed(namespace), None
        self._client.hset(_TOKENS, space, secrets.token_hex(8))
        while cursor != 0:
            cursor, names = self._client.scan(cursor or 0, match=f"{_ROOT}:e:{space}:*", count=_BATCH)
            if chunk_ids is not None:
                names = self._concerned(names, namespace, chunk_ids)
            if names:
                self._client.unlink(*names)
                dropped.update(name.rpartition(b":")[2].decode() for name in names)

    def usage(self) -> Usage:
        asked = self._client.pipeline(transaction=False)
        asked.dbsize()
        asked.exists(_TOKENS)
        asked.info("memory")
        names, tokens, memory = asked.execute()
        return Usage(names - tokens, int(memory["used_memory"]), int(memory.get("maxmemory", 0)))

    def disconnect(self) -> None:
        self._client.close()

    def _concerned(self, names: list[bytes], namespace: str, chunk_ids: frozenset[str]) -> list[bytes]:
        """Entries to be forgotten; one with an unreadable header is."""
        reads = self._client.pipeline(transaction=False)
        for name in names:
            reads.getrange(name, 0, _HEAD_BYTES)
            reads.strlen(name)
        answers = reads.execute()
        found = []
        for name, head, size in zip(names, answers[::2], answers[1::2], strict=True):
            try:
                if concerns(key_of_sealed(head, size), namespace, chunk_ids):
                    found.append(name)
            except EntryDamaged:
                found.append(name)
        return found


def _redis_name(key: KVKey) -> str:
    return f"{_ROOT}:e:{hashed(key.namespace)}:{key.digest()}"


def _connected(url: str, deadline: float) -> Any:
    """A client that waits at most ``deadline`` seconds each time; not connected yet."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise StoreError(
            f"the redis tier needs redis-py: {missing_extra('redis', 'redis')}, or use redis_url=None"
        ) from error
    # One retry after a broken connection (a restarted server), never after a timeout.
    again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(
        url,
        socket_timeout=deadline,
        socket_connect_timeout=deadline,
        socket_read_size=_READ_BYTES,
        retry=again,
        protocol=2,
    )


# -- fsspec ----------------------------------------------------------------------------------------------

_ENDING = ".kv"
_TEMP = ".tmp"
_ABANDONED = 3600.0  # seconds after which a temporary file is deleted


class FsspecStore(RemoteStore):
    """Chunk KV as objects in a folder of any fsspec file system, or of ``fs`` if ``url`` has no protocol.

    An entry is one immutable object, ``{root}/{hash of the namespace}/{digest}.kv``. The budget is this
    process's own: the folder is listed when it is opened, and what this process writes counts from then on.
    The entries that were written first are evicted first. Reads ignore that index, and ``forget`` lists. A
    write waits ``deadline`` seconds for another one to end. Raises ValueError for a bad url or key, and
    StoreError if fsspec, or what it needs for this url, is not installed.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        *,
        key: bytes | str | None,
        deadline: float,
        fs: Any = None,
    ) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, root = (fs, url) if fs is not None else url_to_fs(url)
        except ImportError as error:
            raise StoreError(
                f"the bulk tier needs fsspec and what it names for this url ({error}): "
                f"{missing_extra('fsspec', 'fsspec')}, for s3:// {missing_extra('s3', 's3fs')}, "
                "or use bulk_url=None"
            ) from error
        self._root, self._max, self._lock_wait = root.rstrip("/"), budget, deadline
        # Object stores show no half-written files, and rename by copying.
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._is_folder = "file" in protocols
        self._sizes: dict[str, int] | None = None  # by name, the first written first; None: not listed yet
        self._changing = Lock()  # around writes, deletions and forgets
        super().__init__("bulk", key=key, deadline=deadline, budget=budget)

    def connect(self) -> None:
        with self._alone():
            self._make_room("", 0)

    def read_blob(self, key: KVKey) -> bytes | None:
        try:
            blob: bytes = self._fs.cat_file(self._path(_object_name(key)))
        except FileNotFoundError:
            return None
        return blob

    def write_blob(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        name = _object_name(key)
        with self._alone():
            sizes, evicted = self._make_room(name, len(blob))
            if not wanted():
                return None
            sizes.pop(name, None)
            sizes[name] = len(blob)  # before it is written, since what cannot be deleted again counts as well
            try:
                self._write(self._path(name), blob)
            except BaseException:
                with suppress(Exception):
                    self._discard(name)
                raise
            return evicted

    def delete_blob(self, key: KVKey) -> None:
        with self._alone():
            self._discard(_object_name(key))

    def has_blob(self, key: KVKey) -> bool:
        return bool(self._fs.exists(self._path(_object_name(key))))

    def forget_blobs(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        failed: Exception | None = None
        with self._alone():
            found = self._objects(hashed(namespace))
            for name in found if chunk_ids is None else self._concerned(found, namespace, chunk_ids):
                try:
                    self._discard(name)
                    dropped.add(name.partition("/")[2])
                except Exception as error:
                    failed = error
        if failed is not None:
            raise failed

    def usage(self) -> Usage:
        sizes = list((self._sizes or {}).values())
        return Usage(len(sizes), sum(sizes), self._max)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._lock_wait):
            raise TimeoutError("an earlier write has not ended")
        try:
            yield
        finally:
            self._changing.release()

    def _make_room(self, name: str, nbytes: int) -> tuple[dict[str, int], int]:
        """Evict until ``nbytes`` under ``name``, in place of what it has now, fit.

        Returns the sizes that are known, listed at the first call, and how many were evicted.
        """
        if self._sizes is None:
            self._sizes = self._objects()
        sizes, evicted = self._sizes, 0
        while sum(sizes.values()) - sizes.get(name, 0) + nbytes > self._max:
            victim = next(other for other in sizes if other != name)
            sizes[victim] = sizes.pop(victim)  # if it cannot be deleted, the next eviction tries another one
            self._discard(victim)
            evicted += 1
        return sizes, evicted

    # -- objects -----------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_ENDING}"

    def _write(self, path: str, blob: memoryview) -> None:
        """Replace an object at once."""
        if not self._is_folder:
            self._fs.pipe_file(path, bytes(blob))
            return
        temp = f"{path}-{secrets.token_hex(8)}{_TEMP}"
        os.makedirs(self._root, mode=0o700, exist_ok=True)  # text can be recovered from KV
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._fs.pipe_file(temp, blob)
            self._fs.mv(temp, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _discard(self, name: str) -> None:
        """Delete an object; the caller is the only one that writes."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        if self._sizes is not None:
            self._sizes.pop(name, None)

    def _objects(self, group: str = "") -> dict[str, int]:
        """Name → size of every object (of one hashed namespace), oldest first; deletes old temporaries."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self._root}/{group}" if group else self._root, detail=True)
        except FileNotFoundError:
            return {}
        finally:
            self._fs.invalidate_cache()  # or `exists` would answer from this listing
        rows = []
        for path, info in found.items():
            # Others may use the folder as well.
            name = path.removeprefix(self._root).strip("/")
            if name.endswith(_ENDING) and name.count("/") == 1:
                rows.append((_written(info), name.removesuffix(_ENDING), int(info["size"])))
            elif name.endswith(_TEMP) and _written(info) < time.time() - _ABANDONED:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        return {name: nbytes for _, name, nbytes in sorted(rows)}

    def _concerned(
        self, found: Mapping[str, int], namespace: str, chunk_ids: frozenset[str]
    ) -> Iterator[str]:
        """Names of the objects to be forgotten; those whose header cannot be read are."""
        names = list(found)
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            # The file system reads them at the same time, if it can.
            heads = self._fs.cat_ranges(list(map(self._path, batch)), 0, _HEAD_BYTES, on_error="return")
            for name, head in zip(batch, heads, strict=True):
                try:
                    if isinstance(head, Exception):
                        raise head
                    key = key_of_sealed(head, found[name])
                    if _object_name(key) == name and not concerns(key, namespace, chunk_ids):
                        continue
                except FileNotFoundError:
                    continue
                except Exception:
                    log.debug("an object with an unreadable header is forgotten: %s", name)
                yield name


def _object_name(key: KVKey) -> str:
    return f"{hashed(key.namespace)}/{key.digest()}"


def _written(info: Mapping[str, Any]) -> float:
    """Modification time in seconds since the epoch, under the file system's own name for it."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        when = info.get(field)
        if isinstance(when, datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
    return 0.0
