"""Ends of a run other than success: each has its stop reason, its exit code, and keeps what was paid for."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from specpilot.cli.status import state_of
from specpilot.contracts import AttemptState, StopReason
from specpilot.deployment import Budget
from specpilot.errors import DigestError, InfrastructureError, RunFolderError, RunLockedError, UsageError
from specpilot.journal import Journal
from specpilot.loop import budget
from specpilot.loop.run import optimize, resume
from specpilot.memory import MemoryStore
from specpilot.paths import JOURNAL_NAME
from specpilot.run_lock import RunLock
from tests.helpers.command_line import specpilot
from tests.helpers.fake_server import Behaviour
from tests.helpers.killing import COMMAND
from tests.specpilot.loop.setting import fake_setting, patch_between, remember

STOCK = Behaviour(round_s=0.006)


def stop_reason(run: Path) -> str:
    journal = Journal.open(run / JOURNAL_NAME)
    try:
        return str(journal.meta()["stop_reason"])
    finally:
        journal.close()


def test_wall_clock_ends_a_run_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs out before the first candidate: it is not measured, the closing session still is, exit code 0.

    Three requests at a time: every session takes whole batches of them.
    """
    deployment = fake_setting(tmp_path, STOCK)
    load = deployment.regime.model_copy(update={"concurrency": 3})
    folder, deployment = deployment.folder, deployment.model_copy(update={"regime": load})
    deployment._folder = folder
    memory = f"sqlite:///{tmp_path / 'memory.sqlite'}"
    with MemoryStore(memory, seed_folder=None) as store:
        remember(store, "faster", patch_between(STOCK, replace(STOCK, round_s=0.0015)))
    monkeypatch.setattr(budget, "CLOSING_RESERVE_S", 10_000.0)
    outcome = optimize(deployment, tmp_path / "run", plain=True, memory=memory)
    assert outcome.stop is StopReason.budget_wall_clock
    assert outcome.exit_code == 0
    assert set(outcome.final["variants"]) == {"ar", "stock", "final", "final-ar"}
    assert outcome.final["prompts"] == 6, "two batches of three at least"
    assert outcome.final["prompt_sets"] == ["closing"], "the figures are for prompts that no worker has seen"
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    assert [row.state for row in journal.attempts()] == [AttemptState.superseded]
    assert stop_reason(tmp_path / "run") == "budget-wall-clock"


def test_a_spent_run_can_be_given_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the clock left unmeasured is proposed again; a third resume knows the new limits and repeats nothing."""
    deployment = fake_setting(tmp_path, STOCK)
    memory = f"sqlite:///{tmp_path / 'memory.sqlite'}"
    with MemoryStore(memory, seed_folder=None) as store:
        remember(store, "faster", patch_between(STOCK, replace(STOCK, round_s=0.0015)))
    with monkeypatch.context() as spent:
        spent.setattr(budget, "CLOSING_RESERVE_S", 10_000.0)
        assert optimize(deployment, tmp_path / "run", plain=True, memory=memory).stop is StopReason.budget_wall_clock
        assert resume(tmp_path / "run", plain=True).stop is StopReason.budget_wall_clock, (
            "without more there is no more"
        )
    assert resume(tmp_path / "run", plain=True, minutes=5).stop is StopReason.rounds_done
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    assert [row.state for row in journal.attempts()] == [AttemptState.superseded, AttemptState.merged]
    starts = {row.key: row.starts for row in journal.steps()}
    journal.close()
    assert resume(tmp_path / "run", plain=True).exit_code == 0
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    assert {row.key: row.starts for row in journal.steps()} == starts
    assert journal.get_meta(budget.EXTENDED) == {"wall_clock_minutes": 15.0, "rounds": 2}


@pytest.mark.parametrize(
    ("used_s", "minutes", "rounds", "limits"),
    [
        (300.0, 5.0, None, {"wall_clock_minutes": 20.0}),
        (1080.0, 5.0, None, {"wall_clock_minutes": 23.0}),
        (0.0, None, 2, {"rounds": 5}),
        (0.0, 1.0, 1, {"wall_clock_minutes": 16.0, "rounds": 4}),
    ],
)
def test_an_extension_counts_from_the_limit_or_from_now(
    tmp_path: Path, used_s: float, minutes: float | None, rounds: int | None, limits: dict[str, float]
) -> None:
    journal = Journal.create(tmp_path / "journal.db", {"elapsed_s": used_s, "stop_reason": "rounds-done"})
    own = Budget(rounds=3, wall_clock_minutes=15.0)
    extended = budget.extend(own, journal, minutes, rounds)
    assert journal.get_meta(budget.EXTENDED) == limits and journal.get_meta("stop_reason") is None
    assert extended == budget.in_force(own, journal) == own.model_copy(update=limits)
    twice = budget.extend(own, journal, None, 1)
    assert twice.rounds == extended.rounds + 1 and twice.wall_clock_minutes == extended.wall_clock_minutes


def test_a_cut_last_round_gets_another(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal.db", {})
    journal.step("r3/result", lambda: {"stop": "budget-wall-clock"})
    assert budget.extend(Budget(rounds=3, wall_clock_minutes=15.0), journal, 5.0, None).rounds == 4


@pytest.mark.parametrize(
    ("minutes", "rounds"), [(0.0, None), (-3.0, None), (float("nan"), None), (None, 0), (None, -1)]
)
def test_what_is_no_extension_is_refused(tmp_path: Path, minutes: float | None, rounds: int | None) -> None:
    journal = Journal.create(tmp_path / "journal.db", {"stop_reason": "rounds-done"})
    with pytest.raises(UsageError, match="no extension"):
        budget.extend(Budget(), journal, minutes, rounds)
    journal.set_meta("elapsed_s", 1000.0)
    with pytest.raises(UsageError, match="too little: .* about 3.8"):
        budget.extend(Budget(), journal, 3.0, None)
    with pytest.raises(UsageError, match="no wall-clock limit"):
        budget.extend(Budget(wall_clock_minutes=None), journal, 5.0, None)
    assert journal.get_meta("stop_reason") == "rounds-done" and journal.get_meta(budget.EXTENDED) is None


def test_infrastructure_failure_is_said_so(tmp_path: Path) -> None:
    """A stock engine that dies is nobody's score: the run stops, names it, and can be resumed."""
    deployment = fake_setting(tmp_path, replace(STOCK, die_after_requests=1))
    with pytest.raises(InfrastructureError):
        optimize(deployment, tmp_path / "run", plain=True, memory=f"sqlite:///{tmp_path / 'm.sqlite'}")
    assert stop_reason(tmp_path / "run") == "infrastructure"
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    tries = [event.data["text"] for event in journal.events(kind="note") if "(try " in event.data["text"]]
    journal.close()
    assert [text[-7:] for text in tries] == ["(try 1)", "(try 2)", "(try 3)"]
    done = specpilot("resume", str(tmp_path / "run"), "--plain")
    assert done.returncode == 9 and "Traceback" not in done.stderr


def test_changed_weights_end_a_resume(tmp_path: Path) -> None:
    deployment = fake_setting(tmp_path, replace(STOCK, die_after_requests=1))
    with pytest.raises(InfrastructureError):
        optimize(deployment, tmp_path / "run", plain=True, memory=f"sqlite:///{tmp_path / 'm.sqlite'}")
    (deployment.folder / "drafter" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(DigestError, match="drafter's weights changed"):
        resume(tmp_path / "run", plain=True)


def test_second_run_on_the_same_folder(tmp_path: Path) -> None:
    deployment = fake_setting(tmp_path, STOCK)
    run = tmp_path / "run"
    with RunLock(run), pytest.raises(RunLockedError, match="in use by process"):
        optimize(deployment, run, plain=True)
    (run / JOURNAL_NAME).write_bytes(b"")
    with pytest.raises(RunFolderError, match="already holds a run"):
        optimize(deployment, run, plain=True)


def test_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    deployment = fake_setting(tmp_path, STOCK)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("do not lose me")
    with pytest.raises(RunFolderError, match="not an empty folder"):
        optimize(deployment, tmp_path / "run", plain=True)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "do not lose me"


def test_resume_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        resume(tmp_path, plain=True)


def test_undeclared_tunable(tmp_path: Path) -> None:
    from specpilot.loop.prepare import starting_tunables

    deployment = fake_setting(tmp_path, STOCK)
    engine = deployment.engine.model_copy(update={"tunables": {"nonsense": 1}})
    changed = deployment.model_copy(update={"engine": engine})
    with pytest.raises(UsageError, match="nonsense"):
        starting_tunables(deployment.engine_tree(), changed)


def test_interrupt_says_what_happened_and_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C in the middle, not on a terminal: the log's last line says so, the exit code is 130, resume goes on."""
    deployment = fake_setting(tmp_path, STOCK)
    words = ["optimize", "-d", str(deployment.folder), "--run-dir", str(tmp_path / "run"), "--plain", "--rounds", "0"]
    child = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if "gate: calibration" in line:
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    last = out.splitlines()[-1]
    assert last.endswith(
        f"ended before its end: interrupted; finished steps are kept, go on with: specpilot resume {tmp_path / 'run'}"
    )
    assert stop_reason(tmp_path / "run") == "interrupted"
    assert resume(tmp_path / "run", plain=True).exit_code == 0


def test_killed_in_its_closing_session_a_run_is_interrupted_not_ended(tmp_path: Path) -> None:
    deployment = fake_setting(tmp_path, STOCK)
    words = ["optimize", "-d", str(deployment.folder), "--run-dir", str(tmp_path / "run"), "--plain", "--rounds", "1"]
    child = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert any("closing: ar, stock" in line for line in child.stdout)
    child.kill()
    child.communicate(timeout=60)
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    assert state_of(tmp_path / "run", journal).startswith("interrupted")
    journal.close()
    assert resume(tmp_path / "run", plain=True).stop is StopReason.rounds_done
    assert stop_reason(tmp_path / "run") == "rounds-done"
