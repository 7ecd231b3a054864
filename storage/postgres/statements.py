"""The statements that change a journal in PostgreSQL. Each checks and changes it atomically.

Each is one statement, and so one transaction that the server ends by itself, whatever becomes of
its client. It begins at the row of the meta, which it finds only if it has the writer's term and
token. READ COMMITTED looks at the row again once it has waited for another change of it. So a
statement of an earlier term, however late it arrives, finds no row and changes nothing.

Appends, renewals and trims update the row. Snapshots and blobs, which take longer, lock it FOR KEY
SHARE: the term is the row's key, so appends go on meanwhile, and the next term waits.

A statement returns the number of rows that it found. If there is none, `ServerWriter` finds out
why. The log's last row must be the meta's `last`.
"""

from __future__ import annotations

from ..server_writer import Change

_MINE = (
    "m.term = %(term)s AND m.token = %(token)s AND m.owner <> '' AND m.condemned = '' "
    "AND m.last >= %(acknowledged)s"
)
_WHOLE = (
    "(m.last < m.first OR m.last = (SELECT l.last FROM {s}.log l ORDER BY l.last DESC LIMIT 1))"
)
_SHARED = f"WITH found AS (SELECT FROM {{s}}.meta m WHERE {_MINE} FOR KEY SHARE)"
_COUNT = "SELECT count(*) FROM found"

_BEAT = (
    "WITH found AS (UPDATE {s}.meta m SET beat = m.beat + 1 "
    f"WHERE {_MINE} AND {_WHOLE} RETURNING 1) {_COUNT}"
)

STATEMENTS = {
    Change.APPEND: (
        "WITH found AS (UPDATE {s}.meta m SET last = %(last)s, beat = m.beat + 1 "
        f"WHERE {_MINE} AND m.last = %(acknowledged)s AND {_WHOLE} RETURNING 1), "
        "done AS (INSERT INTO {s}.log (last, batch) SELECT %(last)s, %(batch)b FROM found) "
        f"{_COUNT}"
    ),
    Change.BEAT: _BEAT,
    Change.CONFIRM: _BEAT,
    Change.CONDEMN: (
        "WITH found AS (UPDATE {s}.meta m SET condemned = %(reason)s, owner = '' "
        "WHERE m.term = %(term)s AND m.token = %(token)s AND m.condemned = '' RETURNING 1) "
        f"{_COUNT}"
    ),
    Change.WRITE_SNAPSHOT: (
        f"{_SHARED}, done AS (INSERT INTO {{s}}.snapshots (sequence, data) "
        "SELECT %(sequence)s, %(data)b FROM found "
        f"ON CONFLICT (sequence) DO UPDATE SET data = EXCLUDED.data) {_COUNT}"
    ),
    Change.DELETE_SNAPSHOT: (
        f"{_SHARED}, done AS (DELETE FROM {{s}}.snapshots WHERE sequence = %(sequence)s "
        f"AND EXISTS (SELECT FROM found)) {_COUNT}"
    ),
    Change.TRIM: (
        "WITH found AS (UPDATE {s}.meta m SET first = %(passed)s::bigint + 1, beat = m.beat + 1 "
        f"WHERE {_MINE} AND m.first <= %(passed)s RETURNING 1), "
        "done AS (DELETE FROM {s}.log WHERE last <= %(passed)s AND EXISTS (SELECT FROM found)) "
        f"{_COUNT}"
    ),
    Change.WRITE_BLOB: (
        f"{_SHARED}, done AS (INSERT INTO {{s}}.blobs (name, data) "
        "SELECT %(name)s, %(data)b FROM found "
        f"ON CONFLICT (name) DO UPDATE SET data = EXCLUDED.data) {_COUNT}"
    ),
    Change.DELETE_BLOB: (
        f"{_SHARED}, done AS (DELETE FROM {{s}}.blobs WHERE name = %(name)s "
        f"AND EXISTS (SELECT FROM found)) {_COUNT}"
    ),
}

PASSED = (
    "SELECT max(last) FROM (SELECT last FROM {s}.log WHERE last < %(before)s "
    "ORDER BY last LIMIT 1000) few"
)
"""The last record of the next rows that can be trimmed: few, since appends wait meanwhile."""

CLOSE = "UPDATE {s}.meta m SET owner = '' WHERE m.term = %(term)s AND m.token = %(token)s"

BEGIN = (
    "UPDATE {s}.meta m SET term = m.term + 1, token = %(token)s, owner = %(owner)s, "
    "place = %(place)s, lease_ms = %(lease_ms)s, beat = 0, began = m.last "
    "WHERE m.term = %(seen_term)s AND m.token = %(seen_token)s AND m.beat = %(seen_beat)s "
    "AND m.last = %(seen_last)s AND m.condemned = %(seen_condemned)s RETURNING m.term"
)
"""Begin a term, if the meta is still as it was seen. Afterwards, nobody can append in the
previous term."""

CONDEMN = (
    "UPDATE {s}.meta m SET condemned = %(reason)s, owner = '', "
    "term = greatest(m.term, %(term)s) WHERE m.condemned = '' AND (m.term, m.token, m.last) = "
    "(%(seen_term)s, %(seen_token)s, %(seen_last)s) RETURNING 1"
)
"""Condemn the log, if the meta is still as it was seen."""
