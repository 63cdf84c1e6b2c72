"""Opens the database of the store: any SQLAlchemy URL, SQLite in WAL mode by default, schema brought up to date.

Writers take the write lock when their transaction begins (`BEGIN IMMEDIATE`), so that many workers wait for
each other instead of failing half-way with "database is locked".
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from .errors import SchemaTooNewError, StoreUnavailableError
from .schema import Base

BUSY_TIMEOUT_S = 60.0
MIGRATION_LOCK = 0x5350_4D45
"""Key of the PostgreSQL advisory lock that serialises migrations."""


def default_url() -> str:
    """`$SPECPILOT_MEMORY_URL`, else a SQLite file under `$SPECPILOT_HOME` or `~/.specpilot`."""
    if url := os.environ.get("SPECPILOT_MEMORY_URL"):
        return url
    home = os.environ.get("SPECPILOT_HOME") or Path.home() / ".specpilot"
    return f"sqlite:///{Path(home).expanduser() / 'memory.db'}"


def open_database(url: str | Path) -> Engine:
    """Engine for `url` (a URL, or a path to a SQLite file) with the newest schema.

    Raises StoreUnavailableError when it cannot be opened, SchemaTooNewError when a newer version wrote it.
    """
    text_url = str(url) if "://" in str(url) else f"sqlite:///{Path(url).expanduser()}"
    try:
        parsed = make_url(text_url)
        if parsed.get_backend_name() == "sqlite":
            engine = _sqlite(text_url, parsed.database)
        else:
            engine = create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise StoreUnavailableError(
            f"cannot use {hide_password(text_url)!r} as the memory's address: {error}",
            "give a SQLAlchemy URL such as sqlite:////home/me/memory.db or postgresql+psycopg://host/name, and install its driver",
        ) from error
    try:
        migrate(engine)
    except (DBAPIError, sqlite3.Error, OSError) as error:
        engine.dispose()
        reason = error.orig if isinstance(error, DBAPIError) else error
        raise StoreUnavailableError(
            f"cannot open the memory at {parsed.render_as_string(hide_password=True)}: {reason}",
            "check that the folder exists and is writable, the disk is not full and the file is a SpecPilot memory",
        ) from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def hide_password(url: str) -> str:
    """`url` without its password, fit for messages."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


def migrate(engine: Engine) -> None:
    """Bring the schema to the newest revision, once, however many processes open the store at the same time."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head()
    with engine.connect() as connection:
        if _revision(connection) == head:
            return
    with writer(engine).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        current = _revision(connection)
        if current == head:
            return
        known = {revision.revision for revision in script.walk_revisions()}
        if current is not None and current not in known:
            raise SchemaTooNewError(
                f"the memory at {engine.url.render_as_string(hide_password=True)} has schema {current}; this SpecPilot knows up to {head}",
                "upgrade SpecPilot, or set SPECPILOT_MEMORY_URL to another store",
            )
        if current is None and inspect(connection).has_table("mechanism"):
            raise StoreUnavailableError(
                f"{engine.url.render_as_string(hide_password=True)} holds a table 'mechanism' that SpecPilot did not make",
                "give the memory a database of its own",
            )
        config.attributes["connection"] = connection
        config.attributes["metadata"] = Base.metadata
        command.upgrade(config, "head")


def writer(engine: Engine) -> Engine:
    """The same engine, whose transactions take SQLite's write lock when they begin."""
    return engine.execution_options(specpilot_write=True)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _sqlite(url: str, database: str | None) -> Engine:
    if database and database != ":memory:":
        folder = Path(database).expanduser().absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot make {folder} for the memory: {error}", "choose a writable folder"
            ) from error
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """WAL, foreign keys, and transactions that we begin ourselves (the driver's own start late)."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("pragma foreign_keys=on")
    cursor.execute("pragma synchronous=normal")
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while cursor.execute("pragma journal_mode").fetchone()[0] not in ("wal", "memory"):
        try:
            cursor.execute("pragma journal_mode=wal")
            break
        except (
            sqlite3.OperationalError
        ) as error:  # the switch ignores the busy timeout when two processes make the file at once
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("specpilot_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
