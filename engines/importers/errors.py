"""The one error of this room. It may not import anything of ours."""

from __future__ import annotations


class ImportRefused(ValueError):
    """The file cannot be imported; the message says what was wrong, where, and what to do."""
