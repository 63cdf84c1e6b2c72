"""Alembic migrations of the store, run by `database.migrate` when a store is opened."""
