"""Where remote tiers keep their entries: a Redis or Valkey server, or any fsspec file system."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.entry import hashed
from ragcachekit.store.remote import RemoteStore, is_dropped
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

    def write_blob(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> bool:
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
                return True
            token = self._tokens[space] = now
        return False

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
                dropped.update(map(_digest_of, names))

    def usage(self) -> tuple[int, int, int]:
        asked = self._client.pipeline(transaction=False)
        asked.dbsize()
        asked.exists(_TOKENS)
        asked.info("memory")
        names, tokens, memory = asked.execute()
        return names - tokens, int(memory["used_memory"]), int(memory.get("maxmemory", 0))

    def disconnect(self) -> None:
        self._client.close()

    def _concerned(self, names: list[bytes], namespace: str, chunk_ids: frozenset[str]) -> list[bytes]:
        """Entries to be forgotten; one with an unreadable header is."""
        reads = self._client.pipeline(transaction=False)
        for name in names:
            reads.getrange(name, 0, _HEAD_BYTES)
            reads.strlen(name)
        answers = reads.execute()
        return [
            name
            for name, head, size in zip(names, answers[::2], answers[1::2], strict=True)
            if is_dropped(_digest_of(name), head, size, namespace, chunk_ids)
        ]


def _redis_name(key: KVKey) -> str:
    return f"{_ROOT}:e:{hashed(key.namespace)}:{key.digest()}"


def _digest_of(name: bytes) -> str:
    return name.rpartition(b":")[2].decode()


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


class FsspecStore(RemoteStore):
    """Chunk KV as objects in a folder of any fsspec file system, or of ``fs`` if ``url`` has no protocol.

    An entry is one object, ``{root}/{hash of the namespace}/{digest}.kv``, and stays until it is forgotten:
    there is no budget, and sizes are not counted. A write waits ``deadline`` seconds for another one to end.
    ValueError for a bad url or key; StoreError if fsspec, or what it needs for this url, is not installed.
    """

    def __init__(self, url: str, *, key: bytes | str | None, deadline: float, fs: Any = None) -> None:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self._fs, root = (fs, url) if fs is not None else url_to_fs(url)
        except ImportError as error:
            raise StoreError(
                f"the bulk tier needs fsspec and what it names for this url ({error}): "
                f"{missing_extra('fsspec', 'fsspec')}, for s3:// {missing_extra('s3', 's3fs')}, "
                "or use bulk_url=None"
            ) from error
        self._root, self._lock_wait = root.rstrip("/"), deadline
        self._is_folder = isinstance(self._fs, LocalFileSystem)
        self._changing = Lock()  # around writes, deletions and forgets
        super().__init__("bulk", key=key, deadline=deadline)

    def read_blob(self, key: KVKey) -> bytes | None:
        try:
            blob: bytes = self._fs.cat_file(self._path(_object_name(key)))
        except FileNotFoundError:
            return None
        return blob

    def write_blob(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> bool:
        path = self._path(_object_name(key))
        with self._alone():
            if not wanted():
                return False
            if self._is_folder:
                os.makedirs(self._root, mode=0o700, exist_ok=True)  # text can be recovered from KV
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                self._fs.pipe_file(path, bytes(blob))
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(path)
                raise
            return True

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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(timeout=self._lock_wait):
            raise TimeoutError("an earlier write has not ended")
        try:
            yield
        finally:
            self._changing.release()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_ENDING}"

    def _discard(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _objects(self, group: str) -> dict[str, int]:
        """Name → size of every object of one hashed namespace."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self._root}/{group}", detail=True)
        except FileNotFoundError:
            return {}
        finally:
            self._fs.invalidate_cache()  # or `exists` would answer from this listing
        # Others may use the folder as well.
        return {
            f"{group}/{name.removesuffix(_ENDING)}": int(info["size"])
            for path, info in found.items()
            if (name := path.rpartition("/")[2]).endswith(_ENDING)
        }

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
                if is_dropped(name.partition("/")[2], head, found[name], namespace, chunk_ids):
                    yield name


def _object_name(key: KVKey) -> str:
    return f"{hashed(key.namespace)}/{key.digest()}"
