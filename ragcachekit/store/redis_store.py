"""The Redis tier: small entries that several machines share. Valkey speaks the same protocol."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.base import concerns
from ragcachekit.store.entry import EntryDamaged, hashed
from ragcachekit.store.remote import RemoteStore, Usage, key_of_sealed
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

_MAX_ENTRY_BYTES = 256 << 20  # Redis takes strings of up to 512 MB
_READ_BYTES = 1 << 20  # reading a megabyte at once is ten times as fast as redis-py's 64 KiB
_HEAD_BYTES = 64 << 10  # in which a forget looks for a header
_BATCH = 100  # entries per step of a forget
_ROOT = "{ragcachekit}"  # begins all keys; the braces put them into one slot of a cluster

_TOKENS = f"{_ROOT}:tokens"  # hash: a token per namespace, which every forget of it changes

_SAVE = """
local token = redis.call('HGET', KEYS[2], ARGV[1])
if not token then
  token = ARGV[3]
  redis.call('HSET', KEYS[2], ARGV[1], token)
end
if token == ARGV[2] then redis.call('SET', KEYS[1], ARGV[4]) end
return token
"""
# KEYS: entry, tokens. ARGV: namespace, the token that the writer has, a new one in case there is none (the
# server may have evicted them), the entry. Returns the token; the entry is stored if it is the writer's. So a
# write that was sent before a forget is refused.


class RedisStore(RemoteStore):
    """Chunk KV in a Redis or Valkey server, which evicts by itself.

    Give the server a ``maxmemory`` and the policy ``allkeys-lru``, and nothing else to hold: its memory is
    this tier's budget, whatever its clients are. While it is down, all look-ups miss.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host:port/0``, ``rediss://`` over TLS, ``unix://``.
    key, deadline
        As in :class:`RemoteStore`.
    entry_bytes : int
        Limit per entry; larger ones are refused, which counts as no failure.

    Raises ValueError for a bad url or key, and StoreError if redis-py is not installed.
    """

    def __init__(self, url: str, *, key: bytes | str | None, entry_bytes: int, deadline: float) -> None:
        if entry_bytes > _MAX_ENTRY_BYTES:
            raise ValueError(f"entry_bytes must be at most {_MAX_ENTRY_BYTES}, got {entry_bytes}")
        backend = RedisBackend(connect(url, deadline))
        super().__init__("redis", backend, key=key, deadline=deadline, max_entry=entry_bytes)


class RedisBackend:
    """Sealed entries in the server of ``client``, and a token per namespace.

    Counts what is in the whole database, which is for this tier alone.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._tokens: dict[str, str] = {}  # by hashed namespace, as last seen

    def open(self) -> None:
        info = self._client.info("memory")
        if not int(info.get("maxmemory", 0)) or info.get("maxmemory_policy") == "noeviction":
            log.warning(
                "redis tier: the server does not evict; set its maxmemory, and maxmemory-policy allkeys-lru"
            )

    def load(self, key: KVKey) -> bytes | None:
        blob: bytes | None = self._client.get(_name(key))
        return blob

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        space = hashed(key.namespace)
        token = self._tokens.get(space, "")
        for _ in range(2):
            # Asked after the token was read: if it is that of a later forget, this is False.
            if not wanted():
                break
            # The script's text, not its hash: a restarted server has no cached scripts.
            made = secrets.token_hex(8)
            now = self._client.eval(_SAVE, 2, _name(key), _TOKENS, space, token, made, blob).decode()
            if now == token:
                return 0
            token = self._tokens[space] = now
        return None

    def delete(self, key: KVKey) -> None:
        self._client.unlink(_name(key))

    def exists(self, key: KVKey) -> bool:
        return bool(self._client.exists(_name(key)))

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        space = hashed(namespace)
        self._client.hset(_TOKENS, space, secrets.token_hex(8))
        for names in self._batches(f"{_ROOT}:e:{space}:*"):
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

    def close(self) -> None:
        self._client.close()

    def _batches(self, pattern: str) -> Iterator[list[bytes]]:
        cursor = None
        while cursor != 0:
            cursor, names = self._client.scan(cursor or 0, match=pattern, count=_BATCH)
            yield names

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


def _name(key: KVKey) -> str:
    return f"{_ROOT}:e:{hashed(key.namespace)}:{key.digest()}"


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
        socket_read_size=_READ_BYTES,
        retry=again,
        protocol=2,
    )
