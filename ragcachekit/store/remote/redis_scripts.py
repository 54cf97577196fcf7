"""Atomic Lua scripts of the Redis tier: no crash or race leaves the sums wrong.

The hash ``info`` holds hashed namespace, size and hashed chunk ids of each entry. Derived from it are the
order of use (sorted sets, overall and per namespace), the sums of sizes, and the entries per id. ``gen``
holds a token per namespace that every forget changes: a write sent before a forget has an outdated token and
is refused. All keys share one hash tag, for one slot of a cluster.
"""

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
