"""The store itself: open, add, recall, record, search. One object per process; safe with many processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import func, inspect, or_, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, selectinload

from . import recall as ranking
from . import seeding, transfer
from .database import default_url, hide_password, open_database, writer
from .errors import InvalidMechanismError, NoSuchMechanismError, StoreUnavailableError, TamperedError
from .records import Effect, Mechanism, Recalled, RecallQuery, Stats, Status, StoredMechanism, as_json, sha256_text
from .schema import EffectRow, MechanismRow, RecallRow

T = TypeVar("T")


class MemoryStore:
    """Mechanisms and their effects behind any SQLAlchemy URL (a plain path is a SQLite file).

    Opening brings the schema up to date and loads the shipped seeds (`seed_folder=None`: no seeds), once each.
    Raises StoreUnavailableError, SchemaTooNewError, SeedError.
    """

    def __init__(self, url: str | Path | None = None, *, seed_folder: Path | None = seeding.SEED_FOLDER) -> None:
        self.url = str(url) if url is not None else default_url()
        self._engine = open_database(self.url)
        self._writer = writer(self._engine)
        self._has_fts = self._engine.dialect.name == "sqlite" and inspect(self._engine).has_table("mechanism_fts")
        if seed_folder is not None:
            self._load_seeds(seeding.read_seeds(seed_folder))

    def close(self) -> None:
        """Release the database's connections."""
        self._engine.dispose()

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ writing

    def add(
        self, mechanism: Mechanism, *, origin: str, status: Status = "stale", created: datetime | None = None
    ) -> int:
        """Store a mechanism; the version's number. The same content again returns the version it has.

        A new one is `stale` (unproven) until an effect is recorded.
        """
        return self._write(lambda s: _add(s, mechanism, origin, status, created, self._has_fts).version)

    def record_effect(self, name: str, effect: Effect, *, version: int | None = None, origin: str = "") -> None:
        """Store an outcome of the newest (or given) version of `name` and settle its status.

        Recording the same effect twice stores it once, an undated one as well. Raises NoSuchMechanismError.
        """

        def act(session: Session) -> None:
            if effect.at is None and any(
                _same_but_for_later(row, effect) for row in _row(session, name, version).effects
            ):
                return  # a resumed run tells again what it told before it was cut off
            dated = effect if effect.at is not None else effect.model_copy(update={"at": datetime.now(UTC)})
            _add_effect(session, _row(session, name, version), dated, origin or effect.run)

        self._write(act)

    def record_realised(self, name: str, *, run: str, commit: str, realised_ms: float) -> None:
        """Add the component's time after the change to what `run` found of `commit`, once: milliseconds per decode round.

        An effect is stored when its round ends; the engine that it went into is profiled after that.
        """

        def act(session: Session) -> None:
            query = select(EffectRow).join(MechanismRow).where(MechanismRow.name == name, EffectRow.run == run)
            for row in session.scalars(query):
                read = Effect.model_validate(row.detail)
                if read.commit == commit and read.realised_ms is None:
                    known = read.model_copy(update={"realised_ms": realised_ms})
                    row.detail, row.uid = as_json(known), known.uid

        self._write(act)

    def record_recall(self, run: str, name: str, *, tried: bool, accepted: bool, ratio: float | None = None) -> None:
        """Store what came of recalling `name` in `run`: one row per run and mechanism, which only ever gains.

        Telling less than is known (a resumed run plans again) takes nothing back.
        """

        def act(session: Session) -> None:
            mechanism = _row(session, name, None)
            row = session.scalar(select(RecallRow).where(RecallRow.run == run, RecallRow.mechanism_id == mechanism.id))
            if row is None:
                row = RecallRow(run=run, mechanism_id=mechanism.id, tried=False, accepted=False)
                session.add(row)
            row.tried, row.accepted, row.at = row.tried or tried, row.accepted or accepted, datetime.now(UTC)
            row.ratio = row.ratio if ratio is None else ratio

        self._write(act)

    def set_status(self, name: str, status: Status) -> None:
        """Mark the newest version of `name`, for example `stale` when its patch no longer applies."""

        def act(session: Session) -> None:
            _row(session, name, None).status = status

        self._write(act)

    # ------------------------------------------------------------------ reading

    def get(self, name: str, version: int | None = None) -> StoredMechanism:
        """One mechanism with its effects. Raises NoSuchMechanismError, TamperedError (patch was changed)."""
        return self._read(lambda s: _stored(_row(s, name, version)))

    def with_requirements(self, name: str) -> list[Mechanism]:
        """What `name` requires, in the order to apply it, then itself. Raises NoSuchMechanismError."""
        chain: list[Mechanism] = []

        def visit(wanted: str, above: tuple[str, ...]) -> None:
            if wanted in above:
                raise InvalidMechanismError(f"{' requires '.join((*above, wanted))}: a circle", "mend one of them")
            mechanism = self.get(wanted).mechanism
            for need in mechanism.requires:
                visit(need, (*above, wanted))
            if mechanism.name not in [item.name for item in chain]:
                chain.append(mechanism)

        visit(name, ())
        return chain

    def contradictions(self, name: str) -> list[str]:
        """Rows of the newest version of `name` that were changed after they were written, by their checksums."""

        def act(session: Session) -> list[str]:
            row = _row(session, name, None)
            found = []
            if _stored(row).mechanism.content_sha256 != row.content_sha256:
                found.append(f"version {row.version} was changed after it was stored: its checksum differs")
            for effect in row.effects:
                read = Effect.model_validate(effect.detail)
                same = (read.ratio, read.low, read.outcome) == (effect.ratio, effect.low, effect.outcome)
                if read.uid != effect.uid or not same:
                    found.append(f"the effect on {effect.deployment} was changed after it was stored")
            return found

        return self._read(act)

    def mechanisms(self) -> list[StoredMechanism]:
        """Newest version of every name, by name."""
        return self._read(lambda s: [_stored(row) for row in _newest(s)])

    def recall(self, query: RecallQuery) -> list[Recalled]:
        """Mechanisms whose preconditions all hold, in the order to try them. See `recall.rank`."""
        return [item for item in self.assess(query) if not item.unmet]

    def assess(self, query: RecallQuery) -> list[Recalled]:
        """As `recall`, followed by the mechanisms that do not fit and why."""
        return ranking.rank(self.mechanisms(), query)

    def search(self, words: str) -> list[StoredMechanism]:
        """Mechanisms that mention every word (prefixes count), best first; all of them when `words` is empty."""
        tokens = words.split()
        newest = {item.mechanism.name: item for item in self.mechanisms()}
        if not tokens:
            return list(newest.values())
        names = self._read(lambda s: _search_fts(s, tokens) if self._has_fts else _search_like(s, tokens))
        return [newest[name] for name in dict.fromkeys(names) if name in newest]

    def stats(self) -> Stats:
        """Counts, and how often recall helped."""
        return self._read(_stats)

    # ------------------------------------------------------------------ moving

    def export(self, path: Path) -> int:
        """Write every version with its effects to one checksummed JSON file; how many. Atomic."""
        items = self._read(lambda s: [_stored(row) for row in s.scalars(_with_effects().order_by(MechanismRow.id))])
        transfer.write(path, items)
        return len(items)

    def import_(self, path: Path) -> tuple[int, int]:
        """Merge a file that `export` wrote; (new mechanisms, new effects). Raises TamperedError."""
        items = transfer.read(path)

        def act(session: Session) -> tuple[int, int]:
            before = _count(session, MechanismRow), _count(session, EffectRow)
            for item in items:
                row = _add(session, item.mechanism, "import", item.status, item.created, self._has_fts)
                for effect in reversed(item.effects):
                    _add_effect(session, row, effect, "import")
            session.flush()
            return _count(session, MechanismRow) - before[0], _count(session, EffectRow) - before[1]

        return self._write(act)

    # ------------------------------------------------------------------ inside

    def _load_seeds(self, found: list[seeding.Seed]) -> None:
        known = self._read(lambda s: _known(s))
        missing = [
            seed
            for seed in found
            if (seed.mechanism.name, seed.mechanism.content_sha256) not in known
            or any(
                effect.uid not in known[seed.mechanism.name, seed.mechanism.content_sha256] for effect in seed.effects
            )
        ]
        if not missing:
            return

        def act(session: Session) -> None:
            for seed in missing:
                name, digest = seed.mechanism.name, seed.mechanism.content_sha256
                versions = list(session.scalars(select(MechanismRow).where(MechanismRow.name == name)))
                same = [row for row in versions if row.content_sha256 == digest]
                if not same and any(row.origin != "seed" for row in versions):
                    continue  # the user's own version of this name stays the newest
                row = _add(session, seed.mechanism, "seed", "stale", None, self._has_fts)
                for effect in seed.effects:
                    _add_effect(session, row, effect, "seed")

        self._write(act)

    def _read(self, act: Callable[[Session], T]) -> T:
        with self._guard(), Session(self._engine) as session:
            return act(session)

    def _write(self, act: Callable[[Session], T]) -> T:
        with self._guard(), Session(self._writer) as session, session.begin():
            return act(session)

    def _guard(self) -> _Guard:
        return _Guard(self.url)


class _Guard:
    """Turns database failures (disk full, locked for a minute, connection lost) into one clear error."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, DBAPIError):
            raise StoreUnavailableError(
                f"the memory at {hide_password(self.url)} failed: {error.orig}",
                "nothing was half-written; check disk space and permissions",
            ) from error


def _with_effects() -> Any:
    return select(MechanismRow).options(selectinload(MechanismRow.effects))


def _newest(session: Session) -> list[MechanismRow]:
    latest_by_name = (
        select(MechanismRow.name, func.max(MechanismRow.version).label("version"))
        .group_by(MechanismRow.name)
        .subquery()
    )
    query = _with_effects().join(
        latest_by_name,
        (MechanismRow.name == latest_by_name.c.name) & (MechanismRow.version == latest_by_name.c.version),
    )
    return list(session.scalars(query.order_by(MechanismRow.name)))


def _row(session: Session, name: str, version: int | None) -> MechanismRow:
    query = _with_effects().where(MechanismRow.name == name)
    if version is not None:
        query = query.where(MechanismRow.version == version)
    row: MechanismRow | None = session.scalar(query.order_by(MechanismRow.version.desc()).limit(1))
    if row is None:
        known = list(session.scalars(select(MechanismRow.name).distinct().order_by(MechanismRow.name)))
        wanted = name if version is None else f"{name} version {version}"
        raise NoSuchMechanismError(f"the memory holds no mechanism {wanted}", f"known: {', '.join(known) or 'none'}")
    return row


def _stored(row: MechanismRow) -> StoredMechanism:
    if sha256_text(row.patch) != row.patch_sha256:
        raise TamperedError(
            f"the patch of {row.name} version {row.version} does not match its checksum",
            "restore the memory from an export",
        )
    fields = {name: getattr(row, name) for name in Mechanism.model_fields}
    effects = [Effect.model_validate(effect.detail) for effect in row.effects]
    return StoredMechanism(
        mechanism=Mechanism.model_validate(fields),
        version=row.version,
        status=row.status,
        origin=row.origin,
        created=row.created,
        effects=effects,
    )


def _add(
    session: Session, mechanism: Mechanism, origin: str, status: Status, created: datetime | None, has_fts: bool
) -> MechanismRow:
    digest = mechanism.content_sha256
    same = session.scalar(
        select(MechanismRow).where(MechanismRow.name == mechanism.name, MechanismRow.content_sha256 == digest)
    )
    if same is not None:
        return same
    newest = session.scalar(select(func.max(MechanismRow.version)).where(MechanismRow.name == mechanism.name)) or 0
    row = MechanismRow(
        **as_json(mechanism),
        version=newest + 1,
        patch_sha256=mechanism.patch_sha256,
        content_sha256=digest,
        status=status,
        origin=origin,
        created=created or datetime.now(UTC),
    )
    session.add(row)
    session.flush()
    if has_fts:
        session.execute(
            text(
                "insert into mechanism_fts(rowid, name, title, component, hypothesis, notes) "
                "values (:id, :name, :title, :component, :hypothesis, :notes)"
            ),
            {"id": row.id, **mechanism.model_dump(include={"name", "title", "component", "hypothesis", "notes"})},
        )
    return row


def _same_but_for_later(row: EffectRow, effect: Effect) -> bool:
    """Whether a stored effect is this one, but for what the store or a later profile added."""
    read = Effect.model_validate(row.detail)
    return read.model_copy(update={"at": None, "realised_ms": effect.realised_ms}) == effect


def _add_effect(session: Session, mechanism: MechanismRow, effect: Effect, origin: str) -> None:
    uid = effect.uid
    if (
        session.scalar(select(EffectRow.id).where(EffectRow.mechanism_id == mechanism.id, EffectRow.uid == uid))
        is not None
    ):
        return
    session.add(
        EffectRow(
            mechanism_id=mechanism.id,
            uid=uid,
            deployment=effect.deployment,
            deployment_fingerprint=effect.deployment_fingerprint,
            hardware_class=effect.hardware.hardware_class,
            ratio=effect.ratio,
            low=effect.low,
            outcome=effect.outcome,
            reason=effect.reason,
            run=effect.run,
            origin=origin,
            at=effect.at or datetime.now(UTC),
            detail=as_json(effect),
        )
    )
    session.flush()
    verified = session.scalar(
        select(func.count())
        .select_from(EffectRow)
        .where(EffectRow.mechanism_id == mechanism.id, EffectRow.outcome == "verified")
    )
    mechanism.status = "verified" if verified else "refuted"


def _search_fts(session: Session, tokens: list[str]) -> list[str]:
    match = " ".join('"' + token.replace('"', '""') + '"*' for token in tokens)
    rows = session.execute(
        text("select name from mechanism_fts where mechanism_fts match :match order by rank"), {"match": match}
    )
    return [row[0] for row in rows]


def _search_like(session: Session, tokens: list[str]) -> list[str]:
    columns = [
        MechanismRow.name,
        MechanismRow.title,
        MechanismRow.component,
        MechanismRow.hypothesis,
        MechanismRow.notes,
    ]
    query = select(MechanismRow.name).order_by(MechanismRow.name)
    for token in tokens:
        query = query.where(or_(*(column.icontains(token, autoescape=True) for column in columns)))
    return list(session.scalars(query))


def _count(session: Session, table: type[MechanismRow] | type[EffectRow]) -> int:
    return session.scalar(select(func.count()).select_from(table)) or 0


def _known(session: Session) -> dict[tuple[str, str], set[str]]:
    """(name, content digest) -> identities of its effects."""
    known: dict[tuple[str, str], set[str]] = {}
    query = select(MechanismRow.name, MechanismRow.content_sha256, EffectRow.uid).outerjoin(EffectRow)
    for name, digest, uid in session.execute(query):
        known.setdefault((name, digest), set()).add(uid)
    return known


def _stats(session: Session) -> Stats:
    statuses: dict[str, int] = {}
    for row in _newest(session):
        statuses[row.status] = statuses.get(row.status, 0) + 1
    outcomes = {
        outcome: number
        for outcome, number in session.execute(select(EffectRow.outcome, func.count()).group_by(EffectRow.outcome))
    }
    recalls = list(session.scalars(select(RecallRow)))
    ratios = [row.ratio for row in recalls if row.accepted and row.ratio]
    return Stats(
        mechanisms=statuses,
        effects=outcomes,
        deployments=list(session.scalars(select(EffectRow.deployment).distinct().order_by(EffectRow.deployment))),
        recalled=len(recalls),
        tried=sum(row.tried for row in recalls),
        accepted=sum(row.accepted for row in recalls),
        accepted_ratio=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
    )
