"""The Lua that makes every write of the buffer one atomic step on the server.

Each script gets the same KEYS (``KEY_NAMES``, in order) and begins with ``PRELUDE``.

Two properties of the server carry the design:
- A pending entry holds (consumer, delivery count). Both together are the fence: the count rises with each
  delivery.
- Under ``noeviction`` a script is refused for lack of memory only at its first allocating write. So
  ``PUBLISH`` begins with XADD (refused whole, nothing stored), and whatever frees memory begins with XACK
  (never refused).

No ``#!lua`` line on purpose: with one, a server that is out of memory refuses the freeing scripts as well.
"""

KEY_NAMES = (
    "work",  # stream of items, queued and leased
    "items",  # set of every item id ever put
    "settled",  # hash item id -> worker and attempt that settled it
    "poison",  # hash item id -> reason
    "returns",  # hash entry -> how often it was handed back; these attempts are not the item's fault
    "failures",  # hash entry -> "worker: reason" of the last attempt that failed and said so
    "since",  # hash entry -> server time in ms at which the current lease was handed out
    "rollouts",  # stream of groups that wait for a scorer or are with one
    "published",  # hash group id -> "entry bytes" in ``rollouts``
    "done",  # hash item id -> the settled item, packed: a refused group puts it on the queue again
    "redo",  # set of item ids that are leased while one of their groups was refused
    "parked",  # hash group id -> what its interrupted samples have so far
    "unscored",  # hash group id -> "samples reason", a line break, the payload
    "scored",  # hash group id -> 4 bytes of sample count, then the payload
    "workers",  # hash "tokens worker" | "samples worker" | "ms worker" -> total of what it published
    "counters",  # hash; the only key that outlives ``drop``
)
CAMPAIGN_KEYS = (
    "open",  # hash iteration -> policy version that must sample it; what a standing worker looks at
    "barred",  # hash worker -> why it gets no more work
)

RETURNED = "-returned-"  # the consumer that owns what was handed back
GROUP = "g"  # one consumer group a stream is enough

PRELUDE = f"""
local {", ".join(KEY_NAMES + CAMPAIGN_KEYS)} = unpack(KEYS)
local function call(...) return redis.call(...) end
local function is_closed() return call('HEXISTS', counters, 'closed') == 1 end
local function count(name, by) call('HINCRBY', counters, name, by) end
local function held(stream, entry, worker, attempt)
  if call('EXISTS', stream) == 0 then return false end
  local pending = call('XPENDING', stream, '{GROUP}', entry, entry, 1)
  return #pending == 1 and pending[1][2] == worker and pending[1][4] == tonumber(attempt)
end
local function remove(stream, entry)
  call('XACK', stream, '{GROUP}', entry)
  call('XDEL', stream, entry)
  call('HDEL', returns, entry)
  call('HDEL', since, entry)
  call('HDEL', failures, entry)
end
local function hand_back(stream, entry)
  call('XCLAIM', stream, '{GROUP}', '{RETURNED}', 0, entry, 'TIME', 0, 'JUSTID')
  call('HDEL', since, entry)
end
local function field(fields, name)
  for i = 1, #fields, 2 do if fields[i] == name then return fields[i + 1] end end
end
"""

# ARGV: policy version, iteration, "shard/shards", then (item id, portion, groups, samples, payload) each.
# -> {1, newly added} | {-1, version on record} | {-2} when the iteration was dropped | {-3, layout on record}
PUT = f"""
if call('HEXISTS', counters, 'dropped') == 1 then return {{-2}} end
local version, layout = unpack(call('HMGET', counters, 'policy_version', 'layout'))
if version and version ~= ARGV[1] then return {{-1, version}} end
if layout and layout ~= ARGV[3] then return {{-3, layout}} end
if is_closed() then return {{1, 0}} end
call('HSET', counters, 'policy_version', ARGV[1], 'layout', ARGV[3])
call('HSET', open, ARGV[2], ARGV[1])
if call('EXISTS', work) == 0 then
  call('XGROUP', 'CREATE', work, '{GROUP}', '0', 'MKSTREAM')
  call('XGROUP', 'CREATE', rollouts, '{GROUP}', '0', 'MKSTREAM')
end
local added = 0
for i = 4, #ARGV, 5 do
  if call('SADD', items, ARGV[i]) == 1 then
    call('XADD', work, '*', 'id', ARGV[i], 'portion', ARGV[i + 1], 'version', ARGV[1],
         'groups', ARGV[i + 2], 'samples', ARGV[i + 3], 'payload', ARGV[i + 4])
    added = added + 1
  end
end
return {{1, added}}
"""

# Expired and returned entries first, oldest first, then new ones. XPENDING IDLE + XCLAIM and not XAUTOCLAIM:
# the latter hands over before one can look at the delivery count, and stops after 10 * COUNT live leases.
# ARGV: "work" | "rollouts", consumer, lease ms, max attempts, count, policy version or "", "shard/shards"
# -> {1, entries lost, {entry, attempt, fields}...} | {-1, version on record} | {-2, reason} when barred
#    | {-3, layout on record}
TAKE = f"""
local is_work, worker, want = ARGV[1] == 'work', ARGV[2], tonumber(ARGV[5])
local stream = is_work and work or rollouts
if call('EXISTS', stream) == 0 then return {{1, 0}} end
local version, layout = unpack(call('HMGET', counters, 'policy_version', 'layout'))
if ARGV[6] ~= '' and ARGV[6] ~= version then return {{-1, version}} end
if layout ~= ARGV[7] then return {{-3, layout}} end
local why = is_work and call('HGET', barred, worker)
if why then return {{-2, why}} end
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local reply, lost = {{1, 0}}, 0

local function set_aside(entry, attempts, owner)
  local found = call('XRANGE', stream, entry, entry)
  local last = call('HGET', failures, entry) or owner
  local reason = string.format('%d attempts failed, the last by %s', attempts, last)
  remove(stream, entry)
  if #found == 0 then lost = lost + 1; return end
  local id, samples = field(found[1][2], 'id'), field(found[1][2], 'samples')
  if is_work then
    call('HSET', poison, id, reason)
    count('poisoned', 1)
  else
    local payload = field(found[1][2], 'payload')
    call('HSET', unscored, id, samples .. ' ' .. reason .. '\\n' .. payload)
    count('groups_unscored', 1)
    count('bytes_waiting', -#payload)
  end
end
local function hand_out(entry, attempt, fields)
  if is_work then
    call('HSET', since, entry, string.format('%.0f', now))
  else  -- a scorer needs no more, and each value costs it time to parse
    fields = {{'id', field(fields, 'id'), 'samples', field(fields, 'samples'), 'payload', field(fields,
    'payload')}} end reply[#reply + 1] = {{entry, attempt, fields}} end

while #reply - 2 < want do
  local idle = call('XPENDING', stream, '{GROUP}', 'IDLE', ARGV[3], '-', '+', want - (#reply - 2))
  if #idle == 0 then break end
  for _, pending in ipairs(idle) do
    local failed = pending[4] - tonumber(call('HGET', returns, pending[1]) or 0)
    if failed >= tonumber(ARGV[4]) then
      set_aside(pending[1], failed, pending[2])
    else
      local claimed = call('XCLAIM', stream, '{GROUP}', worker, ARGV[3], pending[1])
      if #claimed == 0 then lost = lost + 1
      else hand_out(pending[1], pending[4] + 1, claimed[1][2]) end
    end
  end
end
if #reply - 2 < want then
  local room = want - (#reply - 2)
  local new = call('XREADGROUP', 'GROUP', '{GROUP}', worker, 'COUNT', room, 'STREAMS', stream, '>')
  if new then for _, entry in ipairs(new[1][2]) do hand_out(entry[1], 1, entry[2]) end end
end
reply[2] = lost
return reply
"""

# ARGV: "work" | "rollouts", consumer, then (entry, attempt) each -> how many are still held (and now
# renewed). JUSTID: a renewal is not a delivery.
RENEW = f"""
local stream, renewed = ARGV[1] == 'work' and work or rollouts, 0
for i = 3, #ARGV, 2 do
  if held(stream, ARGV[i], ARGV[2], ARGV[i + 1]) then
    call('XCLAIM', stream, '{GROUP}', ARGV[2], 0, ARGV[i], 'JUSTID')
    renewed = renewed + 1
  end
end
return renewed
"""

# ARGV as RENEW -> how many were handed back. TIME 0 makes the entry idle since 1970: the next TAKE finds it.
RETURN = """
local stream, returned = ARGV[1] == 'work' and work or rollouts, 0
for i = 3, #ARGV, 2 do
  if held(stream, ARGV[i], ARGV[2], ARGV[i + 1]) then
    hand_back(stream, ARGV[i])
    call('HINCRBY', returns, ARGV[i], 1)
    returned = returned + 1
  end
end
return returned
"""

# ARGV: entry, worker, attempt, reason -> 1 | 0. As RETURN for one item, but the attempt counts as failed.
FAIL = """
if not held(work, ARGV[1], ARGV[2], ARGV[3]) then return 0 end
hand_back(work, ARGV[1])
call('HSET', failures, ARGV[1], ARGV[2] .. ': ' .. ARGV[4])
return 1
"""

# ARGV: entry, worker, attempt, item id -> 1 | 0. The holder may ask twice: the reply to the first may have
# been lost. An item that lost a group meanwhile goes back to the queue instead.
SETTLE = """
local fence = ARGV[3] .. ' ' .. ARGV[2]
if held(work, ARGV[1], ARGV[2], ARGV[3]) then
  if call('SREM', redo, ARGV[4]) == 1 then
    hand_back(work, ARGV[1])
    call('HINCRBY', returns, ARGV[1], 1)
    return 0
  end
  local fields = call('XRANGE', work, ARGV[1], ARGV[1])[1][2]
  remove(work, ARGV[1])
  call('HSET', settled, ARGV[4], fence)
  call('HSET', done, ARGV[4], cmsgpack.pack(fields))
  count('settled', 1)
  return 1
end
return call('HGET', settled, ARGV[4]) == fence and 1 or 0
"""

# ARGV: entry, worker, attempt, capacity in bytes, item id, tokens, ms, then (group id, samples, payload)
# each -> {1, newly stored} | {0, bytes waiting} when full | {-1} when the lease is lost | {-2} when closed.
# Publishing and waiting for room are signs of life: both renew the lease.
# Into an empty stream anything fits: a group larger than the capacity must not block for ever.
PUBLISH = f"""
if is_closed() then
  for i = 8, #ARGV, 3 do
    if call('HEXISTS', published, ARGV[i]) == 0 then count('late', ARGV[i + 1]) end
  end
  return {{-2}}
end
if not held(work, ARGV[1], ARGV[2], ARGV[3]) then return {{-1}} end
local bytes, waiting, is_new = 0, tonumber(call('HGET', counters, 'bytes_waiting') or 0), {{}}
for i = 8, #ARGV, 3 do
  is_new[ARGV[i]] = call('HEXISTS', published, ARGV[i]) == 0
  if is_new[ARGV[i]] then bytes = bytes + #ARGV[i + 2] end
end
if bytes > 0 and waiting > 0 and waiting + bytes > tonumber(ARGV[4]) then
  call('XCLAIM', work, '{GROUP}', ARGV[2], 0, ARGV[1], 'JUSTID')
  return {{0, waiting}}
end
local groups, samples, duplicates, stored = 0, 0, 0, 0
for i = 8, #ARGV, 3 do
  if is_new[ARGV[i]] then
    is_new[ARGV[i]] = false
    local entry = call('XADD', rollouts, '*', 'id', ARGV[i], 'samples', ARGV[i + 1], 'item', ARGV[5],
                       'worker', ARGV[2], 'payload', ARGV[i + 2])
    call('HSET', published, ARGV[i], entry .. ' ' .. #ARGV[i + 2])
    call('HDEL', parked, ARGV[i])
    groups, samples, stored = groups + 1, samples + ARGV[i + 1], stored + #ARGV[i + 2]
  else
    duplicates = duplicates + 1
  end
end
call('XCLAIM', work, '{GROUP}', ARGV[2], 0, ARGV[1], 'JUSTID')
if groups > 0 then
  count('groups_published', groups)
  count('produced', samples)
  count('bytes_waiting', stored)
end
if duplicates > 0 then count('duplicates', duplicates) end
call('HINCRBY', workers, 'samples ' .. ARGV[2], samples)
call('HINCRBY', workers, 'tokens ' .. ARGV[2], ARGV[6])
call('HINCRBY', workers, 'ms ' .. ARGV[2], ARGV[7])
return {{1, groups}}
"""

# Keep what a group has so far. Only the holder of the item may, since an older attempt knows less; of a
# closed iteration, or of one that inherits the group (no entry), whoever comes first.
# ARGV: entry, worker, attempt, then (group id, payload) each -> how many were kept
PARK = """
if call('HEXISTS', counters, 'dropped') == 1 then return 0 end
local first_only, kept = is_closed() or ARGV[1] == '', 0
if not first_only and not held(work, ARGV[1], ARGV[2], ARGV[3]) then return 0 end
for i = 4, #ARGV, 2 do
  if call('HEXISTS', published, ARGV[i]) == 0 then
    if first_only then kept = kept + call('HSETNX', parked, ARGV[i], ARGV[i + 1])
    else call('HSET', parked, ARGV[i], ARGV[i + 1]); kept = kept + 1 end
  end
end
return kept
"""

# ARGV: scorer, then (entry, attempt, group id, packed scored group) each
# -> {1, newly stored} | {-1, group id} when a group is paired with another group's entry (nothing is stored)
PUBLISH_SCORED = (
    f"local GROUP = '{GROUP}'"
    + """
if call('EXISTS', rollouts) == 0 then return {1, 0} end
local bytes = {}
for i = 2, #ARGV, 4 do
  local entry, size = string.match(call('HGET', published, ARGV[i + 2]) or '', '^(%S+) (%d+)$')
  if entry ~= ARGV[i] then return {-1, ARGV[i + 2]} end
  bytes[i] = size
end
local stored, freed, ours = 0, 0, {}
for i = 2, #ARGV, 4 do
  if held(rollouts, ARGV[i], ARGV[1], ARGV[i + 1]) then
    ours[#ours + 1] = ARGV[i]
    freed = freed + bytes[i]
    bytes[i] = 'held'
  end
end
if #ours == 0 then return {1, 0} end
call('XACK', rollouts, GROUP, unpack(ours))
call('XDEL', rollouts, unpack(ours))
call('HDEL', returns, unpack(ours))
for i = 2, #ARGV, 4 do
  if bytes[i] == 'held' then stored = stored + call('HSETNX', scored, ARGV[i + 2], ARGV[i + 3]) end
end
count('bytes_waiting', -freed)
if stored > 0 then count('groups_scored', stored) end
return {1, stored}
"""
)

# A group that cannot be read: forget it, bar the worker that published it, put its item on the queue again.
# ARGV: scorer, entry, attempt, reason -> {1, worker} | {0} when not held
REFUSE = """
if not held(rollouts, ARGV[2], ARGV[1], ARGV[3]) then return {0} end
local fields = call('XRANGE', rollouts, ARGV[2], ARGV[2])[1][2]
local id, item, worker = field(fields, 'id'), field(fields, 'item'), field(fields, 'worker')
remove(rollouts, ARGV[2])
call('HDEL', published, id)
count('bytes_waiting', -#field(fields, 'payload'))
count('groups_published', -1)
count('refused', field(fields, 'samples'))
call('HSET', barred, worker, ARGV[4])
local packed = call('HGET', done, item)
if is_closed() then return {1, worker} end
if packed then
  call('XADD', work, '*', unpack(cmsgpack.unpack(packed)))
  call('HDEL', done, item)
  call('HDEL', settled, item)
  count('settled', -1)
else
  call('SADD', redo, item)
end
return {1, worker}
"""

# No more leases and no more groups: the iteration's quota is met, or its groups are being scored for good.
# ARGV: iteration -> items that were not settled
CLOSE = """
call('HDEL', open, ARGV[1])
if is_closed() then return 0 end
local left = call('XLEN', work)
call('HSET', counters, 'closed', 1, 'left', left)
call('UNLINK', work, returns, since, failures, redo)
return left
"""

# -> {work entries, ms of the oldest lease, bytes of all keys, {consumer, leases}..., flat counters, flat
#     workers}
PROGRESS = f"""
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local oldest, bytes, leases = 0, 0, {{}}
for _, handed_out in ipairs(call('HVALS', since)) do oldest = math.max(oldest, now - handed_out) end
for i = 1, {len(KEY_NAMES)} do
  local key = KEYS[i]
  bytes = bytes + (call('MEMORY', 'USAGE', key) or 0)
end
if call('EXISTS', work) == 1 then leases = call('XPENDING', work, '{GROUP}')[4] or {{}} end
return {{call('XLEN', work), oldest, bytes, leases, call('HGETALL', counters),
         call('HGETALL', workers)}}
"""

# The mark keeps late writers and a restarted campaign from opening the iteration again. ARGV: iteration
DROP = f"""
for i = 1, {len(KEY_NAMES)} do if KEYS[i] ~= counters then call('UNLINK', KEYS[i]) end end
call('HDEL', open, ARGV[1])
call('HDEL', counters, 'bytes_waiting')
call('HSET', counters, 'dropped', 1)
"""

ALL = {
    "put": PUT,
    "take": TAKE,
    "renew": RENEW,
    "return": RETURN,
    "fail": FAIL,
    "settle": SETTLE,
    "publish": PUBLISH,
    "park": PARK,
    "publish_scored": PUBLISH_SCORED,
    "refuse": REFUSE,
    "close": CLOSE,
    "progress": PROGRESS,
    "drop": DROP,
}
