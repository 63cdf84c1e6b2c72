"""Where the commands print their tables: as wide as the terminal, or wide enough for whole ids in a pipe or file."""

from __future__ import annotations

from rich.console import Console

PIPED = 200
"""Columns where nobody looks: an id cut over three lines can be neither copied nor searched for."""


def console() -> Console:
    """A console on standard output."""
    found = Console()
    return found if found.is_terminal else Console(width=PIPED)
