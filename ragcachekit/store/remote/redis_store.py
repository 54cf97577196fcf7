"""The Redis tier: small entries that several machines share. Valkey speaks the same protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.base import quota_of
from ragcachekit.store.remote.base import Usage, hashed
from ragcachekit.store.remote.redis_scripts import DROP, FORGET, SAVE, TOUCH, TRIM
from ragcachekit.store.remote.remote_store import RemoteStore
from ragcachekit.types import KVKey, whole_id

_LARGEST = 256 << 20  # Redis takes strings of up to 512 MB
_READ = 1 << 20  # reading a megabyte at once is ten times as fast as redis-py's 64 KiB
_AT_ONCE = 500  # entries per forgetting step: other clients wait that long
_ROOT = "{ragcachekit}"  # begins all keys; the braces put them into one slot of a cluster


class RedisStore(RemoteStore):
    """Chunk KV in a Redis or Valkey server, within a byte budget that all processes share.

    The server must not evict by itself (``maxmemory-policy noeviction``, Redis's default). It needs memory
    for the budget, some hundred bytes per entry, and the entry being written. While it is down, all misses.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host:port/0``, ``rediss://`` over TLS, ``unix://``.
    budget, key, deadline, quotas
        As in :class:`RemoteStore`; the same budget in all processes.
    entry_bytes : int
        Limit per entry.

    Raises ValueError for a bad url or key, and StoreError if redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        budget: int,
        *,
        key: bytes | str | None,
        entry_bytes: int,
        deadline: float,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        if entry_bytes > _LARGEST:
            raise ValueError(f"entry_bytes must be at most {_LARGEST}, got {entry_bytes}")
        backend = RedisBackend(connect(url, deadline), budget, quotas or {})
        limits: dict[str, Any] = {"largest": entry_bytes, "deadline": deadline}
        super().__init__("redis", backend, budget, key=key, quotas=quotas, **limits)


class RedisBackend:
    """Entries, their sizes and the order of use, all on the server of ``client``."""

    def __init__(self, client: Any, budget: int, quotas: Mapping[str, int]) -> None:
        self._client = client
        self._budget, self._quotas = budget, quotas
        self._tokens: dict[str, str] = {}

    def open(self) -> None:
        self._eval(TRIM, self._budget)

    def load(self, key: KVKey) -> bytes | None:
        digest = key.digest()
        both = self._client.pipeline(transaction=False)
        both.get(self._blob(digest))
        # The script's text, not its hash: a restarted server has no cached scripts.
        both.eval(TOUCH, 1, _ROOT, digest)
        blob, known = both.execute()
        return blob if known else None

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        namespace = hashed(key.namespace)
        quota = quota_of(self._quotas, key.namespace) or 0
        ids = sorted({hashed(whole_id(name)) for name in (key.chunk_id, *key.context)})
        token = self._tokens.get(namespace, "")
        for _ in range(2):
            # Asked after the token was read: if it is that of a later forget, this is False.
            if not wanted():
                break
            reply = self._eval(SAVE, key.digest(), namespace, token, blob, self._budget, quota, *ids)
            if reply[0] >= 0:
                return int(reply[0])
            token = self._tokens[namespace] = reply[1].decode()
        return None

    def delete(self, key: KVKey) -> None:
        self._eval(DROP, key.digest())

    def exists(self, key: KVKey) -> bool:
        return bool(self._client.exists(self._blob(key.digest())))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        ids = sorted(hashed(name) for name in chunk_ids or ())
        token = secrets.token_hex(8)
        while digests := self._eval(FORGET, hashed(namespace), token, _AT_ONCE, *ids):
            dropped.update(digest.decode() for digest in digests)

    def usage(self) -> Usage:
        both = self._client.pipeline(transaction=True)
        both.hlen(f"{_ROOT}:info")
        both.hget(f"{_ROOT}:sums", "all")
        entries, nbytes = both.execute()
        return Usage(entries, int(nbytes or 0))

    def close(self) -> None:
        self._client.close()

    def _blob(self, digest: str) -> str:
        return f"{_ROOT}:e:{digest}"

    def _eval(self, script: str, *arguments: Any) -> Any:
        return self._client.eval(script, 1, _ROOT, *arguments)


def connect(url: str, deadline: float) -> Any:
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
        socket_read_size=_READ,
        retry=again,
        protocol=2,
    )
