"""One answer to how many cores: the affinity mask, cut to the quota of the control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specpilot import cores
from specpilot.cores import cpu_quota, usable_cores


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """Made-up /sys/fs/cgroup and /proc/self/cgroup; `files`: text by path, `__` for `/` and `_dot_` for `.`."""
    root = folder / "cgroup"
    root.mkdir()
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return root, folder / "own"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu_dot_max": "200000 100000\n"}, 2.0),  # docker --cpus=2
        ("0::/\n", {"cpu_dot_max": "max 100000\n"}, None),
        ("0::/\n", {"cpu_dot_max": "nonsense\n"}, None),
        ("0::/\n", {}, None),
        ("nonsense\n\n0:\n0::/\n", {"cpu_dot_max": "200000 100000\n"}, 2.0),
        ("", {"cpu_dot_max": "200000 100000\n"}, None),
        # a service inside a slice: the tighter of the two counts, whichever it is
        ("0::/a/b\n", {"a__cpu_dot_max": "150000 100000", "a__b__cpu_dot_max": "400000 100000"}, 1.5),
        ("0::/a/b\n", {"a__cpu_dot_max": "max 100000", "a__b__cpu_dot_max": "50000 100000"}, 0.5),
        # version 1; the path is the host's, the group is mounted as the root
        (
            "3:cpuset:/\n2:cpu,cpuacct:/docker/1f\n0::/\n",
            {"cpu,cpuacct__cpu.cfs_quota_us": "300000\n", "cpu,cpuacct__cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("1:cpu:/\n", {"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_quota(tmp_path: Path, own: str, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(*groups(tmp_path, own, **files)) == quota


@pytest.mark.parametrize(("quota", "expected"), [(None, 64), (2.0, 2), (2.5, 2), (0.5, 1), (100.0, 64)])
def test_affinity_cut_to_the_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == expected
