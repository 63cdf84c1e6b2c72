"""The durable memory of one run: an SQLite file that survives `kill -9` at any point.

Every step is recorded before it acts and after; a finished step is never run again, a started one is. The
file is in WAL mode, written through one connection per process, serialised by a lock, and waits for other
processes (`specpilot status`, `attempt submit`) instead of failing. Liveness of a run is a held file lock,
never a heartbeat. What is written is sealed (`specpilot.seal`) and checked when the file is opened. May import
contracts, errors and seal.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import BaseModel

from specpilot import seal
from specpilot.contracts import AttemptState, Reason
from specpilot.errors import RunFolderError, SpecPilotError, disk_full_named
from specpilot.journal_file import Transaction, create_file, open_file

_S = AttemptState
_END = {_S.rejected, _S.superseded}
LEGAL: dict[AttemptState, set[AttemptState]] = {
    _S.planned: {_S.working} | _END,
    _S.working: {_S.submitted} | _END,
    _S.submitted: {_S.measured} | _END,
    _S.measured: {_S.gated} | _END,
    _S.gated: {_S.accepted} | _END,
    _S.accepted: {_S.merged} | _END,
    _S.merged: {_S.superseded},
    _S.rejected: set(),
    _S.superseded: set(),
}
"""Where an attempt may go from each state."""

M = TypeVar("M", bound=BaseModel)


class IllegalTransition(SpecPilotError):
    """An attempt was moved to a state that does not follow from its own: a defect of the caller."""


@dataclass(frozen=True)
class StepRow:
    """One recorded step. Times are seconds since the epoch."""

    key: str
    finished: bool
    starts: int
    """How often it was started; above 1 means that a crash made it run again."""
    started_at: float
    finished_at: float | None


@dataclass(frozen=True)
class AttemptRow:
    """One attempt as it stands."""

    id: str
    round: int
    worker: str
    component: str
    state: AttemptState
    reason: Reason | None
    detail: str
    data: dict[str, Any]
    """JSON that the loop keeps with it: brief, candidate, comparison, verdict."""
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class ProcessRow:
    """A child process that was started and not yet seen to end."""

    pid: int
    pgid: int
    start_time: float
    purpose: str


@dataclass(frozen=True)
class Event:
    """One line of the append-only log."""

    position: int
    at: float
    kind: str
    data: dict[str, Any]


class Journal:
    """The journal of one run. All methods may be called from any thread of the process."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._lock = threading.RLock()
        self._transaction = Transaction(path, connection)  # entered with the lock held
        self._step_locks: dict[str, threading.Lock] = {}
        self.worked_since: float | None = None  # monotonic: when this process first ran a step, not read its result

    @classmethod
    def create(cls, path: Path, meta: Mapping[str, Any]) -> Journal:
        """A new journal holding `meta` (JSON values). Raises `RunFolderError` if the file exists."""
        create_file(path, {key: _dumps(value) for key, value in {"created_at": time.time(), **meta}.items()})
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, *, alone: bool = False) -> Journal:
        """An existing journal. alone: nobody else can open it meanwhile; it then needs no room on the disk.

        Raises `RunFolderError` if it is missing, damaged, foreign or of another version, `TamperedEvidenceError` if what it
        holds is not what was written.
        """
        return cls(path, open_file(path, alone=alone))

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._db.close()

    # -- meta ---------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """All meta values."""
        return {key: json.loads(value) for key, value in self._rows("SELECT key, value FROM meta")}

    def get_meta(self, key: str, default: Any = None) -> Any:
        """One meta value, or `default`."""
        row = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(row[0][0]) if row else default

    def set_meta(self, key: str, value: Any) -> None:
        """Store one meta value (JSON)."""
        with self._lock, self._transaction as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _dumps(value)))
            seal.seal_row(db, "meta", key)

    @property
    def seal_head(self) -> str:
        """Digest that stands for everything in the journal; it changes with every write."""
        with self._lock:
            return seal.head(self._db)

    # -- steps --------------------------------------------------------------------------------------------

    @overload
    def step(self, key: str, function: Callable[[], M], *, model: type[M]) -> M: ...
    @overload
    def step(self, key: str, function: Callable[[], list[M]], *, model: type[M]) -> list[M]: ...
    @overload
    def step(self, key: str, function: Callable[[], Any], *, model: None = None) -> Any: ...

    def step(self, key: str, function: Callable[[], Any], *, model: type[BaseModel] | None = None) -> Any:
        """The result of `function`, run at most once to its end over all lives of the run.

        Recorded as started before and with its result after. A finished step returns the stored result. With
        `model`, the result is a record of that class, a list of them, or None; without, plain JSON. What is
        returned has always gone through JSON, so that a resumed run sees exactly what the first one saw.
        """
        with self._lock:
            lock = self._step_locks.setdefault(key, threading.Lock())
        with lock:
            row = self._rows("SELECT state, result FROM steps WHERE key = ?", (key,))
            if row and row[0][0] == "finished":
                return _decode(row[0][1], model)
            now = time.time()
            with self._lock, self._transaction as db:
                db.execute(
                    "INSERT INTO steps VALUES (?, 'started', 1, ?, NULL, NULL) "
                    "ON CONFLICT (key) DO UPDATE SET starts = starts + 1, started_at = excluded.started_at",
                    (key, now),
                )
                seal.seal_row(db, "steps", key)
            self.worked_since = self.worked_since or time.monotonic()
            text = _encode(function())
            with self._lock, self._transaction as db:
                db.execute(
                    "UPDATE steps SET state = 'finished', finished_at = ?, result = ? WHERE key = ?",
                    (time.time(), text, key),
                )
                seal.seal_row(db, "steps", key)
            return _decode(text, model)

    def finished(self, key: str) -> bool:
        """True if this step has run to its end."""
        return bool(self._rows("SELECT 1 FROM steps WHERE key = ? AND state = 'finished'", (key,)))

    def result(self, key: str, model: type[BaseModel] | None = None) -> Any:
        """The stored result of a finished step. Raises `KeyError` if it has not finished."""
        row = self._rows("SELECT result FROM steps WHERE key = ? AND state = 'finished'", (key,))
        if not row:
            raise KeyError(key)
        try:
            return _decode(row[0][0], model)
        except ValueError as error:  # not JSON, or not this record
            raise RunFolderError(
                f"{self.path}: the result of step {key!r} cannot be read ({type(error).__name__})",
                "the journal was damaged or written by another version: restore it from a copy, or begin a new run.",
            ) from error

    def steps(self) -> list[StepRow]:
        """All steps in the order of their first start."""
        rows = self._rows("SELECT key, state, starts, started_at, finished_at FROM steps ORDER BY rowid")
        return [StepRow(key, state == "finished", starts, began, ended) for key, state, starts, began, ended in rows]

    def finished_keys(self, wanted: Callable[[str], bool]) -> list[str]:
        """Keys of the finished steps that are `wanted`, in the order of their first start."""
        return [row.key for row in self.steps() if row.finished and wanted(row.key)]

    # -- attempts -----------------------------------------------------------------------------------------

    def create_attempt(
        self, attempt_id: str, *, round: int, worker: str, component: str = "", data: Mapping[str, Any] | None = None
    ) -> AttemptRow:
        """A new attempt in state `planned`; an attempt that exists already is returned as it stands."""
        with self._lock, self._transaction as db:
            self._create_attempt(db, attempt_id, round, worker, component, data)
        return self.attempt(attempt_id)

    def create_numbered_attempt(
        self, prefix: str, *, worker: str, component: str = "", data: Mapping[str, Any] | None = None
    ) -> AttemptRow:
        """A new attempt outside any round, `prefix-N` with N one more than this worker has: two callers never get the same."""
        with self._lock, self._transaction as db:
            (count,) = db.execute("SELECT count(*) FROM attempts WHERE worker = ?", (worker,)).fetchone()
            attempt_id = f"{prefix}-{count + 1}"
            self._create_attempt(db, attempt_id, 0, worker, component, data)
        return self.attempt(attempt_id)

    def _create_attempt(
        self,
        db: sqlite3.Connection,
        attempt_id: str,
        round: int,
        worker: str,
        component: str,
        data: Mapping[str, Any] | None,
    ) -> None:
        now = time.time()
        made = db.execute(
            "INSERT OR IGNORE INTO attempts SELECT ?, count(*), ?, ?, ?, 'planned', NULL, '', ?, ?, ? FROM attempts",
            (attempt_id, round, worker, component, _dumps(dict(data or {})), now, now),
        ).rowcount
        if made:
            seal.seal_row(db, "attempts", attempt_id)
            self._history(db, attempt_id, AttemptState.planned, None)

    def move_attempt(
        self,
        attempt_id: str,
        state: AttemptState,
        *,
        reason: Reason | None = None,
        detail: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> AttemptRow:
        """Move an attempt along the legal transitions; `data` is merged into what it holds.

        `rejected` needs a reason, other states take none. Moving to the state it is in already changes only
        `data` and `detail`. Raises `IllegalTransition`.
        """
        if (state is AttemptState.rejected) != (reason is not None):
            raise IllegalTransition(
                f"attempt {attempt_id}: {state} with reason {reason}", "only rejected has a reason."
            )
        with self._lock, self._transaction as db:
            old = self.attempt(attempt_id)
            if state is not old.state and state not in LEGAL[old.state]:
                raise IllegalTransition(
                    f"attempt {attempt_id} cannot go from {old.state} to {state}",
                    f"legal: {', '.join(sorted(LEGAL[old.state])) or 'nothing'}.",
                )
            if state is old.state and reason is not old.reason:
                raise IllegalTransition(
                    f"attempt {attempt_id} is already rejected for {old.reason}", "keep the first reason."
                )
            db.execute(
                "UPDATE attempts SET state = ?, reason = ?, detail = ?, data = ?, updated_at = ? WHERE id = ?",
                (state, reason, detail or old.detail, _dumps(old.data | dict(data or {})), time.time(), attempt_id),
            )
            seal.seal_row(db, "attempts", attempt_id)
            if state is not old.state:
                self._history(db, attempt_id, state, reason)
        return self.attempt(attempt_id)

    def attempt(self, attempt_id: str) -> AttemptRow:
        """One attempt. Raises `RunFolderError` if there is none of that id."""
        rows = self._rows("SELECT * FROM attempts WHERE id = ?", (attempt_id,))
        if not rows:
            raise RunFolderError(
                f"run {self.path.parent} has no attempt {attempt_id!r}", "`specpilot attempt list RUN`."
            )
        return _attempt(rows[0])

    def attempts(self, round: int | None = None, state: AttemptState | None = None) -> list[AttemptRow]:
        """Attempts in order of creation, of one round or one state if given."""
        rows = self._rows(
            "SELECT * FROM attempts WHERE (?1 IS NULL OR round = ?1) AND (?2 IS NULL OR state = ?2) ORDER BY position",
            (round, state),
        )
        return [_attempt(row) for row in rows]

    def open_outside(self) -> set[str]:
        """Attempts of people and outside agents that are still being worked on: nobody may take their worktrees."""
        return {row.id for row in self.attempts(state=AttemptState.working) if row.worker == "external"}

    def attempt_history(self, attempt_id: str) -> list[tuple[AttemptState, Reason | None, float]]:
        """Every state the attempt went through, with reason and time."""
        rows = self._rows(
            "SELECT state, reason, at FROM attempt_history WHERE attempt_id = ? ORDER BY position", (attempt_id,)
        )
        return [(AttemptState(state), Reason(reason) if reason else None, at) for state, reason, at in rows]

    @staticmethod
    def _history(db: sqlite3.Connection, attempt_id: str, state: AttemptState, reason: Reason | None) -> None:
        made = db.execute(
            "INSERT INTO attempt_history VALUES (NULL, ?, ?, ?, ?)", (attempt_id, state, reason, time.time())
        )
        seal.seal_row(db, "attempt_history", int(made.lastrowid or 0))

    # -- processes ----------------------------------------------------------------------------------------

    def record_process(self, pid: int, pgid: int, start_time: float, purpose: str) -> None:
        """Remember a child before it runs, so that a later life of the run can end it."""
        with self._lock, self._transaction as db:
            db.execute(
                "INSERT INTO processes VALUES (NULL, ?, ?, ?, ?, ?, NULL)",
                (pid, pgid, start_time, purpose, time.time()),
            )

    def end_process(self, pid: int, start_time: float) -> None:
        """Note that a child has ended."""
        with self._lock, self._transaction as db:
            db.execute(
                "UPDATE processes SET ended_at = ? WHERE pid = ? AND abs(start_time - ?) < 0.02 AND ended_at IS NULL",
                (time.time(), pid, start_time),
            )

    def live_processes(self) -> list[ProcessRow]:
        """Children not noted as ended; after a crash some of these pids may belong to strangers."""
        rows = self._rows(
            "SELECT pid, pgid, start_time, purpose FROM processes WHERE ended_at IS NULL ORDER BY position"
        )
        return [ProcessRow(*row) for row in rows]

    # -- events -------------------------------------------------------------------------------------------

    def event(self, kind: str, data: Mapping[str, Any] | None = None) -> int:
        """Append one line to the log; returns its position."""
        with self._lock, self._transaction as db:
            row = db.execute(
                "INSERT INTO events (at, kind, data) VALUES (?, ?, ?)", (time.time(), kind, _dumps(dict(data or {})))
            )
            position = int(row.lastrowid or 0)
            seal.seal_row(db, "events", position)
            return position

    def events(self, after: int = 0, kind: str | None = None) -> list[Event]:
        """Log lines after a position, oldest first, of one kind if given."""
        rows = self._rows(
            "SELECT position, at, kind, data FROM events WHERE position > ?1 AND (?2 IS NULL OR kind = ?2) ORDER BY position",
            (after, kind),
        )
        return [Event(position, at, name, json.loads(data)) for position, at, name, data in rows]

    # -- plumbing -----------------------------------------------------------------------------------------

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, disk_full_named(self.path):
            return self._db.execute(query, values).fetchall()


def _attempt(row: tuple[Any, ...]) -> AttemptRow:
    name, _, number, worker, component, state, reason, detail, data, created, updated = row
    return AttemptRow(
        name, number, worker, component, AttemptState(state), Reason(reason) if reason else None, detail,
        json.loads(data), created, updated,
    )  # fmt: skip


def _encode(value: Any) -> str:
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, list) and value and all(isinstance(item, BaseModel) for item in value):
        return "[" + ",".join(item.model_dump_json() for item in value) + "]"
    return _dumps(value)


def _decode(text: str, model: type[BaseModel] | None) -> Any:
    value = json.loads(text)
    if model is None or value is None:
        return value
    if isinstance(value, list):
        return [model.model_validate_json(json.dumps(item)) for item in value]
    return model.model_validate_json(text)


def _dumps(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Records and paths inside plain JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON: give the journal records, dicts, lists and plain values")
