"""Alembic's entry: runs on the connection that `database.migrate` hands over, inside its transaction."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=context.config.attributes.get("metadata"))
with context.begin_transaction():
    context.run_migrations()
