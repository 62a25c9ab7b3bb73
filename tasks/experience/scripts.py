"""The Lua that makes every write of the buffer one atomic step on the server.

Two properties of the server carry the design:
- A pending entry holds (consumer, delivery count). Both together are the fence: the count rises with each
  delivery.
- Under ``noeviction`` a script is refused for lack of memory only at its first allocating write. So
  ``PUBLISH`` begins with XADD (refused whole, nothing stored), and whatever frees memory begins with XACK
  (never refused).

No ``#!lua`` line on purpose: with one, a server that is out of memory refuses the freeing scripts as well.
"""

from tasks.experience.group_scripts import PARK, PUBLISH, PUBLISH_SCORED, REFUSE
from tasks.experience.prelude import GROUP, KEY_NAMES, script

# ARGV: policy version, iteration, "shard/shards", then (item id, portion, groups, samples, payload) each.
# -> {1, newly added} | {-1, version on record} | {-2} when the iteration was dropped | {-3, layout on record}
PUT = f"""
if call('HEXISTS', counters, 'dropped') == 1 then return {{-2}} end
local version, layout = unpack(call('HMGET', counters, 'policy_version', 'layout'))
if version and version ~= argv[1] then return {{-1, version}} end
if layout and layout ~= argv[3] then return {{-3, layout}} end
if is_closed() then return {{1, 0}} end
call('HSET', counters, 'policy_version', argv[1], 'layout', argv[3])
call('HSET', open, argv[2], argv[1])
if call('EXISTS', work) == 0 then
  call('XGROUP', 'CREATE', work, '{GROUP}', '0', 'MKSTREAM')
  call('XGROUP', 'CREATE', rollouts, '{GROUP}', '0', 'MKSTREAM')
end
local added = 0
for i = 4, #argv, 5 do
  if call('SADD', items, argv[i]) == 1 then
    call('XADD', work, '*', 'id', argv[i], 'portion', argv[i + 1], 'version', argv[1],
         'groups', argv[i + 2], 'samples', argv[i + 3], 'payload', argv[i + 4])
    added = added + 1
  end
end
return {{1, added}}
"""

# Expired and returned entries first, oldest first, then new ones. XPENDING IDLE + XCLAIM and not XAUTOCLAIM:
# the latter hands over before one can look at the delivery count, and stops after 10 * COUNT live leases.
# ARGV: "work" | "rollouts", consumer, lease ms, max attempts, count, policy version or "", "shard/shards"
# -> {1, entries lost, then (head, payload) of each item or the head of each group} | {-1, version on record}
#    | {-2, reason} when barred | {-3, layout on record}. The head is "entry attempt", then of work "portion
#    version groups samples", of rollouts "blob bytes samples id": one string, since each value costs the
#    consumer time to parse. The consumer reads a group's payload from ``payloads``.
TAKE = f"""
local is_work, worker, want = argv[1] == 'work', argv[2], tonumber(argv[5])
local stream = is_work and work or rollouts
if call('EXISTS', stream) == 0 then return {{1, 0}} end
local version, layout = unpack(call('HMGET', counters, 'policy_version', 'layout'))
if argv[6] ~= '' and argv[6] ~= version then return {{-1, version}} end
if layout ~= argv[7] then return {{-3, layout}} end
local why = is_work and call('HGET', barred, worker)
if why then return {{-2, why}} end
local reply, lost, given = {{1, 0}}, 0, 0
local clock = is_work and call('TIME')
local now = clock and string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000))

local function set_aside(entry, attempts, owner)
  local found = call('XRANGE', stream, entry, entry)
  local last = call('HGET', failures, entry) or owner
  local reason = string.format('%d attempts failed, the last by %s', attempts, last)
  remove(stream, entry)
  if #found == 0 then lost = lost + 1; return end
  if is_work then
    call('HSET', poison, field(found[1][2], 'id'), reason)
    count('poisoned', 1)
  else
    local blob, _, samples, id = what(field(found[1][2], 'what'))
    local payload = call('HGET', payloads, blob)
    if not payload then lost = lost + 1; return end
    call('HDEL', payloads, blob)
    call('HSET', unscored, id, samples .. ' ' .. reason .. '\\n' .. payload)
    count('groups_unscored', 1)
    count('bytes_waiting', -#payload)
  end
end
local function hand_out(entry, attempt, fields)
  given = given + 1
  local head = entry .. ' ' .. attempt .. ' '
  if not is_work then
    reply[#reply + 1] = head .. field(fields, 'what')
    return
  end
  call('HSET', since, entry, now)
  local rest = {{}}
  for i, name in ipairs({{'portion', 'version', 'groups', 'samples'}}) do rest[i] = field(fields, name) end
  reply[#reply + 1] = head .. table.concat(rest, ' ')
  reply[#reply + 1] = field(fields, 'payload')
end

while given < want do
  local idle = call('XPENDING', stream, '{GROUP}', 'IDLE', argv[3], '-', '+', want - given)
  if #idle == 0 then break end
  for _, pending in ipairs(idle) do
    local failed = pending[4] - tonumber(call('HGET', returns, pending[1]) or 0)
    if failed >= tonumber(argv[4]) then
      set_aside(pending[1], failed, pending[2])
    else
      local claimed = call('XCLAIM', stream, '{GROUP}', worker, argv[3], pending[1])
      if #claimed == 0 then lost = lost + 1
      else hand_out(pending[1], pending[4] + 1, claimed[1][2]) end
    end
  end
end
if given < want then
  local room = want - given
  local new = call('XREADGROUP', 'GROUP', '{GROUP}', worker, 'COUNT', room, 'STREAMS', stream, '>')
  if new then for _, entry in ipairs(new[1][2]) do hand_out(entry[1], '1', entry[2]) end end
end
reply[2] = lost
return reply
"""

# ARGV: "work" | "rollouts", consumer, then (entry, attempt) each -> how many are still held (and now
# renewed). JUSTID: a renewal is not a delivery.
RENEW = f"""
local stream, renewed = argv[1] == 'work' and work or rollouts, 0
for i = 3, #argv, 2 do
  if held(stream, argv[i], argv[2], argv[i + 1]) then
    call('XCLAIM', stream, '{GROUP}', argv[2], 0, argv[i], 'JUSTID')
    renewed = renewed + 1
  end
end
return renewed
"""

# ARGV as RENEW -> how many were handed back. TIME 0 makes the entry idle since 1970: the next TAKE finds it.
RETURN = """
local stream, returned = argv[1] == 'work' and work or rollouts, 0
for i = 3, #argv, 2 do
  if held(stream, argv[i], argv[2], argv[i + 1]) then
    hand_back(stream, argv[i])
    call('HINCRBY', returns, argv[i], 1)
    returned = returned + 1
  end
end
return returned
"""

# ARGV: entry, worker, attempt, reason -> 1 | 0. As RETURN for one item, but the attempt counts as failed.
FAIL = """
if not held(work, argv[1], argv[2], argv[3]) then return 0 end
hand_back(work, argv[1])
call('HSET', failures, argv[1], argv[2] .. ': ' .. argv[4])
return 1
"""

# ARGV: entry, worker, attempt, item id -> 1 | 0. The holder may ask twice: the reply to the first may have
# been lost. An item that lost a group meanwhile goes back to the queue instead.
SETTLE = """
local fence = argv[3] .. ' ' .. argv[2]
if held(work, argv[1], argv[2], argv[3]) then
  if call('SREM', redo, argv[4]) == 1 then
    hand_back(work, argv[1])
    call('HINCRBY', returns, argv[1], 1)
    return 0
  end
  local fields = call('XRANGE', work, argv[1], argv[1])[1][2]
  remove(work, argv[1])
  call('HSET', settled, argv[4], fence)
  call('HSET', done, argv[4], cmsgpack.pack(fields))
  count('settled', 1)
  return 1
end
return call('HGET', settled, argv[4]) == fence and 1 or 0
"""

# No more leases and no more groups: the iteration's quota is met, or its groups are being scored for good.
# ARGV: iteration -> items that were not settled
CLOSE = """
call('HDEL', open, argv[1])
if is_closed() then return 0 end
local adopted, left_behind = {}, {}
for _, value in ipairs(call('HVALS', published)) do
  local _, _, blob = where(value)
  adopted[blob] = true
end
for _, blob in ipairs(call('HKEYS', payloads)) do
  if not adopted[blob] then left_behind[#left_behind + 1] = blob end
end
in_parts('HDEL', payloads, left_behind)
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
call('HDEL', open, argv[1])
call('HDEL', counters, 'bytes_waiting')
call('HSET', counters, 'dropped', 1)
"""

# Of an iteration that was dropped, the mark and the counters: the next PUT begins it anew.
REOPEN = """
if call('HEXISTS', counters, 'dropped') == 1 then call('UNLINK', counters) end
"""

ALL = {
    "put": script(PUT),
    "take": script(TAKE),
    "renew": script(RENEW),
    "return": script(RETURN),
    "fail": script(FAIL),
    "settle": script(SETTLE),
    "publish": script(PUBLISH),
    "park": script(PARK),
    "publish_scored": script(PUBLISH_SCORED),
    "refuse": script(REFUSE),
    "close": script(CLOSE),
    "progress": script(PROGRESS),
    "drop": script(DROP),
    "reopen": script(REOPEN),
}
