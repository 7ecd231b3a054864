"""The Lua scripts that change a journal in Redis. Each checks and changes it atomically.

Each change begins by comparing the meta with what its writer knows, and the number of the log's
entries with the meta's. It returns whether all is as it should be; if not, it changes nothing, and
`ServerWriter` finds out why.
"""

from __future__ import annotations

from ..server_writer import Change
from .client import Script

_KEYS = """
local meta, log, snapshots, blobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
"""


def _change(text: str) -> Script:
    return Script(
        _KEYS
        + """
local m = redis.call('HMGET', meta, 'term', 'token', 'owner', 'last', 'entries', 'condemned')
if m[1] ~= ARGV[1] or m[2] ~= ARGV[2] or m[3] == '' or (m[6] or '') ~= '' then return 0 end
local acknowledged, last, entries = tonumber(ARGV[3]), tonumber(m[4]), tonumber(m[5])
if last < acknowledged or redis.call('XLEN', log) ~= entries then return 0 end
"""
        + text
        + "\nreturn 1\n"
    )


_BEAT = _change("redis.call('HINCRBY', meta, 'beat', 1)")

SCRIPTS = {
    Change.APPEND: _change(
        """
if last ~= acknowledged then return 0 end
redis.call('XADD', log, ARGV[4] .. '-0', 'batch', ARGV[5])
redis.call('HSET', meta, 'last', ARGV[4], 'entries', entries + 1)
"""
    ),
    Change.BEAT: _BEAT,
    Change.CONFIRM: _BEAT,  # WAIT and WAITAOF follow it, and confirm all earlier writes
    Change.CONDEMN: Script(
        _KEYS
        + """
local m = redis.call('HMGET', meta, 'term', 'token', 'condemned')
if m[1] ~= ARGV[1] or m[2] ~= ARGV[2] or (m[3] or '') ~= '' then return 0 end
redis.call('HSET', meta, 'condemned', ARGV[4], 'owner', '')
return 1
"""
    ),
    Change.WRITE_SNAPSHOT: _change("redis.call('HSET', snapshots, ARGV[4], ARGV[5])"),
    Change.DELETE_SNAPSHOT: _change("redis.call('HDEL', snapshots, ARGV[4])"),
    Change.WRITE_BLOB: _change(
        """
if redis.call('HGET', blobs, ARGV[4]) == ARGV[5] then
  redis.call('HINCRBY', meta, 'beat', 1)  -- a write, for WAIT on this connection to wait for
else
  redis.call('HSET', blobs, ARGV[4], ARGV[5])
end
"""
    ),
    Change.DELETE_BLOB: _change("redis.call('HDEL', blobs, ARGV[4])"),
    Change.TRIM: _change(
        """
local before = tonumber(ARGV[4])
if before <= tonumber(redis.call('HGET', meta, 'first')) then return 1 end
local newest = 0
for _, sequence in ipairs(redis.call('HKEYS', snapshots)) do
  newest = math.max(newest, tonumber(sequence))
end
if newest < before - 1 then return {'no snapshot', newest} end
-- An entry's id is its last record's sequence: an entry with a record that must stay stays.
local passed = redis.call('XREVRANGE', log, before - 1, '-', 'COUNT', 1)[1]
if not passed then return 1 end
local removed = redis.call('XTRIM', log, 'MINID', before)
redis.call('HSET', meta, 'entries', entries - removed,
  'first', string.format('%d', tonumber(string.match(passed[1], '%d+')) + 1))
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
    _KEYS
    + """
local m = redis.call('HMGET', meta, 'term', 'token', 'last', 'condemned')
for i = 1, 3 do
  if (m[i] or '') ~= ARGV[i] then return 0 end
end
if (m[4] or '') ~= '' then return 0 end
if not m[1] then
  redis.call('HSET', meta, 'format', 1, 'token', '', 'place', '', 'lease_ms', 0, 'beat', 0,
    'first', 1, 'last', 0, 'entries', 0, 'began', 0)
end
redis.call('HSET', meta, 'condemned', ARGV[5], 'owner', '',
  'term', string.format('%d', math.max(tonumber(m[1] or 0), tonumber(ARGV[4]))))
return 1
"""
)
"""Condemn the log, if the meta still equals ARGV[1] to ARGV[3]."""

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
