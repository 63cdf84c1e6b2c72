"""How many cores this process may use: the one answer, for the engine's threads and the roofs alike. Imports nothing of ours."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that the system lets this process run on, where it tells, and that a container's CPU quota pays for. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, allowed if quota is None else min(allowed, math.floor(quota)))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """CPU seconds per second that the control groups grant (`docker --cpus=2`: 2.0); None where nothing limits them.

    Reads both versions of control groups, and every group from this process's own up to the root: the tightest counts.
    """
    found: list[float] = []
    for line in _lines(own):
        if line.count(":") < 2:  # no line of this file as the kernel writes it
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, read = [cgroups, cgroups / "unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            roots, read = [cgroups / controllers, cgroups / "cpu"], _quota_v1
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's, while the container's own group is mounted as the root.
        folders = [root / group for root in roots for group in dict.fromkeys([inner, *inner.parents])]
        found += [quota for quota in map(read, folders) if quota is not None]
    return min(found, default=None)


def _quota_v2(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()
    return _share(*words) if len(words) == 2 else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _lines(group / "cpu.cfs_quota_us"), _lines(group / "cpu.cfs_period_us")
    return _share(quota[0], period[0]) if quota and period else None


def _share(quota: str, period: str) -> float | None:
    """Quota over period, both in microseconds; None for `max`, `-1` and what is no number."""
    try:
        granted, every = int(quota), int(period)
    except ValueError:
        return None
    return granted / every if granted > 0 and every > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
