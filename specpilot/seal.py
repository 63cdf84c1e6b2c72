"""The seal of a run's journal: a hash chain over everything that was written to it.

Threat: a result is edited by hand after the fact (a ratio, a verdict, a removed rejection). Each write to a sealed
table appends one line to `seals` in the same transaction: which row, the digest of the row as it then stood, and the
digest of the line before together with this one. On opening, the chain is walked again and each row compared with its
newest line, so that an edited, added or removed row, or line, is named. A write that `kill -9` cut in two leaves neither
the row nor its line behind, so it can not look like tampering. As with memory and exports, the digests are plain
SHA-256: they show that something was changed, not who could have recomputed them all; for that, keep the head of the
chain (`specpilot status` shows it) apart from the run. May import errors only.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from specpilot.errors import TamperedEvidenceError

SCHEMA = """
CREATE TABLE seals (position INTEGER PRIMARY KEY, kind TEXT NOT NULL, row_key TEXT NOT NULL, row_sha256 TEXT NOT NULL,
                    chain TEXT NOT NULL);
"""
SEALED = {"meta": "key", "steps": "key", "attempts": "id", "attempt_history": "position", "events": "position"}
"""Table -> its key column. `processes` is left out: it holds process ids to clean up after, no evidence."""
FIRST = hashlib.sha256(b"specpilot journal").hexdigest()
"""What the first line takes for the line before it."""


def seal_row(db: sqlite3.Connection, table: str, key: str | int) -> None:
    """Append the line for one row that the open transaction of `db` wrote. The row must exist."""
    row = db.execute(f"SELECT * FROM {table} WHERE {SEALED[table]} = ?", (key,)).fetchone()
    position, before = _last(db)
    row_sha256 = digest_of(table, row)
    chain = _next(before, table, str(key), row_sha256)
    db.execute("INSERT INTO seals VALUES (?, ?, ?, ?, ?)", (position + 1, table, str(key), row_sha256, chain))


def head(db: sqlite3.Connection) -> str:
    """Digest at the end of the chain: it stands for the whole journal."""
    return _last(db)[1]


def verify(db: sqlite3.Connection, path: Path) -> None:
    """Raise `TamperedEvidenceError` for the first thing in the journal at `path` that does not match its seal."""
    db.execute("BEGIN")  # one state of the file, although a run may be writing
    try:
        problem = _broken_line(db) or _changed_row(db)
    finally:
        db.execute("ROLLBACK")
    if problem:
        raise TamperedEvidenceError(
            f"{path} was changed after it was written: {problem}",
            "nothing was removed; restore the run folder from an untouched copy, or start a new run.",
        )


def digest_of(table: str, row: tuple[Any, ...]) -> str:
    """SHA-256 of one row as SQLite gives it back (floats and text round-trip exactly)."""
    # A blob, which nothing of ours writes, is put down as text of its own: it must not match, nor end in an error of another kind.
    return hashlib.sha256(
        json.dumps([table, *row], ensure_ascii=False, default=repr).encode("utf-8", "surrogatepass")
    ).hexdigest()


def _last(db: sqlite3.Connection) -> tuple[int, str]:
    row = db.execute("SELECT position, chain FROM seals ORDER BY position DESC LIMIT 1").fetchone()
    return (0, FIRST) if row is None else (row[0], row[1])


def _next(before: str, table: str, key: str, row_sha256: str) -> str:
    return hashlib.sha256("\n".join((before, table, key, row_sha256)).encode()).hexdigest()


def _broken_line(db: sqlite3.Connection) -> str:
    """The first line of the chain that does not follow from the one before, in words."""
    before = FIRST
    lines = db.execute("SELECT position, kind, row_key, row_sha256, chain FROM seals ORDER BY position")
    for number, (position, table, key, row_sha256, chain) in enumerate(lines, start=1):
        if position != number or chain != _next(before, str(table), str(key), str(row_sha256)):
            return f"line {number} of its chain of digests does not follow from the line before"
        before = chain
    return ""


def _changed_row(db: sqlite3.Connection) -> str:
    """The first row that is not as its newest line says, in words."""
    lines = db.execute("SELECT kind, row_key, row_sha256 FROM seals ORDER BY position")
    expected = {(kind, key): row_sha256 for kind, key, row_sha256 in lines}
    for table, column in SEALED.items():
        cursor = db.execute(f"SELECT * FROM {table}")
        place = [item[0] for item in cursor.description].index(column)
        for row in cursor:
            wanted = expected.pop((table, str(row[place])), None)
            if wanted is None:
                return f"{table} holds {row[place]!r}, which no run wrote"
            if digest_of(table, row) != wanted:
                return f"{row[place]!r} in {table} does not match its digest"
    for table, key in expected:
        return f"{key!r} is missing from {table}"
    return ""
