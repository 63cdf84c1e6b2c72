"""The tables, as SQLAlchemy types. A change here needs a migration under migrations/versions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, ForeignKey, Integer, String, Text, TypeDecorator, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class UtcTime(TypeDecorator[datetime]):
    """A UTC instant on every backend: SQLite drops the zone, so it is put back when read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Aware or naive (taken as UTC) datetime to UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Stored value to an aware UTC datetime."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Declarative base of the store."""

    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, list[float]: JSON, datetime: UtcTime}


class MechanismRow(Base):
    """One version of one mechanism. `body` holds the fields that are only read whole."""

    __tablename__ = "mechanism"
    __table_args__ = (UniqueConstraint("name", "version"), UniqueConstraint("name", "content_sha256"))

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), index=True)
    version: Mapped[int]
    component: Mapped[str] = mapped_column(String(128))
    title: Mapped[str] = mapped_column(Text)
    hypothesis: Mapped[str] = mapped_column(Text)
    predicted_gain: Mapped[float | None]
    requires: Mapped[list[str]]
    preconditions: Mapped[dict[str, Any]]
    counters: Mapped[list[str]]
    forbidden_counters: Mapped[list[str]]
    patch: Mapped[str] = mapped_column(Text)
    patch_sha256: Mapped[str] = mapped_column(String(64))
    content_sha256: Mapped[str] = mapped_column(String(64))
    notes: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(16))
    origin: Mapped[str] = mapped_column(String(128))
    created: Mapped[datetime]
    effects: Mapped[list[EffectRow]] = relationship(
        back_populates="mechanism", cascade="all, delete-orphan", order_by="EffectRow.at.desc(), EffectRow.id.desc()"
    )
    recalls: Mapped[list[RecallRow]] = relationship(back_populates="mechanism", cascade="all, delete-orphan")


class EffectRow(Base):
    """One outcome of one mechanism on one deployment. `detail` is the whole `records.Effect` as JSON."""

    __tablename__ = "effect"
    __table_args__ = (UniqueConstraint("mechanism_id", "uid"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    mechanism_id: Mapped[int] = mapped_column(ForeignKey("mechanism.id", ondelete="CASCADE"), index=True)
    uid: Mapped[str] = mapped_column(String(64))
    deployment: Mapped[str] = mapped_column(String(200))
    deployment_fingerprint: Mapped[str] = mapped_column(String(64), index=True)
    hardware_class: Mapped[str] = mapped_column(String(64), index=True)
    ratio: Mapped[float]
    low: Mapped[float]
    outcome: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(64))
    run: Mapped[str] = mapped_column(String(128))
    origin: Mapped[str] = mapped_column(String(128))
    at: Mapped[datetime]
    detail: Mapped[dict[str, Any]]
    mechanism: Mapped[MechanismRow] = relationship(back_populates="effects")


class RecallRow(Base):
    """One recall of one mechanism by one run, and what came of it."""

    __tablename__ = "recall"
    __table_args__ = (UniqueConstraint("run", "mechanism_id"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    run: Mapped[str] = mapped_column(String(128), index=True)
    mechanism_id: Mapped[int] = mapped_column(ForeignKey("mechanism.id", ondelete="CASCADE"), index=True)
    tried: Mapped[bool]
    accepted: Mapped[bool]
    ratio: Mapped[float | None]
    at: Mapped[datetime]
    mechanism: Mapped[MechanismRow] = relationship(back_populates="recalls")
