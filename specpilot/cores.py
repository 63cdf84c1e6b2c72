"""How many cores this process may use. Imports nothing of ours."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the system lets this process run on, where it tells; else all of them. At least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
