"""The Lua scripts that change a journal in Redis. Each checks and changes it atomically.

`server_writer.py` says what is compared, and what follows from it. The log must have as many
entries as the meta says.
"""

from __future__ import annotations

from ..server_writer import Change
from .client import Script

_KEYS = """
local meta, log, snapshots, blobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
"""

_CHECK = (
    _KEYS
    + """
local term, token, acknowledged = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local m = redis.call('HMGET', meta,
  'term', 'token', 'owner', 'last', 'entries', 'began', 'cut_term', 'condemned')
local found, last, entries = tonumber(m[1] or 0), tonumber(m[4] or 0), tonumber(m[5] or 0)

local function lose(what)
  local reason = 'acknowledged records are missing: ' .. what
  if not m[1] then
    redis.call('HSET', meta, 'format', 1, 'token', '', 'place', '', 'lease_ms', 0, 'beat', 0,
      'first', 1, 'last', 0, 'entries', 0, 'began', 0)
  end
  redis.call('HSET', meta, 'condemned', reason, 'owner', '',
    'term', string.format('%d', math.max(found, term)))
  return {'corrupt', reason}
end

local function refusal()
  local known = string.format('record %d was acknowledged in term %d', acknowledged, term)
  if m[8] then return {'corrupt', m[8]} end
  if not m[1] then return lose(known .. ', and nothing is left') end
  if found > term then
    if tonumber(m[6]) < acknowledged and tonumber(m[7] or 0) <= term then
      return lose(string.format('%s, and a later term began at record %s', known, m[6]))
    end
    return {'fenced'}
  end
  if found < term or last < acknowledged then
    return lose(string.format('%s, and the log ends at record %d of term %d', known, last, found))
  end
  if m[2] ~= token then
    return lose(known .. ', and another writer has begun that term again')
  end
  local kept = redis.call('XLEN', log)
  if kept ~= entries then
    return lose(string.format('the log has %d entries, and %d were written', kept, entries))
  end
  if m[3] == '' then return {'fenced'} end
end
"""
)


def _change(text: str) -> Script:
    refuse = """
local refused = refusal()
if refused then return refused end
"""
    return Script(_CHECK + refuse + text)


_BEAT = _change("redis.call('HINCRBY', meta, 'beat', 1) return {'ok'}")

SCRIPTS = {
    Change.APPEND: _change(
        """
local new_last, batch = ARGV[4], ARGV[5]
if m[4] == new_last and last > acknowledged then
  local entry = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not entry or entry[2][2] ~= batch then
    return lose(string.format('record %d is not what was appended', last))
  end
  redis.call('HINCRBY', meta, 'beat', 1)  -- a write, for WAIT on this connection to wait for
  return {'ok'}
end
if last ~= acknowledged then return {'overtaken'} end
redis.call('XADD', log, new_last .. '-0', 'batch', batch)
redis.call('HSET', meta, 'last', new_last, 'entries', entries + 1)
return {'ok'}
"""
    ),
    Change.BEAT: _BEAT,
    Change.CONFIRM: _BEAT,  # WAIT and WAITAOF follow it, and confirm all earlier writes
    Change.CONDEMN: Script(
        _CHECK
        + """
if m[1] and found > term then return {'fenced'} end
if m[8] then return {'ok'} end
lose(ARGV[4])
redis.call('HSET', meta, 'condemned', ARGV[4])
return {'ok'}
"""
    ),
    Change.WRITE_SNAPSHOT: _change("redis.call('HSET', snapshots, ARGV[4], ARGV[5]) return {'ok'}"),
    Change.DELETE_SNAPSHOT: _change("redis.call('HDEL', snapshots, ARGV[4]) return {'ok'}"),
    Change.WRITE_BLOB: _change(
        """
if redis.call('HGET', blobs, ARGV[4]) == ARGV[5] then
  redis.call('HINCRBY', meta, 'beat', 1)  -- as above
else
  redis.call('HSET', blobs, ARGV[4], ARGV[5])
end
return {'ok'}
"""
    ),
    Change.DELETE_BLOB: _change("redis.call('HDEL', blobs, ARGV[4]) return {'ok'}"),
    Change.TRIM: _change(
        """
local before = tonumber(ARGV[4])
if before <= tonumber(redis.call('HGET', meta, 'first')) then return {'ok'} end
local newest = 0
for _, sequence in ipairs(redis.call('HKEYS', snapshots)) do
  newest = math.max(newest, tonumber(sequence))
end
if newest < before - 1 then return {'no snapshot', newest} end
-- An entry's id is its last record's sequence: an entry with a record that must stay stays.
local passed = redis.call('XREVRANGE', log, before - 1, '-', 'COUNT', 1)[1]
if not passed then return {'ok'} end
local removed = redis.call('XTRIM', log, 'MINID', before)
redis.call('HSET', meta, 'entries', entries - removed,
  'first', string.format('%d', tonumber(string.match(passed[1], '%d+')) + 1))
return {'ok'}
"""
    ),
}

OPEN = Script(
    _KEYS
    + """
local names = {'term', 'token', 'beat', 'last', 'condemned'}
local m = redis.call('HMGET', meta, unpack(names))
for i = 1, #names do
  if (m[i] or '') ~= ARGV[i] then return {'changed'} end
end
if not m[1] then
  if ARGV[10] ~= 'repair' and redis.call('EXISTS', log, snapshots, blobs) > 0 then
    return {'changed'}
  end
  redis.call('HSET', meta, 'format', 1, 'first', 1, 'last', 0, 'entries', 0)
end
local term = redis.call('HINCRBY', meta, 'term', 1)
redis.call('HSET', meta, 'token', ARGV[6], 'owner', ARGV[7], 'place', ARGV[8],
  'lease_ms', ARGV[9], 'beat', 0, 'began', m[4] or 0)
return {'ok', term}
"""
)
"""Begin a term, if the meta still equals ARGV[1] to ARGV[5]. Afterwards, nobody can append in
the previous term."""

LOSE = Script(
    _CHECK
    + """
if tonumber(m[7] or 0) > term then return {'ok'} end
if m[8] then return {'corrupt', m[8]} end
if last >= acknowledged then return {'ok'} end  -- the reader looked at a replica that lags behind
return lose(ARGV[4])
"""
)
"""For readers that find acknowledged records missing: condemns the log, whoever is its writer,
unless they are there, or a repair removed them."""

CLOSE = Script(
    _KEYS
    + """
local m = redis.call('HMGET', meta, 'term', 'token')
if m[1] == ARGV[1] and m[2] == ARGV[2] then redis.call('HSET', meta, 'owner', '') end
return {'ok'}
"""
)

COPY = Script(
    """
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', 100)
for _, entry in ipairs(entries) do
  redis.call('XADD', KEYS[2], entry[1], unpack(entry[2]))
end
return #entries > 0 and entries[#entries][1] or ''
"""
)
"""Copy some entries of a stream, from one id to another, to the end of a second stream."""

CUT = Script(
    _KEYS
    + """
local kept, aside_meta, aside_log, aside_snapshots = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local term, token, first, last, new_term, moves = unpack(ARGV)
local m = redis.call('HMGET', meta, 'term', 'token')
if m[1] ~= term or m[2] ~= token then return {'fenced'} end
redis.call('COPY', meta, aside_meta)
if moves == '1' then
  redis.call('RENAME', log, aside_log)
  if redis.call('EXISTS', kept) == 1 then redis.call('RENAME', kept, log) end
end
for _, sequence in ipairs(redis.call('HKEYS', snapshots)) do
  if tonumber(sequence) > tonumber(last) then
    redis.call('HSET', aside_snapshots, sequence, redis.call('HGET', snapshots, sequence))
    redis.call('HDEL', snapshots, sequence)
  end
end
redis.call('HDEL', meta, 'condemned')
redis.call('HSET', meta, 'first', first, 'last', last, 'began', last, 'term', new_term,
  'cut_term', new_term, 'entries', redis.call('XLEN', log), 'owner', '')
return {'ok'}
"""
)
"""End the log at `last`, if the meta still has the cut's term and token."""
