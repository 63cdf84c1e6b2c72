"""Single values of a config.json, each of the kind and size that it must be. Knows no model and reads no file.

Python reads NaN and Infinity in JSON, takes true for 1 and 2.9 for 2 where a whole number is asked for: an engine that lets them through
serves a model that is not the one in the folder.
"""

from __future__ import annotations

import math
from typing import Any


def whole(value: Any, name: str, low: int = 1, high: int | None = None) -> int:
    """`value`, a whole number from `low` to `high`. Raises ValueError naming `name`."""
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}, not a whole number from {low} {'on' if high is None else f'to {high}'}")
    return value


def positive(value: Any, name: str) -> float:
    """`value`, a finite number above 0. Raises ValueError naming `name`."""
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, not a number above 0")
    return float(value)


def flag(value: Any, name: str, default: bool | None = None) -> bool | None:
    """`value`, true or false; `default` for null. Raises ValueError naming `name`."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not true or false")
    return value


def words(value: Any, name: str, known: tuple[str, ...], length: int) -> list[str]:
    """`value`, a list of `length` words out of `known`. Raises ValueError naming `name`."""
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{name} is {value!r}, not a list of {length}, one for each layer")
    odd = [word for word in value if word not in known]
    if odd:
        raise ValueError(f"{name} holds {odd[0]!r}, known are {', '.join(known)}")
    return value
