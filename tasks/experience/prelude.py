"""What every script of the buffer begins with: the names of its keys and a few functions.

A script's KEYS are those that its text names: the client packs each one and the server reads it, which for
small samples is a good part of a call. A script that numbers its KEYS gets all ``KEY_NAMES`` first.
"""

import re
from dataclasses import dataclass

KEY_NAMES = (
    "work",  # stream of items, queued and leased
    "items",  # set of every item id ever put
    "settled",  # hash item id -> worker and attempt that settled it
    "poison",  # hash item id -> reason
    "returns",  # hash entry -> how often it was handed back; these attempts are not the item's fault
    "failures",  # hash entry -> "worker: reason" of the last attempt that failed and said so
    "since",  # hash entry -> server time in ms at which the current lease was handed out
    "rollouts",  # stream of groups that wait for a scorer or are with one, each with the fields
    # what: "blob bytes samples group id" and by: "item id worker"
    "payloads",  # hash blob -> payload of a group in ``rollouts``: large values cost too much inside Lua
    "published",  # hash group id -> "entry bytes blob" in ``rollouts`` and ``payloads``
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

_FUNCTIONS = f"""
local call, argv = redis.call, ARGV
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
local function in_parts(command, key, list)  -- unpack has a limit, and a script must not stop half-way
  for i = 1, #list, 1000 do call(command, key, unpack(list, i, math.min(i + 999, #list))) end
end
local function known(hash, ids)
  local found = {{}}
  for i = 1, #ids, 1000 do
    for j, value in ipairs(call('HMGET', hash, unpack(ids, i, math.min(i + 999, #ids)))) do
      found[i + j - 1] = value
    end
  end
  return found
end
local function where(value)  -- of a group: entry, bytes, blob
  return string.match(value or '', '^(%S+) (%d+) (%S+)$')
end
local function what(value)  -- of a group's entry: blob, bytes, samples, group id
  return string.match(value, '^(%S+) (%d+) (%d+) (.*)$')
end
local function field(fields, name)
  for i = 1, #fields, 2 do if fields[i] == name then return fields[i + 1] end end
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua with its prelude, and the keys that it wants, in order."""

    text: str
    key_names: tuple[str, ...]


def script(body: str) -> Script:
    text = _FUNCTIONS + body
    used = {*re.findall(r"\w+", text)}
    by_number = KEY_NAMES if "KEYS[i]" in body else ()
    names = tuple(name for name in KEY_NAMES + CAMPAIGN_KEYS if name in used or name in by_number)
    return Script(f"local {', '.join(names)} = unpack(KEYS)\n{text}", names)
