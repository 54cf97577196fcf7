"""The Redis tier: small entries that several machines share. Valkey speaks the same protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ragcachekit.errors import StoreError, missing_extra
from ragcachekit.store.base import quota_of
from ragcachekit.store.remote import RemoteStore, Usage, hashed
from ragcachekit.types import KVKey, whole_id

# The hash ``info`` holds hashed namespace, size and hashed chunk ids of each entry. Derived from it are the
# order of use (sorted sets, overall and per namespace), the sums of sizes, and the entries per id. ``gen``
# holds a token per namespace that every forget changes: a write sent before a forget has an outdated token
# and is refused. All keys share one hash tag, for one slot of a cluster.


_COMMON = """
local root = KEYS[1]
local INFO, USE, SUMS, GEN = root .. ':info', root .. ':use', root .. ':sums', root .. ':gen'
local function of_ns(ns) return root .. ':ns:' .. ns end
local function of_id(ns, id) return root .. ':id:' .. ns .. ':' .. id end
local function blob_of(digest) return root .. ':e:' .. digest end

local function words_of(digest)
  local info = redis.call('HGET', INFO, digest)
  if not info then return nil end
  local words = {}
  for word in string.gmatch(info, '%S+') do words[#words + 1] = word end
  return words
end

local function drop(digest)
  local words = words_of(digest)
  redis.call('DEL', blob_of(digest))
  if not words then return end
  local ns, size = words[1], tonumber(words[2])
  redis.call('HDEL', INFO, digest)
  redis.call('ZREM', USE, digest)
  redis.call('ZREM', of_ns(ns), digest)
  for i = 3, #words do redis.call('SREM', of_id(ns, words[i]), digest) end
  redis.call('HINCRBY', SUMS, 'all', -size)
  if redis.call('HINCRBY', SUMS, ns, -size) <= 0 then redis.call('HDEL', SUMS, ns) end
end

local function used(digest, ns)
  local now = redis.call('HINCRBY', SUMS, 'clock', 1)
  redis.call('ZADD', USE, now, digest)
  redis.call('ZADD', of_ns(ns), now, digest)
end

local function make_room(order, sum, needed, limit)
  local evicted = 0
  while tonumber(redis.call('HGET', SUMS, sum) or 0) + needed > limit do
    local lowest = redis.call('ZRANGE', order, 0, 0)[1]
    if not lowest then
      redis.call('HSET', SUMS, sum, 0)
      break
    end
    drop(lowest)
    evicted = evicted + 1
  end
  return evicted
end
"""

SAVE = (
    _COMMON
    + """
local digest, ns, token, blob = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local budget, quota, size = tonumber(ARGV[5]), tonumber(ARGV[6]), string.len(ARGV[4])
local current = redis.call('HGET', GEN, ns) or ''
if current ~= token then return {-1, current} end
drop(digest)
local evicted = 0
if quota > 0 then evicted = make_room(of_ns(ns), ns, size, quota) end
evicted = evicted + make_room(USE, 'all', size, budget)
redis.call('SET', blob_of(digest), blob)
local info = ns .. ' ' .. size
for i = 7, #ARGV do
  info = info .. ' ' .. ARGV[i]
  redis.call('SADD', of_id(ns, ARGV[i]), digest)
end
redis.call('HSET', INFO, digest, info)
redis.call('HINCRBY', SUMS, 'all', size)
redis.call('HINCRBY', SUMS, ns, size)
used(digest, ns)
return {evicted}
"""
)
"""ARGV: digest, namespace, token, blob, budget, quota (0: none), ids... Returns {evicted} or {-1, token}."""

TOUCH = (
    _COMMON
    + """
local words = words_of(ARGV[1])
if words and redis.call('EXISTS', blob_of(ARGV[1])) == 1 then
  used(ARGV[1], words[1])
  return 1
end
drop(ARGV[1])
return 0
"""
)
"""ARGV: digest. Returns 1 if the entry is whole; else drops its rest, which no forget would find."""

DROP = _COMMON + "drop(ARGV[1])"
"""ARGV: digest."""

TRIM = _COMMON + "return make_room(USE, 'all', 0, tonumber(ARGV[1]))"
"""ARGV: budget. Returns how many were evicted."""

FORGET = (
    _COMMON
    + """
local ns, token, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
redis.call('HSET', GEN, ns, token)
local found = {}
if #ARGV == 3 then found = redis.call('ZRANGE', of_ns(ns), 0, most - 1) end
for i = 4, #ARGV do
  if #found < most then
    for _, digest in ipairs(redis.call('SRANDMEMBER', of_id(ns, ARGV[i]), most - #found)) do
      found[#found + 1] = digest
    end
  end
end
for _, digest in ipairs(found) do drop(digest) end
return found
"""
)
"""ARGV: namespace, new token, most at once, ids (none: all). Returns digests; repeat until there is none."""


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
