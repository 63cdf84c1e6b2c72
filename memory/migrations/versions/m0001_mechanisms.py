"""Mechanisms, effects, recalls; a full-text index where SQLite has FTS5."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the first schema."""
    time = sa.DateTime(timezone=True)
    op.create_table(
        "mechanism",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("component", sa.String(128), nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("hypothesis", sa.Text, nullable=False),
        sa.Column("predicted_gain", sa.Double),
        sa.Column("requires", sa.JSON, nullable=False),
        sa.Column("preconditions", sa.JSON, nullable=False),
        sa.Column("counters", sa.JSON, nullable=False),
        sa.Column("forbidden_counters", sa.JSON, nullable=False),
        sa.Column("patch", sa.Text, nullable=False),
        sa.Column("patch_sha256", sa.String(64), nullable=False),
        sa.Column("content_sha256", sa.String(64), nullable=False),
        sa.Column("notes", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("origin", sa.String(128), nullable=False),
        sa.Column("created", time, nullable=False),
        sa.UniqueConstraint("name", "version"),
        sa.UniqueConstraint("name", "content_sha256"),
    )
    op.create_table(
        "effect",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "mechanism_id", sa.Integer, sa.ForeignKey("mechanism.id", ondelete="CASCADE"), nullable=False, index=True
        ),
        sa.Column("uid", sa.String(64), nullable=False),
        sa.Column("deployment", sa.String(200), nullable=False),
        sa.Column("deployment_fingerprint", sa.String(64), nullable=False, index=True),
        sa.Column("hardware_class", sa.String(64), nullable=False, index=True),
        sa.Column("ratio", sa.Double, nullable=False),
        sa.Column("low", sa.Double, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("origin", sa.String(128), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.UniqueConstraint("mechanism_id", "uid"),
    )
    op.create_table(
        "recall",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run", sa.String(128), nullable=False, index=True),
        sa.Column(
            "mechanism_id", sa.Integer, sa.ForeignKey("mechanism.id", ondelete="CASCADE"), nullable=False, index=True
        ),
        sa.Column("tried", sa.Boolean, nullable=False),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("ratio", sa.Double),
        sa.Column("at", time, nullable=False),
        sa.UniqueConstraint("run", "mechanism_id"),
    )
    bind = op.get_bind()
    if bind.dialect.name == "sqlite" and bind.scalar(sa.text("select sqlite_compileoption_used('ENABLE_FTS5')")):
        op.execute("create virtual table mechanism_fts using fts5(name, title, component, hypothesis, notes)")


def downgrade() -> None:
    """Drop everything this revision made."""
    op.execute("drop table if exists mechanism_fts")
    for table in ("recall", "effect", "mechanism"):
        op.drop_table(table)
