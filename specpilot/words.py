"""Words that several rooms put into sentences: a count with its noun. Imports nothing of ours."""

from __future__ import annotations


def count(number: int | float | str, noun: str, plural: str | None = None) -> str:
    """`1 round`, `2 rounds`, `1,000 tokens`: a count and its noun, which takes an `s` unless `plural` says otherwise.

    A figure that is no number (`?` where an event lacks it) takes the plural.
    """
    told = f"{number:,}" if isinstance(number, int | float) else number
    return f"{told} {noun if number == 1 else plural or noun + 's'}"
