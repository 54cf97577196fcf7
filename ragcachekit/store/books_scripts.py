"""What the Redis server does in one step each for the books of a bulk folder (Lua, atomic).

Names are ``namespace/digest``, both hashed. An entry is in one of three states, and counts in the sums of
its namespace and of all in each of them:

- *kept*: ``info`` has size, stamp (the clock when it was written) and token of the write; ``use`` and
  ``ns:<namespace>`` (sorted sets) have its last use;
- *being written*: ``writes`` has the size reserved, the token of the write and the token of the
  namespace's last forget then; beside it the former value may be kept: the larger of the two counts;
- *leaving*: ``leaving`` has the size, and the token of who deletes the object. It counts until that is done.

``leases`` says until when a writer and a deleter may take; whoever asks for room after that is told to
delete the object, too. ``gen`` has a token per namespace that every forget changes: a write that was
reserved before is refused when it is to be kept. ``ready`` says which run of the server has had a census:
a server that lost its data, or went back to an old snapshot, has none, and refuses writes until one is
made. Redis' own clock (TIME) is the only one.

All keys share one hash tag, so that a cluster keeps them in one slot.
"""

_COMMON = """
local root = KEYS[1]
local INFO, WRITES, LEAVING = root .. ':info', root .. ':writes', root .. ':leaving'
local USE, LEASES, TOTALS, GEN = root .. ':use', root .. ':leases', root .. ':totals', root .. ':gen'
local READY, CENSUS = root .. ':ready', root .. ':census'

local function ns_of(name) return string.match(name, '^[^/]*') end
local function order_of(name) return root .. ':ns:' .. ns_of(name) end
local function tick() return redis.call('HINCRBY', TOTALS, 'clock', 1) end
local function total(sum) return tonumber(redis.call('HGET', TOTALS, sum) or 0) end

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function run()
  local text = redis.pcall('INFO', 'server')
  return type(text) == 'string' and string.match(text, 'run_id:(%x+)') or ''
end

local function ready()
  local text = redis.call('GET', READY)
  return text and string.match(text, '^%S*') == run()
end

local function held(name)
  local size, stamp, token = string.match(redis.call('HGET', INFO, name) or '', '(%d+) (%d+) (%S+)')
  return tonumber(size or 0), stamp, token
end

local function writing(name)
  local size, token, gen = string.match(redis.call('HGET', WRITES, name) or '', '(%d+) (%S+) (%S*)')
  return tonumber(size or 0), token, gen
end

local function count(name, nbytes)
  if nbytes == 0 then return end
  redis.call('HINCRBY', TOTALS, 'all', nbytes)
  if redis.call('HINCRBY', TOTALS, ns_of(name), nbytes) <= 0 then redis.call('HDEL', TOTALS, ns_of(name)) end
end

local function used(name, score)
  redis.call('ZADD', USE, score, name)
  redis.call('ZADD', order_of(name), score, name)
end

local function unused(name)
  redis.call('ZREM', USE, name)
  redis.call('ZREM', order_of(name), name)
end

local function keep(name, size, token)
  local stamp = tick()
  redis.call('HSET', INFO, name, size .. ' ' .. stamp .. ' ' .. token)
  used(name, stamp)
end

-- Out of the books but for its bytes, which are returned.
local function strip(name)
  local size = math.max(held(name), (writing(name)))
  redis.call('HDEL', INFO, name)
  redis.call('HDEL', WRITES, name)
  redis.call('ZREM', LEASES, name)
  unused(name)
  return size
end

local function clear(name) count(name, -strip(name)) end

local function leave(name, token, lease)
  local size = tonumber(string.match(redis.call('HGET', LEAVING, name) or '', '^%d+') or strip(name))
  redis.call('HSET', LEAVING, name, size .. ' ' .. token)
  redis.call('ZADD', LEASES, now() + lease, name)
end

-- Size of what leaves by the hand of token, which it does no more; nil if that is not so.
local function stop_leaving(name, token)
  local size, by = string.match(redis.call('HGET', LEAVING, name) or '', '(%d+) (%S+)')
  if by ~= token then return nil end
  redis.call('HDEL', LEAVING, name)
  redis.call('ZREM', LEASES, name)
  return tonumber(size)
end
"""

RESERVE = (
    _COMMON
    + """
local name, size, budget, quota = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local token, lease, most = ARGV[5], tonumber(ARGV[6]), 500
for i = 7, #ARGV do
  local left = stop_leaving(ARGV[i], token)
  if left then count(ARGV[i], -left) end
end
if not ready() then return {'census'} end
local reply = {'evict'}
for _, other in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, most)) do
  leave(other, token, lease)
  reply[#reply + 1] = other
end
if #reply > 1 then return reply end
local own = 0
if name ~= '' then
  if redis.call('HEXISTS', LEAVING, name) == 1 or redis.call('HEXISTS', WRITES, name) == 1 then
    return {'busy'}
  end
  own = held(name)
  if own > 0 then used(name, tick()) end  -- now last in line: what it has is not evicted for itself
end
local more, freed, freed_here = math.max(size - own, 0), 0, 0
local function next_of(order)
  local lowest = redis.call('ZRANGE', order, 0, 0)[1]
  if not lowest or lowest == name or #reply > most then return false end
  local nbytes = held(lowest)
  leave(lowest, token, lease)
  reply[#reply + 1] = lowest
  freed = freed + nbytes
  if ns_of(lowest) == ns_of(name) then freed_here = freed_here + nbytes end
  return true
end
local enough = true
while enough and quota > 0 and total(ns_of(name)) - freed_here + more > quota do
  enough = next_of(order_of(name))
end
while enough and total('all') - freed + more > budget do enough = next_of(USE) end
if #reply > 1 then return reply end
if not enough then return {'full'} end
if name == '' then return {'ok'} end
count(name, more)
redis.call('HSET', WRITES, name, size .. ' ' .. token .. ' ' .. (redis.call('HGET', GEN, ns_of(name)) or ''))
redis.call('ZADD', LEASES, now() + lease, name)
unused(name)
return {'ok', own > 0 and 'again' or 'new'}
"""
)
"""ARGV: name, size, budget, quota (0: none), token, lease in ms, names deleted by this token...

``{'ok', 'new' or 'again'}``: reserved, in place of nothing or of something. ``{'evict', names...}``: delete
these objects and ask again. ``{'census'}``: make one first. ``{'busy'}``: somebody else is at that name.
``{'full'}``: others' reservations take the budget. An empty name reserves nothing: it makes all fit.
"""

COMMIT = (
    _COMMON
    + """
local name, token = ARGV[1], ARGV[2]
local size, by, gen = writing(name)
if by ~= token or not ready() or gen ~= (redis.call('HGET', GEN, ns_of(name)) or '') then return 0 end
clear(name)
count(name, size)
keep(name, size, token)
return 1
"""
)
"""ARGV: name, token. 1 if the object written counts as kept; 0: it is to be deleted, and then released."""

RELEASE = (
    _COMMON
    + """
local name, token, whole = ARGV[1], ARGV[2], ARGV[3] == '1'
local own, _, by = held(name)
local size, writer = writing(name)
if writer ~= token then
  if by == token and not writer and not whole then clear(name) end
elseif whole and own > 0 then
  count(name, own - math.max(own, size))
  redis.call('HDEL', WRITES, name)
  redis.call('ZREM', LEASES, name)
  used(name, tick())
else
  clear(name)
end
"""
)
"""ARGV: name, token, 1 if the former object is still whole. Gives a reservation back."""

STAY = (
    _COMMON
    + """
for i = 2, #ARGV do
  local size = stop_leaving(ARGV[i], ARGV[1])
  if size then keep(ARGV[i], size, ARGV[1]) end
end
"""
)
"""ARGV: token, names... Could not be deleted: kept again, the last in line."""

GONE = (
    _COMMON
    + """
for i = 1, #ARGV, 2 do
  local name = ARGV[i]
  local own, stamp = held(name)
  if stamp == ARGV[i + 1] then
    local size, writer = writing(name)
    if writer then
      count(name, size - math.max(own, size))
      redis.call('HDEL', INFO, name)
    else
      clear(name)
    end
  end
end
"""
)
"""ARGV: name and stamp, in turn. Their objects went; what was written since is another matter."""

WRITES = (
    _COMMON
    + """
local ns, token = ARGV[1], ARGV[2]
if token ~= '' then redis.call('HSET', GEN, ns, token) end
local reply, time, found = {}, now(), redis.call('HGETALL', WRITES)
for i = 1, #found, 2 do
  local name = found[i]
  if ns_of(name) == ns and tonumber(redis.call('ZSCORE', LEASES, name) or 0) > time then
    local _, by = writing(name)
    reply[#reply + 1] = by
    reply[#reply + 1] = name
  end
end
return reply
"""
)
"""ARGV: hash of a namespace, token of a forget or empty. With a token, no write of the namespace that was
reserved before counts. Tokens and names, in turn, of its writes under way whose lease has not ended."""

TOUCH = (
    _COMMON
    + """
for _, name in ipairs(ARGV) do
  if redis.call('ZSCORE', USE, name) then used(name, tick()) end
end
"""
)
"""ARGV: names, the last used last."""

BEGIN = (
    _COMMON
    + """
if not redis.call('SET', CENSUS, ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return tick()
"""
)
"""ARGV: token, lease in ms. The clock if a census may begin; 0 while another one is made."""

FOLD = (
    _COMMON
    + """
if redis.call('GET', CENSUS) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', CENSUS, ARGV[2])
local known = ready()
for i = 3, #ARGV, 2 do
  local name, size = ARGV[i], tonumber(ARGV[i + 1])
  local missing = redis.call('HEXISTS', INFO, name) + redis.call('HEXISTS', WRITES, name) == 0
  if missing and redis.call('HEXISTS', LEAVING, name) == 0 then
    count(name, size)
    keep(name, size, '-')
    if known then used(name, 0) end  -- what nobody accounted for has to leave first
  end
end
return 1
"""
)
"""ARGV: token, lease in ms, then name and size in turn, oldest first. 0: the census is another's now."""

END = (
    _COMMON
    + """
if redis.call('GET', CENSUS) ~= ARGV[1] then return 0 end
redis.call('SET', READY, run() .. ' ' .. math.floor(now() / 1000))
redis.call('DEL', CENSUS)
return 1
"""
)
"""ARGV: token. 1 if the books are now complete."""

AGE = (
    _COMMON
    + "return ready() and math.floor(now() / 1000) - string.match(redis.call('GET', READY), '%d+$') or -1"
)
"""Seconds since the last census; -1 if none was made on what the server has now."""

USAGE = _COMMON + "return {redis.call('HLEN', INFO), total('all'), ready() and 1 or 0}"
"""Entries kept, bytes of all, and 1 if the books are complete."""
