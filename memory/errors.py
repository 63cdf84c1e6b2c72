"""What can go wrong with the memory store. The command line maps `exit_code` (docs/architecture.md)."""

from __future__ import annotations


class MemoryError_(Exception):
    """Base of the store's errors: what was wrong (`message`), what to do (`hint`), how to exit (`exit_code`)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class StoreUnavailableError(MemoryError_):
    """The database cannot be opened: no such folder, no permission, no driver, not a database, disk full."""

    exit_code = 3


class SchemaTooNewError(MemoryError_):
    """The database was written by a newer SpecPilot; using it could lose what that version stores."""

    exit_code = 3


class NoSuchMechanismError(MemoryError_):
    """No mechanism of that name (and version)."""

    exit_code = 2


class InvalidMechanismError(MemoryError_):
    """A mechanism, effect or seed that does not follow the schema."""

    exit_code = 2


class SeedError(InvalidMechanismError):
    """A folder under seeds/ that cannot be read as a mechanism."""


class TamperedError(MemoryError_):
    """A checksum does not match: the file or row was changed after it was written."""

    exit_code = 8
