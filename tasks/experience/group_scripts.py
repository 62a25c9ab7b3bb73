"""The Lua that stores, keeps, scores and refuses groups; ``scripts.py`` has the rest and the rules for all.

What surprises: payloads do not pass through Lua, which would copy each three times and hash it twice (TAKE
makes an exception for small ones, to save a round trip). The client puts them into the hash ``payloads`` just
before PUBLISH, under names ("blobs") that no other call uses. PUBLISH adopts a group only with its whole
payload and deletes what it does not adopt; what a worker that died between the two leaves there is in
nobody's way, and CLOSE sweeps it.
"""

from tasks.experience.prelude import GROUP

# ARGV: token, entry, worker, attempt, capacity in bytes, item id, tokens, ms, then (group id, samples, bytes)
# each, the payload of the nth in the blob "token/n". Without a token nothing is stored: is there room?
# -> {1, newly stored} | {0, bytes waiting} when full | {-1} when the lease is lost | {-2} when closed
#    | {-3} when a payload is missing: the server had no memory for it.
# Publishing and waiting for room are signs of life: both renew the lease.
# Into an empty stream anything fits: a group larger than the capacity must not block for ever.
PUBLISH = f"""
local token, worker = ARGV[1], ARGV[3]
local ids, blobs, is_new, bytes, is_missing = {{}}, {{}}, {{}}, 0, false
for i = 9, #ARGV, 3 do
  ids[#ids + 1] = ARGV[i]
  blobs[#ids] = token .. '/' .. #ids
end
local before = known(published, ids)
if is_closed() then
  for i, id in ipairs(ids) do if not before[i] then count('late', ARGV[3 * i + 7]) end end
  in_parts('HDEL', payloads, blobs)
  return {{-2}}
end
if not held(work, ARGV[2], worker, ARGV[4]) then
  in_parts('HDEL', payloads, blobs)
  return {{-1}}
end
for i, id in ipairs(ids) do
  is_new[id] = not before[i]
  if is_new[id] then
    local size = tonumber(ARGV[3 * i + 8])
    bytes = bytes + size
    is_missing = is_missing or call('HSTRLEN', payloads, blobs[i]) ~= size
  end
end
local waiting = tonumber(call('HGET', counters, 'bytes_waiting') or 0)
local is_full = bytes > 0 and waiting > 0 and waiting + bytes > tonumber(ARGV[5])
if is_full or is_missing or token == '' then
  in_parts('HDEL', payloads, blobs)
  call('XCLAIM', work, '{GROUP}', worker, 0, ARGV[2], 'JUSTID')
  return {{is_full and 0 or token == '' and 1 or -3, waiting}}
end
local by = ARGV[6] .. ' ' .. worker
local samples, stored, added, entries, unwanted = 0, 0, {{}}, {{}}, {{}}
for i, id in ipairs(ids) do
  local size = ARGV[3 * i + 8]
  if is_new[id] then
    is_new[id] = false
    local head = blobs[i] .. ' ' .. size .. ' ' .. ARGV[3 * i + 7] .. ' ' .. id
    local entry = call('XADD', rollouts, '*', 'what', head, 'by', by)
    added[#added + 1] = id
    entries[#entries + 1] = id
    entries[#entries + 1] = entry .. ' ' .. size .. ' ' .. blobs[i]
    samples, stored = samples + ARGV[3 * i + 7], stored + size
  else
    unwanted[#unwanted + 1] = blobs[i]
  end
end
in_parts('HDEL', payloads, unwanted)
in_parts('HSET', published, entries)
if call('EXISTS', parked) == 1 then in_parts('HDEL', parked, added) end
call('XCLAIM', work, '{GROUP}', worker, 0, ARGV[2], 'JUSTID')
if #added > 0 then
  count('groups_published', #added)
  count('produced', samples)
  count('bytes_waiting', stored)
end
if #unwanted > 0 then count('duplicates', #unwanted) end
call('HINCRBY', workers, 'samples ' .. worker, samples)
call('HINCRBY', workers, 'tokens ' .. worker, ARGV[7])
call('HINCRBY', workers, 'ms ' .. worker, ARGV[8])
return {{1, #added}}
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

# One XPENDING reads what the scorer holds between the first and the last entry: all of them, if they are in
# the order in which they were taken. The others are asked for one by one.
# ARGV: scorer, then (entry, attempt, group id, packed scored group) each
# -> {1, newly stored} | {-1, group id} when a group is paired with another group's entry (nothing is stored)
PUBLISH_SCORED = f"""
if #ARGV == 1 or call('EXISTS', rollouts) == 0 then return {{1, 0}} end
local ids, sizes, blobs = {{}}, {{}}, {{}}
for i = 4, #ARGV, 4 do ids[#ids + 1] = ARGV[i] end
for i, value in ipairs(known(published, ids)) do
  local entry, size, blob = where(value)
  if entry ~= ARGV[4 * i - 2] then return {{-1, ids[i]}} end
  sizes[i], blobs[i] = size, blob
end
local attempts = {{}}
for _, pending in ipairs(call('XPENDING', rollouts, '{GROUP}', ARGV[2], ARGV[#ARGV - 3], #ids, ARGV[1])) do
  attempts[pending[1]] = pending[4]
end
local freed, ours, new, read = 0, {{}}, {{}}, {{}}
for i, id in ipairs(ids) do
  local entry, attempt = ARGV[4 * i - 2], ARGV[4 * i - 1]
  local is_held = attempts[entry] == tonumber(attempt)
  if attempts[entry] == nil then is_held = held(rollouts, entry, ARGV[1], attempt) end
  if is_held then
    attempts[entry] = false  -- the same group twice in one call counts once
    ours[#ours + 1] = entry
    new[#new + 1] = id
    new[#new + 1] = ARGV[4 * i + 1]
    freed = freed + sizes[i]
    read[#read + 1] = blobs[i]
  end
end
if #ours == 0 then return {{1, 0}} end
for i = 1, #ours, 1000 do
  call('XACK', rollouts, '{GROUP}', unpack(ours, i, math.min(i + 999, #ours)))
end
in_parts('XDEL', rollouts, ours)
if call('EXISTS', returns) == 1 then in_parts('HDEL', returns, ours) end
in_parts('HDEL', payloads, read)
in_parts('HSET', scored, new)
count('bytes_waiting', -freed)
count('groups_scored', #ours)
return {{1, #ours}}
"""

# A group that cannot be read: forget it, bar the worker that published it, put its item on the queue again.
# ARGV: scorer, entry, attempt, reason -> {1, worker} | {0} when not held
REFUSE = """
if not held(rollouts, ARGV[2], ARGV[1], ARGV[3]) then return {0} end
local fields = call('XRANGE', rollouts, ARGV[2], ARGV[2])[1][2]
local blob, size, samples, id = what(field(fields, 'what'))
local item, worker = string.match(field(fields, 'by'), '^(%S+) (.*)$')
remove(rollouts, ARGV[2])
call('HDEL', published, id)
call('HDEL', payloads, blob)
count('bytes_waiting', -size)
count('groups_published', -1)
count('refused', samples)
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
