"""Untrusted child processes: engines built from candidate code, builds, and workers' commands.

Threat model. The code we start was written by a search, a language model, or a stranger's patch, and is
judged by what it prints and serves. It may loop for ever, fork, daemonise, flood its output, eat all memory,
read our environment for keys, and outlive us. It runs as the same user, so we defend the *experiment*, not
the machine: every process it starts can be found, frozen and ended; memory, time and output are bounded;
no secret is in its environment; and none of it survives us, even after `kill -9`. With bubblewrap (used when
present and usable) it also cannot write outside the folders that it was given. Without it, files that the
user may read or write stay reachable: whoever reviews nothing should install bubblewrap.

A guard (`sandbox_guard.py`) stands between: the subreaper and watcher of the command. A command that kills
its own guard is killed by the kernel (parent-death signal); a grandchild that had left the group by then
can escape, which only bubblewrap's pid namespace prevents.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from specpilot.bubblewrap import MIB, confined_command
from specpilot.errors import EnvironmentProblem, InfrastructureError, UsageError, disk_full_named

_ALLOWED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM VIRTUAL_ENV CC CXX LD_LIBRARY_PATH LIBRARY_PATH "
    "CPATH CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES "
    "SSL_CERT_FILE SSL_CERT_DIR XDG_CACHE_HOME".split()
)
_SECRET = re.compile(
    r"(?:^|_)(?:API_?KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|ACCESS_KEY(?:_ID)?|PRIVATE_KEY|AUTH)(?:_|$)",
    re.IGNORECASE,
)

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Limits:
    """What one command and everything it starts may use."""

    memory_bytes: int = 8 << 30
    """Resident anonymous and shared memory of all its processes together. With bubblewrap its files in `/tmp` and in
    `/dev/shm` may take half as much more each."""
    output_bytes: int = 64 * MIB
    """Bytes kept of standard output and error together; more ends the command."""
    file_bytes: int = 8 << 30
    """Largest single file it may write."""
    disk_bytes: int = 16 << 30
    """Bytes of all files in the folders that it may write."""
    processes: int = 8192
    """Processes and threads of this user (the kernel counts all of them; root is exempt)."""
    deadline_s: float | None = None
    """Seconds from `spawn` until it is ended; None for a server."""
    grace_s: float = 2.0
    """Seconds between asking it to end and killing it."""


@dataclass(frozen=True)
class Finished:
    """How a bounded command ended."""

    returncode: int
    """Exit status, or minus the signal's number."""
    tail: str
    """The last part of what it printed."""
    killed_for: str | None
    """`memory`, `output`, `disk`, `time`, or None."""
    seconds: float


def is_secret_name(name: str) -> bool:
    """True if an environment variable of this name is taken for a credential."""
    return bool(_SECRET.search(name))


def scrub_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: a short list of harmless variables of ours, and `extra`.

    Raises `UsageError` if `extra` holds a credential: keys never reach a candidate's process.
    """
    for name in extra:
        if is_secret_name(name):
            raise UsageError(
                f"environment variable {name} looks like a credential and would be given to candidate code",
                "remove it from engine.environment; fetch what needs it before the run.",
            )
    kept = {k: v for k, v in os.environ.items() if k in _ALLOWED or k.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("LANG", "C.UTF-8")
    return kept | {name: str(value) for name, value in extra.items()}


@dataclass
class Child:
    """A running command. Made by `spawn`. All methods may be called from any thread."""

    pid: int
    """Process id of the command (of bubblewrap, when that is used)."""
    pgid: int
    start_time: float
    """Creation time as psutil gives it; with the pid it names one process for ever."""
    log_path: Path
    command: list[str]
    limits: Limits
    confined: bool
    """True if it runs inside bubblewrap."""
    _guard: subprocess.Popen[bytes]
    _control: int
    _status: int
    returncode: int | None = None
    killed_for: str | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def poll(self) -> int | None:
        """Exit status once the command and everything it started have ended, else None."""
        with self._lock:
            if self.returncode is None and self._guard.poll() is not None:
                self._collect()
            return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Like `poll`, but waits up to `timeout_s` seconds (None: for ever)."""
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def processes(self) -> list[psutil.Process]:
        """Every living process of this command."""
        try:
            return psutil.Process(self._guard.pid).children(recursive=True)
        except psutil.Error:
            return []

    def freeze(self) -> None:
        """Stop the clock of every process of this command (SIGSTOP), until none is left running."""
        for _ in range(20):
            running = [p for p in self.processes() if _state(p) not in ("stopped", "zombie", "gone")]
            if not running:
                return
            for process in running:
                _signal(process.pid, signal.SIGSTOP)
            time.sleep(0.002)
        raise InfrastructureError(
            f"cannot freeze process {self.pid} ({self.command[0]})", "stop the run and resume it."
        )

    def thaw(self) -> None:
        """Let every process of this command go on (SIGCONT)."""
        for process in self.processes():
            _signal(process.pid, signal.SIGCONT)

    def stop(self, grace_s: float | None = None) -> int:
        """End the command and everything it started: TERM, after `grace_s` KILL. Bounded; returns its status."""
        grace = self.limits.grace_s if grace_s is None else grace_s
        with self._lock:
            if self.poll() is None and self._control >= 0:
                try:
                    os.write(self._control, f"stop {grace:.3f}\n".encode())
                except OSError:
                    pass
        if self.wait(grace + 8.0) is None:
            # The guard itself hangs or was frozen: do its work.
            doomed = self.processes()
            for process in doomed:
                _signal(process.pid, signal.SIGKILL)
            self._guard.kill()
            self._guard.wait()
        status = self.poll()
        return -signal.SIGKILL if status is None else status

    def tail(self, max_bytes: int = 4000) -> str:
        """The last part of what the command printed."""
        return tail_of(self.log_path, max_bytes)

    def _collect(self) -> None:
        """Read the guard's last words and release its pipes."""
        data = b""
        while chunk := os.read(self._status, 4096):
            data += chunk
        os.close(self._status)
        os.close(self._control)
        self._control = -1
        last = json.loads(data.splitlines()[-1]) if data.strip() else {}
        reason = last.get("killed_for")
        self.killed_for = reason if reason in ("memory", "output", "disk", "time") else None
        code = int(last.get("exit", -signal.SIGKILL))
        # Bubblewrap ends like a shell: 128 + signal.
        self.returncode = 128 - code if self.confined and code > 128 else code
        if "exit" not in last:  # the guard was killed; its child died with it, the group may not have
            try:
                os.killpg(self.pgid, signal.SIGKILL)
            except OSError:
                pass


def spawn(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log_path: Path,
    limits: Limits | None = None,
    writable: Sequence[Path] = (),
    recorder: Callable[[int, int, float], None] | None = None,
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
) -> Child:
    """Start an untrusted command in its own process group. It does not run before `recorder` returned.

    `env` is the whole environment (`scrub_environment` makes one); credentials in it are refused. Output is
    appended to `log_path`. `writable`, `readable`, `hidden` matter only with bubblewrap: the folders it may
    write (existing), what it must see below /tmp, and what it must not see. The deadline counts from this call.
    `recorder(pid, pgid, start_time)` is called before the command executes its first instruction.
    Raises `EnvironmentProblem` if the program or `cwd` does not exist.
    """
    limits = limits or Limits()
    env = _without_secrets(env)
    _check_startable(command, cwd, env)
    deadline = None if limits.deadline_s is None else time.monotonic() + limits.deadline_s
    with disk_full_named(log_path):
        log_path.parent.mkdir(parents=True, exist_ok=True)
    wrapped = confined_command(command, cwd, writable, readable, hidden, limits.memory_bytes)
    confined = wrapped != list(command)
    control_read, control_write = os.pipe()
    status_read, status_write = os.pipe()
    spec = {
        "command": wrapped,
        "confined": confined,
        "cwd": str(cwd),
        "env": dict(env),
        "log": str(log_path),
        "control": control_read,
        "status": status_write,
        "parent": os.getpid(),
        "deadline": deadline,
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "disk_bytes": limits.disk_bytes,
        "writable": [str(path) for path in writable],
        "grace_s": limits.grace_s,
        "rlimits": {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NPROC": limits.processes},
    }
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_guard.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(control_read, status_write),
        start_new_session=True,
        env={"PATH": os.defpath},
    )
    os.close(control_read)
    os.close(status_write)
    try:
        assert guard.stdin is not None
        guard.stdin.write(json.dumps(spec).encode() + b"\n")
        guard.stdin.close()
        pid = int(json.loads(_first_line(status_read))["pid"])
        start_time = psutil.Process(pid).create_time()
        child = Child(
            pid, pid, start_time, log_path, list(command), limits, confined, guard, control_write, status_read
        )  # fmt: skip
        if recorder is not None:
            recorder(pid, pid, start_time)
        os.write(control_write, b"go\n")
    except BaseException:
        os.close(control_write)  # the guard ends the command, which never ran
        guard.wait(30)
        os.close(status_read)
        raise
    return child


def run_bounded(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float,
    log_path: Path | None = None,
    limits: Limits | None = None,
    writable: Sequence[Path] = (),
    recorder: Callable[[int, int, float], None] | None = None,
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
) -> Finished:
    """Run an untrusted command to its end, at most `timeout_s` seconds from now. See `spawn`."""
    limits = limits or Limits()
    bounded = Limits(**{**limits.__dict__, "deadline_s": timeout_s})
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="specpilot-") as scratch:
        log = log_path or Path(scratch) / "output.log"
        child = spawn(
            command, cwd=cwd, env=env, log_path=log, limits=bounded, writable=writable, recorder=recorder,
            readable=readable, hidden=hidden,
        )  # fmt: skip
        try:
            child.wait(timeout_s + bounded.grace_s + 15.0)
        finally:
            status = child.stop(0.0)
        return Finished(status, child.tail(), child.killed_for, time.monotonic() - started)


def kill_leftovers(recorded: Iterable[tuple[int, int, float]], grace_s: float = 2.0) -> list[int]:
    """End processes that an earlier, killed run of ours left: `(pid, pgid, start_time)` each.

    A pid whose creation time differs belongs to somebody else now and is left alone. Returns the pids ended.
    """
    doomed: dict[int, psutil.Process] = {}
    leaders: list[int] = []
    for pid, pgid, start_time in recorded:
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - start_time) > 1.0:  # all of them move when the clock is set
                continue
            for member in [process, *process.children(recursive=True)]:
                doomed[member.pid] = member
        except psutil.Error:
            continue
        leaders.append(pid)
        if pgid == pid:
            for member in psutil.process_iter():
                if _group(member.pid) == pgid:
                    doomed[member.pid] = member
    for number in (signal.SIGTERM, signal.SIGCONT):
        for pid in doomed:
            _signal(pid, number)
    _, alive = psutil.wait_procs(list(doomed.values()), timeout=grace_s)
    for process in alive:
        _signal(process.pid, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5.0)
    return leaders


def tail_of(path: Path, max_bytes: int = 4000) -> str:
    """The last `max_bytes` bytes of a text file, whole lines, without what a terminal would obey; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read()
    except OSError:
        return ""
    text = _CONTROL.sub("\ufffd", data.decode("utf-8", "replace"))
    return text if size <= max_bytes else text.partition("\n")[2] or text


def _without_secrets(env: Mapping[str, str]) -> Mapping[str, str]:
    leaked = [name for name in env if is_secret_name(name)]
    if leaked:
        raise UsageError(
            f"refusing to give {', '.join(leaked)} to an untrusted process",
            "build its environment with scrub_environment.",
        )
    return env


def _check_startable(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
    if not cwd.is_dir():
        raise EnvironmentProblem(f"cannot start {command[0]}: the working directory {cwd} does not exist", "")
    if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
        raise EnvironmentProblem(
            f"cannot start {command[0]!r}: no such program", "check engine.toml's launch command and engine.python."
        )


def _first_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise InfrastructureError(
                "the sandbox guard ended before it started the command",
                f"check that {sys.executable} works and that this user may start processes.",
            )
        data += byte
    return data


def _state(process: psutil.Process) -> str:
    try:
        status = process.status()
    except psutil.Error:
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else str(status)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1
