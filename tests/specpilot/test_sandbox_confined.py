"""The same processes inside bubblewrap: what they may write, see and reach, and that none survives."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specpilot import bubblewrap
from specpilot.sandbox import MIB, Limits, run_bounded, spawn
from tests.helpers.commands import ENV, FAMILY, PARENT, QUICK, eventually, gone, pids_in, python


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bubblewrap as found on this machine; the test is left out where it does not work."""
    monkeypatch.delenv("SPECPILOT_BWRAP", raising=False)
    bubblewrap.bubblewrap.cache_clear()
    if bubblewrap.bubblewrap() is None:
        pytest.skip("bubblewrap is not usable here")
    yield
    bubblewrap.bubblewrap.cache_clear()


def test_bubblewrap_confines_writing_and_hides(confined: None, tmp_path: Path) -> None:
    for name in ("free", "fixed", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret/hidden.jsonl").write_text("answers")
    (tmp_path / "answers.txt").write_text("more answers")
    code = f"""
        import os
        open({str(tmp_path / "free" / "x")!r}, "w").close()
        for path in ({str(tmp_path / "fixed" / "x")!r}, "/etc/specpilot-test"):
            try:
                open(path, "w").close()
                print("wrote", path)
            except OSError:
                print("refused")
        try:
            print(repr(open({str(tmp_path / "answers.txt")!r}).read()))
        except OSError:
            print("''")
        print(os.listdir({str(tmp_path / "secret")!r}), os.getpid() < 10)
    """
    done = run_bounded(
        python(code), cwd=tmp_path / "fixed", env=ENV, timeout_s=60, writable=[tmp_path / "free"],
        readable=[tmp_path], hidden=[tmp_path / "secret", tmp_path / "answers.txt"],
    )  # fmt: skip
    assert done.tail.splitlines() == ["refused", "refused", "''", "[] True"], done.tail
    assert (tmp_path / "free/x").exists()


def test_bubblewrap_holds_against_root(confined: None, tmp_path: Path) -> None:
    """With root's capabilities one `mount` makes everything writable again; root also owns disks and kernel settings."""
    code = f"""
        import ctypes, os, stat
        libc = ctypes.CDLL(None, use_errno=True)
        MS_REMOUNT, MS_BIND = 32, 4096
        print(libc.mount(None, b"/", None, MS_REMOUNT | MS_BIND, None))
        for path in ({str(tmp_path / "x")!r}, "/proc/sys/kernel/hostname"):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
                print("opened", path)
            except OSError:
                print("refused")
        print([n for n in os.listdir("/dev") if stat.S_ISBLK(os.lstat("/dev/" + n).st_mode)], os.listdir("/dev/shm"))
        open("/dev/shm/left-behind", "w").close()
    """
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=60)
    assert done.tail.splitlines() == ["-1", "refused", "refused", "[] []"], done.tail
    assert not Path("/dev/shm/left-behind").exists()


def test_bubblewrap_shows_no_socket_of_a_service(confined: None, tmp_path: Path) -> None:
    """Who may talk to a container daemon owns the machine: its socket lies in /run, which /var/run is another name of."""
    assert Path("/run").exists() and any(Path("/run").iterdir()), "nothing to hide here"
    code = "import os; print([n for d in ('/run', '/var/run') for n in os.listdir(d) if n not in ('nvidia', 'opengl-driver')])"
    assert run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=60).tail == "[]\n"


def test_bubblewrap_bounds_files_in_memory(confined: None, tmp_path: Path) -> None:
    """Files in memory count for no process, so they would pass the memory limit until the machine runs out."""
    if not bubblewrap._sizes(str(bubblewrap.bubblewrap())):
        pytest.skip("this bubblewrap cannot bound them")
    code = """
        for folder in ("/tmp", "/dev/shm", "/run", "/dev"):
            written = 0
            try:
                with open(folder + "/hoard", "wb", buffering=0) as file:
                    while written < 64:
                        file.write(bytes(1 << 20))
                        written += 1
            except OSError as error:
                print(folder, written, error.errno, flush=True)
        open("/dev/null", "w").write("writable")
    """
    limits = Limits(memory_bytes=48 * MIB)
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=60, limits=limits)
    assert done.returncode == 0, done.tail
    told = {words[0]: words[1:] for words in map(str.split, done.tail.splitlines())}
    assert int(told["/tmp"][0]) <= 24 and told["/tmp"][1] == str(errno.ENOSPC)
    assert int(told["/dev/shm"][0]) <= 24 and told["/dev/shm"][1] == str(errno.ENOSPC)
    assert told["/run"] == ["1", str(errno.ENOSPC)] or told["/run"][0] == "0"
    assert told["/dev"] == ["0", str(errno.EROFS)]


def test_bubblewrap_passes_exit_status_signals_and_loopback(confined: None, tmp_path: Path) -> None:
    assert run_bounded(["sh", "-c", "exit 7"], cwd=tmp_path, env=ENV, timeout_s=60).returncode == 7
    crash = python("import os; os.kill(os.getpid(), 11)")
    assert run_bounded(crash, cwd=tmp_path, env=ENV, timeout_s=60).returncode == -signal.SIGSEGV
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        code = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5); print('connected')"
        )
        assert run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=60).tail == "connected\n"


def test_bubblewrap_processes_can_be_frozen_and_none_survives(confined: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(python(FAMILY.format(then="time.sleep(120)")), cwd=tmp_path, env=ENV, log_path=log, limits=QUICK)
    pids_in(log)  # ids inside the namespace; the host's are asked for below
    family = child.processes()
    assert len(family) >= 5
    child.freeze()
    states = {process.status() for process in family}
    assert psutil.STATUS_STOPPED in states and states <= {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
    child.thaw()
    child.stop()
    assert all(eventually(lambda p=process: gone(p.pid)) for process in family)


def test_bubblewrap_and_kill_9_of_the_parent(confined: None, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(textwrap.dedent(FAMILY.format(then="time.sleep(120)")))
    parent = subprocess.Popen([*python(PARENT), str(tmp_path), "running"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    pids_in(tmp_path / "log")
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 6
    parent.kill()
    parent.communicate()
    assert all(eventually(lambda p=process: gone(p.pid)) for process in family)
