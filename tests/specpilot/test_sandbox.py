"""Untrusted processes: nothing survives, nothing leaks, everything is bounded. Real processes, no mocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specpilot import bubblewrap, sandbox, sandbox_guard
from specpilot.errors import EnvironmentProblem, UsageError
from specpilot.sandbox import MIB, Limits, kill_leftovers, run_bounded, scrub_environment, spawn, tail_of
from tests.helpers.commands import ENV, FAMILY, PARENT, QUICK, eventually, gone, pids_in, python

HANG_S = 60.0
"""Seconds after which something counts as hanging: half of what the commands here would sleep, far above every limit set."""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests look at the processes themselves, so bubblewrap is off; test_sandbox_confined.py turns it on."""
    monkeypatch.setenv("SPECPILOT_BWRAP", "0")
    bubblewrap.bubblewrap.cache_clear()
    yield
    bubblewrap.bubblewrap.cache_clear()


def test_output_and_exit_status(tmp_path: Path) -> None:
    done = run_bounded(
        python("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)"),
        cwd=tmp_path,
        env=ENV,
        timeout_s=HANG_S,
    )
    assert done.returncode == 7 and done.killed_for is None
    assert done.tail.splitlines() == ["out", "err"]
    done = run_bounded(python("import os; os.kill(os.getpid(), 11)"), cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    assert done.returncode == -signal.SIGSEGV


def test_standard_input_is_empty(tmp_path: Path) -> None:
    done = run_bounded(python("import sys; print(repr(sys.stdin.read()))"), cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    assert done.tail == "''\n"


def test_deadline_counts_from_spawn_and_ends_the_whole_tree(tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = time.monotonic()
    child = spawn(
        python(FAMILY.format(then="time.sleep(120)")),
        cwd=tmp_path,
        env=ENV,
        log_path=log,
        limits=Limits(deadline_s=8.0, grace_s=0.3),
    )
    pids = pids_in(log)
    assert not any(gone(pid) for pid in [child.pid, *pids])
    time.sleep(1.0)  # collecting late must not lengthen the limit
    assert child.wait(HANG_S) is not None
    assert time.monotonic() - started < HANG_S
    assert child.killed_for == "time"
    assert all(eventually(lambda p=pid: gone(p)) for pid in [child.pid, *pids])


def test_a_command_that_ignores_term_is_killed(tmp_path: Path) -> None:
    shell = ["sh", "-c", "trap '' TERM; echo up; sleep 120"]  # up at once, however busy the machine
    done = run_bounded(shell, cwd=tmp_path, env=ENV, timeout_s=3.0, limits=QUICK)
    assert done.tail == "up\n", "killed before it could refuse"
    assert done.killed_for == "time" and done.returncode == -signal.SIGKILL and done.seconds < HANG_S


def test_grandchildren_do_not_outlive_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(python(FAMILY.format(then="time.sleep(0.3)")), cwd=tmp_path, env=ENV, log_path=log, limits=QUICK)
    pids = pids_in(log)
    assert child.wait(HANG_S) == 0
    assert all(eventually(lambda p=pid: gone(p)) for pid in pids)


def test_stop_is_bounded_and_idempotent_even_when_frozen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(python(FAMILY.format(then="time.sleep(120)")), cwd=tmp_path, env=ENV, log_path=log, limits=QUICK)
    pids = pids_in(log)
    child.freeze()
    assert all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in [child.pid, *pids])
    started = time.monotonic()
    assert child.stop() == -signal.SIGTERM
    assert time.monotonic() - started < HANG_S
    assert child.stop() == -signal.SIGTERM
    assert all(eventually(lambda p=pid: gone(p)) for pid in [child.pid, *pids])


def test_freeze_stops_the_clock_and_thaw_starts_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(
        python("import time\nwhile True: print('.', flush=True); time.sleep(0.01)"),
        cwd=tmp_path,
        env=ENV,
        log_path=log,
        limits=QUICK,
    )
    try:
        assert eventually(lambda: log.exists() and log.stat().st_size > 2)
        child.freeze()
        time.sleep(0.2)
        before = log.stat().st_size
        time.sleep(0.3)
        assert log.stat().st_size == before
        assert child.poll() is None
        child.thaw()
        assert eventually(lambda: log.stat().st_size > before)
    finally:
        child.stop(0.0)


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_killing_the_parent_with_kill_9_leaves_no_process(tmp_path: Path, state: str) -> None:
    (tmp_path / "family.py").write_text(textwrap.dedent(FAMILY.format(then="time.sleep(120)")))
    parent = subprocess.Popen([*python(PARENT), str(tmp_path), state], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    leader = int(parent.stdout.readline())
    pids = [leader, *pids_in(tmp_path / "log")]
    guards = psutil.Process(parent.pid).children()
    parent.kill()
    parent.communicate()
    assert all(eventually(lambda p=pid: gone(p)) for pid in pids)
    assert all(eventually(lambda g=guard: not g.is_running() or g.status() == psutil.STATUS_ZOMBIE) for guard in guards)


def test_killing_the_guard_kills_the_command(tmp_path: Path) -> None:
    child = spawn(
        python("import time; time.sleep(120)"), cwd=tmp_path, env=ENV, log_path=tmp_path / "log", limits=QUICK
    )
    child._guard.kill()
    assert eventually(lambda: gone(child.pid))
    assert child.wait(HANG_S) == -signal.SIGKILL


def test_output_flood_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(
        python("while True: print('x' * 1000)"),
        cwd=tmp_path,
        env=ENV,
        log_path=log,
        limits=Limits(output_bytes=MIB, grace_s=0.3),
    )
    assert child.wait(HANG_S) is not None
    assert child.killed_for == "output"
    assert log.stat().st_size == MIB


def test_memory_of_the_whole_group_is_bounded(tmp_path: Path) -> None:
    hog = """
        import subprocess, sys, time
        eat = "x = bytearray(80 << 20); import time; time.sleep(120)"
        family = [subprocess.Popen([sys.executable, "-c", eat]) for _ in range(3)]
        time.sleep(120)
    """
    done = run_bounded(
        python(hog), cwd=tmp_path, env=ENV, timeout_s=HANG_S, limits=Limits(memory_bytes=200 * MIB, grace_s=0.3)
    )
    assert done.killed_for == "memory" and done.seconds < HANG_S


def test_a_file_cannot_grow_without_bound(tmp_path: Path) -> None:
    code = "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 16))"
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=HANG_S, limits=Limits(file_bytes=MIB))
    assert done.returncode != 0
    assert (tmp_path / "big").stat().st_size <= MIB


def test_the_folders_it_may_write_cannot_grow_without_bound(tmp_path: Path) -> None:
    """Many files, each small enough: a full disk would end the run, and again after every resume."""
    code = """
        import time
        for number in range(40):
            with open(f"hoard/{number}", "wb") as file:
                file.write(bytes(1 << 20))
        time.sleep(120)
    """
    folder = tmp_path / "hoard"
    folder.mkdir()
    limits = Limits(disk_bytes=8 * MIB, grace_s=0.3)
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=HANG_S, limits=limits, writable=[folder])
    assert done.killed_for == "disk" and done.seconds < HANG_S
    room = Limits(disk_bytes=80 * MIB, deadline_s=HANG_S)
    child = spawn(["sleep", "4"], cwd=tmp_path, env=ENV, log_path=tmp_path / "log", limits=room, writable=[folder])  # fmt: skip
    assert child.wait(HANG_S) == 0 and child.killed_for is None


def test_bytes_on_disk_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    assert sandbox_guard.disk_bytes([str(folder), str(tmp_path / "gone")]) < 1 << 16
    (folder / "deep" / "file").write_bytes(bytes(3 * MIB))
    (folder / "link").symlink_to("/")
    assert 3 * MIB <= sandbox_guard.disk_bytes([str(folder)]) < 3 * MIB + (1 << 16)
    with (folder / "holes").open("wb") as file:
        file.truncate(1 << 40)
    assert sandbox_guard.disk_bytes([str(folder)]) < 4 * MIB, "only what is on the disk"
    monkeypatch.setattr(sandbox_guard, "MOST_FILES", 3)
    assert sandbox_guard.disk_bytes([str(folder)]) == float("inf")


def test_files_below_a_path_too_long_to_look_at_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(25):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    assert sandbox_guard.disk_bytes([str(tmp_path)]) == float("inf")


def test_a_tail_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\x1b[2Jone\ttwo\r\n\x07\xc2\x9bthree \xe2\x9c\x93\n")
    assert tail_of(log) == "\ufffd[2Jone\ttwo\r\n\ufffd\ufffdthree \u2713\n"


def test_no_core_files_and_no_new_privileges(tmp_path: Path) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)); print([l for l in open('/proc/self/status') if 'NoNewPrivs' in l])"
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    assert done.tail.startswith("(0, 0)")
    if sys.platform == "linux":
        assert "NoNewPrivs:\\t1" in done.tail


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "HF_TOKEN",
        "GITHUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "my_api_key",
        "NPM_AUTH_TOKEN",
        "AWS_ACCESS_KEY_ID",
    ],
)
def test_secrets_do_not_reach_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv(name, "sk-very-secret")
    assert name not in scrub_environment({})
    with pytest.raises(UsageError, match=name):
        scrub_environment({name: "x"})
    with pytest.raises(UsageError, match=name):
        spawn(["true"], cwd=tmp_path, env={**ENV, name: "x"}, log_path=tmp_path / "log")


def test_the_childs_environment_is_what_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    env = scrub_environment({"OMP_NUM_THREADS": "2"})
    done = run_bounded(["env"], cwd=tmp_path, env=env, timeout_s=HANG_S)
    names = {line.partition("=")[0] for line in done.tail.splitlines()}
    assert "OMP_NUM_THREADS" in names and "PATH" in names
    assert names <= set(env) | {"PWD", "_", "SHLVL", "LC_CTYPE"}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS_PER_STEP", "AUTHOR", "PASSIVE"])
def test_harmless_names_are_not_taken_for_secrets(name: str) -> None:
    allowed = name != "MAX_TOKENS_PER_STEP"  # says TOKENS: refused rather than guessed
    assert sandbox.is_secret_name(name) is not allowed


def test_the_recorder_is_told_before_the_command_runs(tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []

    def recorder(pid: int, pgid: int, start_time: float) -> None:
        time.sleep(0.3)
        assert not (tmp_path / "ran").exists()
        seen.append((pid, pgid, start_time))

    child = spawn(["touch", "ran"], cwd=tmp_path, env=ENV, log_path=tmp_path / "log", recorder=recorder)
    assert child.wait(HANG_S) == 0
    assert (tmp_path / "ran").exists()
    assert seen == [(child.pid, child.pgid, child.start_time)]


def test_a_failing_recorder_means_the_command_never_ran(tmp_path: Path) -> None:
    def recorder(pid: int, pgid: int, start_time: float) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        spawn(["touch", "ran"], cwd=tmp_path, env=ENV, log_path=tmp_path / "log", recorder=recorder, limits=QUICK)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no such program"):
        spawn(["no-such-program-here"], cwd=tmp_path, env=ENV, log_path=tmp_path / "log")
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        spawn(["true"], cwd=tmp_path / "none", env=ENV, log_path=tmp_path / "log")


def test_kill_leftovers_kills_the_recorded_group_and_spares_strangers(tmp_path: Path) -> None:
    mine = subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100"], start_new_session=True)
    stranger = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        begun = psutil.Process(mine.pid).create_time()
        eventually(lambda: len(psutil.Process(mine.pid).children()) >= 2)
        below = psutil.Process(mine.pid).children()
        wrong_time = psutil.Process(stranger.pid).create_time() - 5
        recorded = [(mine.pid, mine.pid, begun), (stranger.pid, stranger.pid, wrong_time), (2**22 - 7, 2**22 - 7, 0.0)]
        assert kill_leftovers(recorded) == [mine.pid]
        mine.wait(5)
        assert all(eventually(lambda p=p: gone(p.pid)) for p in below)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_no_file_descriptors_leak(tmp_path: Path) -> None:
    run_bounded(["true"], cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run_bounded(["true"], cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_command_gets_none_of_the_guards_pipes(tmp_path: Path) -> None:
    """Garbage on the status pipe ended the whole run; orders on the control pipe could be taken away."""
    code = """
        import os
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'garbage')
                print("wrote to", descriptor, flush=True)
            except OSError:
                pass
        print("open:", [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")])
    """
    done = run_bounded(python(code), cwd=tmp_path, env=ENV, timeout_s=HANG_S)
    assert (done.returncode, done.killed_for) == (0, None)
    assert done.tail.strip() == "open: ['0', '1', '2']"
