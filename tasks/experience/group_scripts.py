"""The Lua that stores, keeps, scores and refuses groups; ``scripts.py`` has the rest and the rules for all.

What surprises: payloads do not pass through Lua, which would copy each three times and hash it twice. The
client puts them into the hash ``payloads`` just before PUBLISH, under names ("blobs") that no other call
uses, and reads them from there behind TAKE. PUBLISH adopts a group only with its whole payload and deletes
what it does not adopt; what a worker that died between the two leaves there is in nobody's way, and CLOSE
sweeps it.
"""

from tasks.experience.prelude import GROUP

COMMAND_BYTES = 256 << 10
"""Of payloads in one HSET; a value that makes it more is its last."""

# ARGV: token, entry, worker, attempt, capacity in bytes, item id, tokens, ms, then (group id, samples, bytes)
# each, the payload of the nth in the blob "token/n". Without a token nothing is stored: is there room?
# -> {1, newly stored} | {0, bytes waiting} when full | {-1} when the lease is lost | {-2} when closed
#    | {-3} when a payload is missing: the server had no memory for it.
# Publishing and waiting for room are signs of life: both renew the lease.
# Into an empty stream anything fits: a group larger than the capacity must not block for ever.
PUBLISH = f"""
local token, worker = argv[1], argv[3]
local ids, blobs, is_new, bytes, sent, is_missing = {{}}, {{}}, {{}}, 0, 0, false
local number = (#argv - 8) / 3
for i = 1, number do ids[i], blobs[i] = argv[3 * i + 6], token .. '/' .. i end
local before = known(published, ids)
if is_closed() then
  for i, id in ipairs(ids) do if not before[i] then count('late', argv[3 * i + 7]) end end
  in_parts('HDEL', payloads, blobs)
  return {{-2}}
end
if not held(work, argv[2], worker, argv[4]) then
  in_parts('HDEL', payloads, blobs)
  return {{-1}}
end
for i, id in ipairs(ids) do
  local size = tonumber(argv[3 * i + 8])
  is_new[id] = not before[i]
  if is_new[id] then bytes = bytes + size end
  sent = sent + size
  if sent > {COMMAND_BYTES} or i == number then  -- the last of an HSET, which was refused whole or not at all
    is_missing = is_missing or call('HSTRLEN', payloads, blobs[i]) ~= size
    sent = 0
  end
end
local waiting = tonumber(call('HGET', counters, 'bytes_waiting') or 0)
local is_full = bytes > 0 and waiting > 0 and waiting + bytes > tonumber(argv[5])
is_missing = is_missing and bytes > 0
if is_full or is_missing or token == '' then
  in_parts('HDEL', payloads, blobs)
  call('XCLAIM', work, '{GROUP}', worker, 0, argv[2], 'JUSTID')
  return {{is_full and 0 or token == '' and 1 or -3, waiting}}
end
local by = argv[6] .. ' ' .. worker
local samples, stored, added, entries, unwanted = 0, 0, {{}}, {{}}, {{}}
for i, id in ipairs(ids) do
  if is_new[id] then
    is_new[id] = false
    local its, size, blob, n = argv[3 * i + 7], argv[3 * i + 8], blobs[i], #added + 1
    local head = blob .. ' ' .. size .. ' ' .. its .. ' ' .. id
    local entry = call('XADD', rollouts, '*', 'what', head, 'by', by)
    added[n], entries[2 * n - 1], entries[2 * n] = id, id, entry .. ' ' .. size .. ' ' .. blob
    samples, stored = samples + its, stored + size
  else
    unwanted[#unwanted + 1] = blobs[i]
  end
end
in_parts('HDEL', payloads, unwanted)
in_parts('HSET', published, entries)
if call('EXISTS', parked) == 1 then in_parts('HDEL', parked, added) end
call('XCLAIM', work, '{GROUP}', worker, 0, argv[2], 'JUSTID')
if #added > 0 then
  count('groups_published', #added)
  count('produced', samples)
  count('bytes_waiting', stored)
end
if #unwanted > 0 then count('duplicates', #unwanted) end
call('HINCRBY', workers, 'samples ' .. worker, samples)
call('HINCRBY', workers, 'tokens ' .. worker, argv[7])
call('HINCRBY', workers, 'ms ' .. worker, argv[8])
return {{1, #added}}
"""

# Keep what a group has so far. Only the holder of the item may, since an older attempt knows less; of a
# closed iteration, or of one that inherits the group (no entry), whoever comes first.
# ARGV: entry, worker, attempt, then (group id, payload) each -> how many were kept
PARK = """
if call('HEXISTS', counters, 'dropped') == 1 then return 0 end
local first_only, kept = is_closed() or argv[1] == '', 0
if not first_only and not held(work, argv[1], argv[2], argv[3]) then return 0 end
for i = 4, #argv, 2 do
  if call('HEXISTS', published, argv[i]) == 0 then
    if first_only then kept = kept + call('HSETNX', parked, argv[i], argv[i + 1])
    else call('HSET', parked, argv[i], argv[i + 1]); kept = kept + 1 end
  end
end
return kept
"""

# One XPENDING reads what the scorer holds between the first and the last entry: all of them, if they are in
# the order in which they were taken. The others are asked for one by one.
# ARGV: scorer, then (entry, attempt, group id, packed scored group) each
# -> {1, newly stored} | {-1, group id} when a group is paired with another group's entry (nothing is stored)
PUBLISH_SCORED = f"""
if #argv == 1 or call('EXISTS', rollouts) == 0 then return {{1, 0}} end
local number, ids, sizes, blobs = (#argv - 1) / 4, {{}}, {{}}, {{}}
for i = 1, number do ids[i] = argv[4 * i] end
for i, value in ipairs(known(published, ids)) do
  local entry, size, blob = where(value)
  if entry ~= argv[4 * i - 2] then return {{-1, ids[i]}} end
  sizes[i], blobs[i] = size, blob
end
local attempts = {{}}
for _, pending in ipairs(call('XPENDING', rollouts, '{GROUP}', argv[2], argv[#argv - 3], number, argv[1])) do
  attempts[pending[1]] = pending[4]
end
local freed, ours, new, read, n = 0, {{}}, {{}}, {{}}, 0
for i, id in ipairs(ids) do
  local entry, attempt = argv[4 * i - 2], argv[4 * i - 1]
  local is_held = attempts[entry] == tonumber(attempt)
  if attempts[entry] == nil then is_held = held(rollouts, entry, argv[1], attempt) end
  if is_held then
    attempts[entry] = false  -- the same group twice in one call counts once
    n = n + 1
    ours[n], read[n], new[2 * n - 1], new[2 * n] = entry, blobs[i], id, argv[4 * i + 1]
    freed = freed + sizes[i]
  end
end
if n == 0 then return {{1, 0}} end
for i = 1, n, 1000 do call('XACK', rollouts, '{GROUP}', unpack(ours, i, math.min(i + 999, n))) end
in_parts('XDEL', rollouts, ours)
if call('EXISTS', returns) == 1 then in_parts('HDEL', returns, ours) end
in_parts('HDEL', payloads, read)
in_parts('HSET', scored, new)
count('bytes_waiting', -freed)
count('groups_scored', n)
return {{1, n}}
"""

# A group that cannot be read: forget it, bar the worker that published it, put its item on the queue again.
# ARGV: scorer, entry, attempt, reason -> {1, worker} | {0} when not held
REFUSE = """
if not held(rollouts, argv[2], argv[1], argv[3]) then return {0} end
local fields = call('XRANGE', rollouts, argv[2], argv[2])[1][2]
local blob, size, samples, id = what(field(fields, 'what'))
local item, worker = string.match(field(fields, 'by'), '^(%S+) (.*)$')
remove(rollouts, argv[2])
call('HDEL', published, id)
call('HDEL', payloads, blob)
count('bytes_waiting', -size)
count('groups_published', -1)
count('refused', samples)
call('HSET', barred, worker, argv[4])
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
