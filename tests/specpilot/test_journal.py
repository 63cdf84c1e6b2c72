"""The journal: durable steps over `kill -9`, legal transitions, many writers, damaged files, a full disk."""

from __future__ import annotations

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specpilot.journal
import specpilot.journal_file
from specpilot.contracts import AttemptState, Check, Reason, Verdict
from specpilot.errors import DiskFullError, RunFolderError, RunLockedError
from specpilot.journal import LEGAL, IllegalTransition, Journal
from specpilot.run_lock import RunLock

S = AttemptState


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "run/journal.db", {"run": {"id": "r"}, "seed": 3})


def reopened(journal: Journal) -> Journal:
    journal.close()
    return Journal.open(journal.path)


def test_meta(journal: Journal) -> None:
    journal.set_meta("stop_reason", "rounds-done")
    again = reopened(journal)
    assert again.get_meta("run") == {"id": "r"} and again.get_meta("seed") == 3
    assert again.meta()["stop_reason"] == "rounds-done"
    assert again.get_meta("nothing", 5) == 5


def test_a_finished_step_never_runs_again(journal: Journal) -> None:
    calls: list[int] = []
    verdict = Verdict(passed=False, reason=Reason.no_gain, detail="d", checks=[Check(name="a", passed=True, detail="")])

    def work() -> Verdict:
        calls.append(1)
        return verdict

    assert journal.step("gate", work, model=Verdict) == verdict
    again = reopened(journal)
    assert again.step("gate", work, model=Verdict) == verdict
    assert calls == [1]
    assert again.finished("gate") and again.result("gate", Verdict) == verdict
    assert [(s.key, s.finished, s.starts) for s in again.steps()] == [("gate", True, 1)]


@pytest.mark.parametrize("value", [None, {"a": [1, 2.5, None, "x"]}, [], [1], "text", 0.1 + 0.2])
def test_plain_results_come_back_equal(journal: Journal, value: object) -> None:
    assert journal.step("s", lambda: value) == value == reopened(journal).step("s", lambda: "other")


def test_lists_of_records_infinities_and_optional_records(journal: Journal) -> None:
    checks = [Check(name=n, passed=True, detail="") for n in "ab"]
    assert journal.step("many", lambda: checks, model=Check) == checks
    assert journal.step("none", lambda: None, model=Check) is None
    wide = Verdict(passed=True, reason=None, detail="", checks=[], max_gap=float("inf"))
    assert journal.step("inf", lambda: wide, model=Verdict) == wide


@pytest.mark.parametrize("stored", ["text", {"passed": 1}])
def test_a_result_of_another_shape_is_said_so(journal: Journal, stored: object) -> None:
    journal.step("r1/gate", lambda: stored)
    with pytest.raises(RunFolderError, match="r1/gate"):
        reopened(journal).result("r1/gate", Verdict)


def test_a_step_that_raised_is_run_again(journal: Journal) -> None:
    with pytest.raises(ZeroDivisionError):
        journal.step("s", lambda: 1 / 0)
    assert not journal.finished("s")
    with pytest.raises(KeyError):
        journal.result("s")
    assert journal.step("s", lambda: 2) == 2
    assert journal.steps()[0].starts == 2


def test_a_result_that_is_no_json_leaves_the_step_unfinished(journal: Journal) -> None:
    with pytest.raises(TypeError, match="object"):
        journal.step("s", lambda: object())
    assert not journal.finished("s")


def test_the_same_step_from_two_threads_runs_once(journal: Journal) -> None:
    calls: list[int] = []
    gate = threading.Barrier(4)

    def caller() -> object:
        gate.wait()
        return journal.step("s", lambda: calls.append(1) or len(calls))

    with ThreadPoolExecutor(4) as pool:
        assert [f.result() for f in [pool.submit(caller) for _ in range(4)]] == [1, 1, 1, 1]
    assert calls == [1]


def test_different_steps_run_side_by_side(journal: Journal) -> None:
    meet = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(journal.step, name, lambda: bool(meet.wait() >= 0)) for name in "ab"]
        assert all(job.result() for job in jobs)


def interrupted_at(moment: int, work: Callable[[], object]) -> bool:
    """Runs `work` with a Ctrl-C at the n-th moment where Python looks for one in the journal; False if it has fewer.

    It looks as a function is entered and as a call comes back: where a profiler is called, and may raise.
    """
    ours = (specpilot.journal.__file__, specpilot.journal_file.__file__)
    seen = itertools.count()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "c_call" and frame.f_code.co_filename in ours and next(seen) == moment:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_ctrl_c_at_any_moment_of_a_write_leaves_the_journal_usable(journal: Journal) -> None:
    journal.set_meta("n", -1)
    with ThreadPoolExecutor(1) as pool:  # another thread: the lock must be free as well
        for n in itertools.count():
            was = journal.get_meta("n")
            whole = not interrupted_at(n, lambda n=n: journal.set_meta("n", n))
            assert pool.submit(journal.event, "after", {}).result(timeout=60)
            assert journal.get_meta("n") in ((n,) if whole else (was, n))
            if whole:
                break
    assert n > 10
    assert reopened(journal).get_meta("n") == n  # and every seal holds


WORK = """
    import os, signal, sys
    from pathlib import Path
    from specpilot.journal import Journal
    from specpilot.run_lock import RunLock
    folder, kill_at = Path(sys.argv[1]), sys.argv[2]
    def mark(name):
        with open(folder / "effects", "a") as f:
            f.write(name + "\\n")
        if kill_at == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"made": name}
    with RunLock(folder):
        path = folder / "journal.db"
        journal = Journal.open(path) if path.exists() else Journal.create(path, {})
        for name in ("one", "two", "three"):
            journal.step(name, lambda: mark(name))
            if kill_at == "after-" + name:
                os.kill(os.getpid(), signal.SIGKILL)
    print([journal.result(k)["made"] for k in ("one", "two", "three")])
"""


@pytest.mark.parametrize(
    ("kill_at", "effects"),
    [
        ("one", ["one", "one", "two", "three"]),
        ("after-one", ["one", "two", "three"]),
        ("after-three", ["one", "two", "three"]),
    ],
)
def test_kill_9_repeats_only_the_unfinished_step(tmp_path: Path, kill_at: str, effects: list[str]) -> None:
    def life(kill: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(WORK), str(tmp_path), kill]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert life(kill_at).returncode == -signal.SIGKILL
    second = life("never")
    assert second.stdout.strip() == "['one', 'two', 'three']", second.stderr
    assert (tmp_path / "effects").read_text().split() == effects


# -- attempts ------------------------------------------------------------------------------------------------

PATH = [S.working, S.submitted, S.measured, S.gated, S.accepted, S.merged]


def make(journal: Journal, name: str = "r1-a", upto: AttemptState = S.planned) -> None:
    journal.create_attempt(name, round=1, worker="recall", component="target.head")
    for state in PATH[: PATH.index(upto) + 1] if upto is not S.planned else []:
        journal.move_attempt(name, state)


def test_the_whole_way_of_an_attempt(journal: Journal) -> None:
    make(journal, upto=S.merged)
    row = journal.move_attempt("r1-a", S.superseded, detail="replaced")
    assert row.state is S.superseded and row.detail == "replaced"
    assert [state for state, _, _ in journal.attempt_history("r1-a")] == [S.planned, *PATH, S.superseded]


def test_only_legal_transitions(journal: Journal) -> None:
    order = [S.planned, *PATH]
    for number, (origin, goal) in enumerate(itertools.product(S, S)):
        name = f"a{number}"
        if origin in (S.rejected, S.superseded):
            make(journal, name)
            journal.move_attempt(name, origin, reason=Reason.crashed if origin is S.rejected else None)
        else:
            make(journal, name, upto=origin)
        forward = origin in order and goal in order and order.index(goal) == order.index(origin) + 1
        ends = goal in (S.rejected, S.superseded) and origin not in (S.rejected, S.superseded, S.merged)
        legal = forward or ends or origin is goal or (origin is S.merged and goal is S.superseded)
        reason = Reason.crashed if goal is S.rejected else None
        if legal:
            assert journal.move_attempt(name, goal, reason=reason).state is goal
        else:
            with pytest.raises(IllegalTransition, match=f"from {origin} to {goal}"):
                journal.move_attempt(name, goal, reason=reason)
            assert journal.attempt(name).state is origin


def test_rejection_needs_a_reason_and_keeps_the_first(journal: Journal) -> None:
    make(journal)
    with pytest.raises(IllegalTransition):
        journal.move_attempt("r1-a", S.rejected)
    with pytest.raises(IllegalTransition):
        journal.move_attempt("r1-a", S.working, reason=Reason.crashed)
    journal.move_attempt("r1-a", S.rejected, reason=Reason.token_mismatch, detail="position 7")
    with pytest.raises(IllegalTransition, match="already rejected for token-mismatch"):
        journal.move_attempt("r1-a", S.rejected, reason=Reason.no_gain)
    row = journal.attempt("r1-a")
    assert row.reason is Reason.token_mismatch and row.detail == "position 7"


def test_attempts_are_listed_in_order_and_data_is_merged(journal: Journal) -> None:
    for index in range(12):
        journal.create_attempt(f"a{index}", round=index % 2, worker="w", data={"n": index})
    assert [row.id for row in journal.attempts()] == [f"a{i}" for i in range(12)]
    assert [row.id for row in journal.attempts(round=1)] == [f"a{i}" for i in range(1, 12, 2)]
    assert journal.create_attempt("a3", round=9, worker="other").round == 1, "an attempt that exists stays"
    check = Check(name="x", passed=True, detail="")
    assert journal.move_attempt("a3", S.working, data={"check": check}).data == {"n": 3, "check": check.model_dump()}
    assert [row.id for row in journal.attempts(state=S.working)] == ["a3"]
    with pytest.raises(RunFolderError, match="no attempt 'zz'"):
        journal.attempt("zz")


def test_unknown_reasons_cannot_be_stored() -> None:
    with pytest.raises(ValueError):
        Reason("because")
    assert LEGAL.keys() == set(S)


# -- processes and events ------------------------------------------------------------------------------------


def test_processes(journal: Journal) -> None:
    journal.record_process(10, 10, 1.5, "server")
    journal.record_process(11, 11, 2.5, "build")
    journal.end_process(10, 99.0)  # another process of the same id: not ours
    assert [(p.pid, p.purpose) for p in journal.live_processes()] == [(10, "server"), (11, "build")]
    journal.end_process(10, 1.5)
    assert [(p.pid, p.pgid, p.start_time) for p in reopened(journal).live_processes()] == [(11, 11, 2.5)]


def test_events_are_append_only_and_readable_from_a_position(journal: Journal) -> None:
    first = journal.event("phase", {"name": "gate"})
    journal.event("note")
    journal.event("phase", {"path": journal.path})
    assert [e.kind for e in journal.events()] == ["phase", "note", "phase"]
    assert [e.kind for e in journal.events(after=first)] == ["note", "phase"]
    assert [e.data for e in journal.events(kind="phase")] == [{"name": "gate"}, {"path": str(journal.path)}]


# -- many writers ---------------------------------------------------------------------------------------------

WRITER = """
    import sys
    from pathlib import Path
    from specpilot.journal import Journal
    journal = Journal.open(Path(sys.argv[1]))
    for index in range(25):
        journal.event("work", {"writer": sys.argv[2], "index": index})
        journal.create_attempt(f"{sys.argv[2]}-{index}", round=1, worker=sys.argv[2])
"""


def test_many_processes_and_threads_write_without_database_is_locked(journal: Journal) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(journal.path)]
    others = [subprocess.Popen([*command, f"p{i}"], stderr=subprocess.PIPE, text=True) for i in range(3)]

    def thread(name: str) -> None:
        for index in range(25):
            journal.event("work", {"writer": name, "index": index})
            journal.step(f"{name}-{index}", lambda: None)

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(thread, f"t{i}") for i in range(8)]:
            job.result()
    for other in others:
        _, words = other.communicate(timeout=60)
        assert other.returncode == 0, words
    assert len(journal.events(kind="work")) == 25 * 11
    assert len(journal.attempts()) == 25 * 3
    positions = [row.id for row in journal.attempts()]
    assert len(set(positions)) == len(positions)


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4))
def test_any_json_survives(tmp_path_factory: pytest.TempPathFactory, value: dict[str, object]) -> None:
    journal = Journal.create(tmp_path_factory.mktemp("j") / "journal.db", {"v": value})
    assert journal.get_meta("v") == value and journal.step("s", lambda: value) == value
    journal.close()


# -- wrong files ----------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_overwritten(journal: Journal) -> None:
    with pytest.raises(RunFolderError, match="already holds a run"):
        Journal.create(journal.path, {})


def test_missing_damaged_foreign_and_newer_files(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(RunFolderError, match="not a run folder") as caught:
        Journal.open(tmp_path / "journal.db")
    assert caught.value.exit_code == 5
    (tmp_path / "text.db").write_text("this is no database, but long enough to be read as one" * 50)
    with pytest.raises(RunFolderError, match="damaged"):
        Journal.open(tmp_path / "text.db")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE x (y)")
    foreign.commit()
    foreign.close()
    with pytest.raises(RunFolderError, match="not a SpecPilot journal"):
        Journal.open(tmp_path / "foreign.db")
    journal._db.execute("PRAGMA user_version=99")
    journal.close()
    with pytest.raises(RunFolderError, match="schema 99"):
        Journal.open(journal.path)


def test_a_torn_file_is_refused(journal: Journal) -> None:
    for index in range(400):
        journal.event("filler", {"text": "x" * 200, "n": index})
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    journal.close()
    size = journal.path.stat().st_size
    with journal.path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(size - 8192 - 100))
    with pytest.raises(RunFolderError, match="damaged"):
        Journal.open(journal.path)


def test_a_full_disk_is_named_and_loses_nothing(journal: Journal) -> None:
    journal.event("before")
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages + 2}")  # SQLite's own way to run out of space
    with pytest.raises(DiskFullError, match="no space left") as caught:
        for _ in range(100):
            journal.event("filler", {"text": "x" * 4000})
    assert caught.value.exit_code == 3 and "resume" in caught.value.hint
    journal._db.execute("PRAGMA max_page_count=1000000")
    journal.event("after")
    kinds = [event.kind for event in reopened(journal).events()]
    assert kinds[0] == "before" and kinds[-1] == "after"


# -- the run lock ---------------------------------------------------------------------------------------------


def test_a_second_holder_is_refused_by_name(tmp_path: Path) -> None:
    assert RunLock.holder(tmp_path) is None
    with RunLock(tmp_path):
        assert f"process {os.getpid()}" in (RunLock.holder(tmp_path) or "")
        with pytest.raises(RunLockedError, match=f"process {os.getpid()}") as caught:
            RunLock(tmp_path).acquire()
        assert caught.value.exit_code == 5
    assert RunLock.holder(tmp_path) is None
    RunLock(tmp_path).acquire().release()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from specpilot.run_lock import RunLock\nlock = RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(RunLockedError, match=str(holder.pid)):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    RunLock(tmp_path).acquire().release()


def test_numbered_attempts_are_nobody_elses(tmp_path: Path) -> None:
    """Sixteen at once from two connections: sixteen numbers, none left out."""
    path = tmp_path / "journal.db"
    first = Journal.create(path, {})
    second = Journal.open(path)
    first.create_attempt("r1-recall-1", round=1, worker="recall")
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(lambda k: (first, second)[k % 2].create_numbered_attempt("x", worker="external").id, range(16))
        )
    assert sorted(made) == sorted(f"x-{k}" for k in range(1, 17))
    first.close()
    second.close()
