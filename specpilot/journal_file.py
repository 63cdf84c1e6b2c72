"""The file below a run's journal: its schema, how it comes to be, how it is opened, and one transaction on it.

SQLite in WAL mode, written through one connection per process. What the rows mean is `specpilot.journal`'s. May import
errors and seal.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from specpilot import seal
from specpilot.errors import RunFolderError, disk_full_named, is_disk_full, nothing_free

APPLICATION_ID = 0x53504A4C  # "SPJL": tells our file from any other SQLite file
SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 60.0

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (key TEXT PRIMARY KEY, state TEXT NOT NULL, starts INTEGER NOT NULL, started_at REAL NOT NULL,
                    finished_at REAL, result TEXT);
CREATE TABLE attempts (id TEXT PRIMARY KEY, position INTEGER NOT NULL, round INTEGER NOT NULL, worker TEXT NOT NULL,
                       component TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, detail TEXT NOT NULL,
                       data TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL);
CREATE TABLE attempt_history (position INTEGER PRIMARY KEY, attempt_id TEXT NOT NULL, state TEXT NOT NULL,
                              reason TEXT, at REAL NOT NULL);
CREATE TABLE processes (position INTEGER PRIMARY KEY, pid INTEGER NOT NULL, pgid INTEGER NOT NULL,
                        start_time REAL NOT NULL, purpose TEXT NOT NULL, started_at REAL NOT NULL, ended_at REAL);
CREATE TABLE events (position INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
                     data TEXT NOT NULL);
"""


def create_file(path: Path, meta: Mapping[str, str]) -> None:
    """A new journal at `path` whose table of meta values holds `meta` (JSON text). Raises `RunFolderError` if it exists."""
    if path.exists():
        raise RunFolderError(
            f"{path.parent} already holds a run", f"`specpilot resume {path.parent}`, or give another --run-dir."
        )
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        db = sqlite3.connect(scratch, isolation_level=None)
        try:
            db.executescript(
                f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={SCHEMA_VERSION}; BEGIN; {_SCHEMA}{seal.SCHEMA}"
            )
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            for key in meta:
                seal.seal_row(db, "meta", key)
            db.execute("COMMIT")
            db.close()
            # The file appears complete or not at all: a crash above leaves no half-made journal behind.
            scratch.rename(path)
        finally:
            db.close()
            scratch.unlink(missing_ok=True)


def open_file(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """A connection to the journal at `path`, in autocommit mode, its seals verified.

    alone: without the side file through which processes share a journal. It takes 32 KiB, which a full disk does not have;
    until the connection is closed, nobody else can open the journal.

    Raises `RunFolderError` if it is missing, damaged, foreign or of another version, `TamperedEvidenceError` if what it
    holds is not what was written.
    """
    if not path.is_file():
        raise RunFolderError(
            f"{path.parent} is not a run folder: it has no {path.name}", "`specpilot runs` lists them."
        )
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)
        if alone:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")  # before the first access: then SQLite makes no such file
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if application == APPLICATION_ID and version == SCHEMA_VERSION:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
            seal.verify(db, path)
            return db
        db.close()
    except sqlite3.DatabaseError as error:
        if db is not None:
            db.close()  # an open one would keep others from opening it alone
        with disk_full_named(path):
            if is_disk_full(error) or nothing_free(path):
                raise
        raise RunFolderError(
            f"{path} is damaged or not a journal: {error}",
            "restore it from a copy, or start a new run; the run's commits are still in repo/.",
        ) from error
    if application != APPLICATION_ID:
        raise RunFolderError(f"{path} is an SQLite file, but not a SpecPilot journal", "give a run folder.")
    if version < SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} was written by an earlier SpecPilot (schema {version}), which did not seal its journals",
            "look at it with that version, or start a new run; the run's commits are in repo/.",
        )
    raise RunFolderError(
        f"{path} has schema {version}, this version reads {SCHEMA_VERSION}", "use the SpecPilot that made the run."
    )


class Transaction:
    """One write to the journal at a time: alone in this process if the caller holds its lock, and by SQLite's own in all others.

    A class and no generator: Ctrl-C may come after any call, and where it comes between a generator's `yield` and the
    block of `with`, nobody runs the rest of the generator, and the transaction stays open.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._db = connection

    def __enter__(self) -> sqlite3.Connection:
        try:
            with disk_full_named(self._path):
                self._undo()  # what a second Ctrl-C kept from being undone
                self._db.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._undo()
            raise
        return self._db

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        with disk_full_named(self._path):
            try:
                if error is not None:
                    raise error
                self._db.execute("COMMIT")
            finally:
                self._undo()

    def _undo(self) -> None:
        """Takes back what was not committed."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
