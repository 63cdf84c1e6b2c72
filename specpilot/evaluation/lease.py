"""One holder per device on this machine: of all our runs, one at a time is timing or profiling.

What is not timed (calibration, forcing, compilation of another run) takes no lease; it is seen in `CpuWatch` like any
other work. A lease is an advisory file lock in the machine's temporary folder, so that runs of several users and folders
share it and the kernel releases it when the holder dies. What is not ours cannot be locked out: it is measured
(`CpuWatch`) and reported beside the result, never hidden.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from specpilot.errors import EnvironmentProblem, InfrastructureError

FOREIGN_SHARE = 0.10
"""Share of the machine's CPU time that others may use during a leg before a warning is due."""

_GUARD = threading.Lock()
_LOCAL: dict[str, threading.RLock] = {}
_DEPTH: dict[str, int] = {}
_FILES: dict[str, int] = {}


class DeviceLease:
    """A context manager; re-entrant in one thread, exclusive between threads and processes."""

    def __init__(self, device: str = "cpu", purpose: str = "", timeout_s: float | None = None) -> None:
        """`timeout_s` None waits for ever; a run that cannot get the device in time raises InfrastructureError."""
        if not device.replace("-", "").replace(":", "").isalnum():
            raise ValueError(f"not a device name: {device!r}")
        self.device = device
        self.purpose = purpose
        self.timeout_s = timeout_s
        self.waited_s = 0.0
        self._path = lease_folder() / f"{device.replace(':', '-')}.lock"

    def __enter__(self) -> DeviceLease:
        began = time.monotonic()
        key = str(self._path)
        with _GUARD:
            local = _LOCAL.setdefault(key, threading.RLock())
        if not local.acquire(timeout=-1 if self.timeout_s is None else self.timeout_s):
            raise self._busy("another thread of this run")
        try:
            if _DEPTH.get(key, 0) == 0:
                _FILES[key] = self._lock(began)
            _DEPTH[key] = _DEPTH.get(key, 0) + 1
        except BaseException:
            local.release()
            raise
        self.waited_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        key = str(self._path)
        _DEPTH[key] -= 1
        if _DEPTH[key] == 0:
            os.close(_FILES.pop(key))
        _LOCAL[key].release()

    def _lock(self, began: float) -> int:
        descriptor = _open_shared(self._path)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.timeout_s is not None and time.monotonic() - began > self.timeout_s:
                        raise self._busy(_holder(descriptor)) from None
                    time.sleep(0.05)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} {self.purpose}".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _busy(self, holder: str) -> InfrastructureError:
        return InfrastructureError(
            f"device {self.device} is held by {holder or 'another run'} since more than {self.timeout_s} s",
            "wait for it to end, or end it; two timed runs on one device would spoil each other",
        )


def lease_folder() -> Path:
    """Machine-wide folder of the locks: `$SPECPILOT_LEASE_DIR`, else the temporary folder's `specpilot-leases`."""
    named = os.environ.get("SPECPILOT_LEASE_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / "specpilot-leases"


def _open_shared(path: Path) -> int:
    """Opens a lock file that every user may lock; never follows a planted link."""
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o1777)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            os.fchmod(descriptor, 0o666)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot open the device lock {path}: {error.strerror}", "set SPECPILOT_LEASE_DIR to a folder you may write"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EnvironmentProblem(f"{path} is no regular file", "remove it")
    return descriptor


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def other_engines() -> list[str]:
    """Running engine processes of this user that are not below this process: leftovers, or another run's.

    Engines are known by the environment that our sandbox gives them; stopped ones use no device and are left out.
    """
    found = []
    for process in psutil.process_iter(["pid", "environ", "status"]):
        facts = process.info
        commit = (facts["environ"] or {}).get("SPECPILOT_COMMIT")
        if commit is None or facts["status"] in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            continue
        try:
            if os.getpid() not in {parent.pid for parent in process.parents()}:
                found.append(f"pid {facts['pid']} serving {commit[:12]}")
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds between two looks, all cores together."""

    wall_s: float
    busy_s: float
    stolen_s: float
    """Taken by the hypervisor for other guests."""
    own_s: float
    """This process."""
    engine_s: float
    """The engine that was timed."""
    cores: int

    @property
    def foreign_share(self) -> float:
        """Share of all cores' time used by neither us nor the engine."""
        return max(0.0, self.busy_s - self.own_s - self.engine_s) / (self.wall_s * self.cores) if self.wall_s else 0.0


class CpuWatch:
    """Adds up who used the CPU during timed legs."""

    def __init__(self) -> None:
        self.uses: list[CpuUse] = []
        self._mark: tuple[float, float, float, float, float] | None = None

    def start(self, engine_cpu_s: float) -> None:
        """Call right before a leg, with the engine's CPU seconds so far."""
        self._mark = (*_looked(), engine_cpu_s)

    def stop(self, engine_cpu_s: float) -> CpuUse:
        """Call right after it; remembers and returns the use in between."""
        if self._mark is None:
            raise RuntimeError("start was not called")
        was = self._mark
        now = (*_looked(), engine_cpu_s)
        wall, busy, stolen, own, engine = (b - a for a, b in zip(was, now, strict=True))
        use = CpuUse(wall, busy, stolen, own, engine, psutil.cpu_count() or 1)
        self.uses.append(use)
        self._mark = None
        return use

    def summary(self) -> dict[str, Any]:
        """For `Comparison.machine`: shares over all legs, load average, and warnings in words."""
        room = sum(use.wall_s * use.cores for use in self.uses) or 1.0
        foreign = sum(use.foreign_share * use.wall_s * use.cores for use in self.uses) / room
        worst = max((use.foreign_share for use in self.uses), default=0.0)
        stolen = sum(use.stolen_s for use in self.uses) / room
        warnings = []
        if foreign > FOREIGN_SHARE:
            warnings.append(
                f"other programs used {foreign:.0%} of the CPU during the timed legs: expect noise, close them and repeat"
            )
        if stolen > FOREIGN_SHARE:
            warnings.append(f"the hypervisor took {stolen:.0%} of the CPU during the timed legs: a busy host")
        return {
            "cores": psutil.cpu_count() or 1,
            "foreign_cpu_share": round(foreign, 4),
            "foreign_cpu_share_worst_leg": round(worst, 4),
            "stolen_cpu_share": round(stolen, 4),
            "load_average_1m": round(psutil.getloadavg()[0], 2),
            "warnings": warnings,
        }


def _looked() -> tuple[float, float, float, float]:
    """(monotonic, busy, stolen, own) seconds now."""
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    mine = psutil.Process().cpu_times()
    return time.monotonic(), sum(times) - idle - stolen - guest, stolen, mine.user + mine.system
