"""The small process between us and an untrusted command. Standard library only; run as a script by `sandbox.py`.

It is the parent of the command and the subreaper of everything the command starts, so a daemonised
grandchild still belongs to it. It ends the whole tree when the command ends, when a limit is passed, when
it is told to, and when its own parent dies, even by `kill -9`: the parent holds the write end of a pipe
that the kernel closes. A parent-death signal on the command would not do: it fires when the *thread* that
forked ends, and it does not reach grandchildren.

Input (file descriptor `control`): lines `go`, `stop SECONDS`; end of file means the parent died.
Output (file descriptor `status`): JSON lines `{"pid": N}`, then `{"exit": CODE, "killed_for": NAME | null}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
POLL_S = 0.5
DISK_POLL_S = 2.0
MOST_FILES = 50_000
"""More files than that in a folder that a command may write count as too many bytes: looking at them takes time."""
CHUNK = 1 << 16


def prctl(option: int, value: int) -> None:
    """Linux `prctl`; nothing on other systems, where the process group is all we have."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children_of(pid: int) -> list[int]:
    """Direct children of a process, from `/proc`; empty if it is gone or `/proc` is not there."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass
    return found


def children_by_scan() -> dict[int, list[int]]:
    """Children of every process, for kernels built without the `children` file; empty without `/proc`."""
    table: dict[int, list[int]] = {}
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return table
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        table.setdefault(parent, []).append(pid)
    return table


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    table = None if HAS_CHILDREN_FILE else children_by_scan()
    found: list[int] = []
    queue = [pid]
    while queue:
        current = queue.pop(0)
        below = children_of(current) if table is None else table.get(current, [])
        found += below
        queue += below
    return found


def resident_bytes(pids: list[int]) -> int:
    """Resident memory that is not a file's: anonymous and shared segments. Mapped weights are spared,
    because the kernel may drop them; a segment that several processes share counts once for each."""
    kib = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return kib * 1024


def disk_bytes(folders: list[str]) -> float:
    """Bytes that the files below `folders` take on their disk. Infinite where there are too many to look at, or where they cannot
    be reached (a path grown too long, a locked folder): the command made it so. Follows no link; unlinked files are not seen."""
    total, files, waiting = 0, 0, list(folders)
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > MOST_FILES:
                        return float("inf")
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone since
        except OSError:
            return float("inf")
    return total


def signal_all(group: int, number: int) -> None:
    """Send a signal to the command's group and to every descendant that left the group."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, number)
        except OSError:
            pass
    try:
        os.killpg(group, number)
    except OSError:
        pass


class Guard:
    """One command, its limits, and the loop that watches it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.control: int = spec["control"]
        self.status: int = spec["status"]
        self.killed_for: str | None = None
        self.exit_code: int | None = None
        self.kill_at: float | None = None
        self.written = 0
        self.buffer = b""
        self.next_disk = time.monotonic() + DISK_POLL_S
        self.control_open = True
        self.log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def tell(self, **fields: object) -> None:
        """Write one status line; a parent that is gone is no error."""
        try:
            os.write(self.status, json.dumps(fields).encode() + b"\n")
        except OSError:
            pass

    def start(self) -> None:
        """Fork the command, held back until the parent has recorded its id and says `go`."""
        output_read, output_write = os.pipe()
        go_read, go_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.exec_command(output_write, go_read, (output_read, go_write))
        os.close(output_write)
        os.close(go_read)
        os.set_blocking(output_read, False)
        self.output, self.go = output_read, go_write
        self.tell(pid=self.pid)

    def exec_command(self, output: int, go: int, close: tuple[int, ...]) -> None:
        """In the child: new session, limits, then the command. Never returns."""
        try:
            os.dup2(output, 2)
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # second line, if the guard itself is killed
            if not self.spec["confined"]:  # bubblewrap, which may be setuid, does this itself
                prctl(PR_SET_NO_NEW_PRIVS, 1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for name, wanted in self.spec["rlimits"].items():
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(kind, (limit, limit))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            for descriptor in close:
                os.close(descriptor)
            if not os.read(go, 1):
                os._exit(125)
            os.chdir(self.spec["cwd"])
            os.execvpe(self.spec["command"][0], self.spec["command"], self.spec["env"])
        except BaseException as error:  # the child must never return into the guard's loop
            os.write(2, f"cannot start {self.spec['command'][0]}: {error}\n".encode())
        os._exit(127)

    def end(self, reason: str | None, grace_s: float) -> None:
        """Ask the tree to end now, and set the time when it is killed. The first reason stays."""
        if self.kill_at is not None:
            self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
            return
        self.killed_for = reason
        self.kill_at = time.monotonic() + grace_s
        signal_all(self.pid, signal.SIGTERM)
        signal_all(self.pid, signal.SIGCONT)

    def pump(self) -> bool:
        """Move output to the log, up to the limit; False at end of file."""
        try:
            data = os.read(self.output, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        room = self.spec["output_bytes"] - self.written
        if room > 0:
            try:
                os.write(self.log, data[:room])
            except OSError:
                pass  # a full disk must not stall the command on a full pipe
        self.written += len(data)
        if self.written > self.spec["output_bytes"]:
            self.end("output", 0.0)
        return True

    def command_line(self) -> None:
        """Read what the parent says."""
        data = os.read(self.control, 4096)
        if not data:
            self.control_open = False
            self.end("parent", self.spec["grace_s"])
            return
        self.buffer += data
        while b"\n" in self.buffer:
            line, _, self.buffer = self.buffer.partition(b"\n")
            words = line.split()
            if words[0] == b"go":
                os.write(self.go, b"g")
                os.close(self.go)
            elif words[0] == b"stop":
                self.end(None, float(words[1]))

    def reap(self) -> None:
        """Collect every ended child, also those we inherited."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def check_limits(self) -> None:
        """Deadline, memory, disk, and whether our parent is still the one who started us."""
        now = time.monotonic()
        if self.kill_at is None:
            if self.spec["deadline"] is not None and now >= self.spec["deadline"]:
                self.end("time", self.spec["grace_s"])
            elif resident_bytes(descendants(os.getpid())) > self.spec["memory_bytes"]:
                self.end("memory", 0.0)
            elif now >= self.next_disk:
                self.next_disk = now + DISK_POLL_S
                if disk_bytes(self.spec["writable"]) > self.spec["disk_bytes"]:
                    self.end("disk", 0.0)
            elif os.getppid() != self.spec["parent"]:
                self.end("parent", self.spec["grace_s"])

    def next_wait(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        due = [POLL_S]
        if self.kill_at is not None:
            due.append(self.kill_at - now)
        elif self.spec["deadline"] is not None:
            due.append(self.spec["deadline"] - now)
        return max(0.0, min(due))

    def watch(self, wakeup: int) -> None:
        """Until the command has ended or must be killed."""
        output_open = True
        next_check = 0.0
        while self.exit_code is None:
            sources = [wakeup] + [self.output] * output_open + [self.control] * self.control_open
            ready = select.select(sources, [], [], self.next_wait())[0]
            if wakeup in ready:
                os.read(wakeup, 4096)
            if self.control in ready:
                self.command_line()
            if self.output in ready:
                output_open = self.pump()
            self.reap()
            if time.monotonic() >= min(next_check, self.spec["deadline"] or next_check):
                self.check_limits()
                next_check = time.monotonic() + POLL_S
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                return

    def sweep(self) -> None:
        """Kill what is left of the tree, stopped first so that nothing forks away; bounded to 5 s."""
        limit = time.monotonic() + 5.0
        while time.monotonic() < limit:
            signal_all(self.pid, signal.SIGSTOP)
            signal_all(self.pid, signal.SIGKILL)
            self.reap()
            if self.exit_code is not None and not descendants(os.getpid()):
                break
            time.sleep(0.005)
        while self.spec["output_bytes"] > self.written:
            before = self.written
            if not self.pump() or self.written == before:
                break


def main() -> None:
    """Entry: the specification is one JSON line on standard input."""
    spec = json.loads(sys.stdin.buffer.readline())
    for ours in (spec["control"], spec["status"]):
        os.set_inheritable(ours, False)  # the command could read our orders there, and write our last words
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guard = Guard(spec)
    guard.start()
    guard.watch(wakeup_read)
    guard.sweep()
    guard.tell(exit=-9 if guard.exit_code is None else guard.exit_code, killed_for=guard.killed_for)


if __name__ == "__main__":
    main()
