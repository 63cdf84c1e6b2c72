"""The loop end to end on a made-up engine with known delays: what must come out is known in advance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specpilot.contracts import AttemptState, Reason, StopReason
from specpilot.journal import Journal
from specpilot.loop.run import open_run, optimize, resume
from specpilot.loop.summary import report_data
from specpilot.memory import MemoryStore
from specpilot.paths import JOURNAL_NAME
from specpilot.workspace import Workspace
from tests.helpers.fake_server import Behaviour
from tests.specpilot.loop.setting import fake_setting, patch_between, remember

STOCK = Behaviour(round_s=0.012)
FASTER = replace(STOCK, round_s=0.006)
LOSSY = replace(STOCK, round_s=0.004, wrong_every=5)
SLOWER = replace(STOCK, token_s=0.004)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole run: a mechanism that halves the round, one that is fast but lossy, one that is slower."""
    folder = tmp_path_factory.mktemp("loop")
    deployment = fake_setting(folder, STOCK)
    memory = f"sqlite:///{folder / 'memory.sqlite'}"
    with MemoryStore(memory, seed_folder=None) as store:
        remember(store, "half-the-round", patch_between(STOCK, FASTER))
        remember(store, "lossy", patch_between(STOCK, LOSSY))
        remember(store, "slower", patch_between(STOCK, SLOWER))
        there_and_back = patch_between(STOCK, FASTER) + patch_between(FASTER, STOCK)
        remember(store, "nothing", there_and_back)
        remember(store, "uncounted", patch_between(STOCK, replace(STOCK, round_s=0.005)), counters=["nobody_has_it"])
        remember(store, "gone", patch_between(replace(STOCK, salt="x", round_s=3), replace(STOCK, salt="y", round_s=4)))
    outcome = optimize(deployment, folder / "run", plain=True, memory=memory)
    assert outcome.stop is StopReason.rounds_done
    assert outcome.exit_code == 0
    return folder / "run"


def test_each_candidate_meets_its_known_fate(ended: Path) -> None:
    journal = Journal.open(ended / JOURNAL_NAME)
    fate = {row.data["mechanism"]: (row.state, row.reason) for row in journal.attempts()}
    assert fate["half-the-round"] == (AttemptState.merged, None)
    assert fate["lossy"] == (AttemptState.rejected, Reason.token_mismatch)
    assert fate["slower"] == (AttemptState.rejected, Reason.no_gain)
    assert fate["nothing"] == (AttemptState.rejected, Reason.empty_diff)
    assert fate["gone"] == (AttemptState.rejected, Reason.does_not_apply)
    assert fate["uncounted"] == (AttemptState.rejected, Reason.not_engaged)
    (uncounted,) = [row for row in journal.attempts() if row.data["mechanism"] == "uncounted"]
    assert "no counter 'nobody_has_it'" in uncounted.detail
    timed = {event.data["attempt"] for event in journal.events(kind="comparison")}
    assert uncounted.id not in timed and len(timed) >= 3, "found in the warm-up, before a pair was spent on it"


def test_measured_gain_is_the_planted_one(ended: Path) -> None:
    """Rounds of 12 ms against 6 ms: twice as fast, give or take what this machine's other work makes of it."""
    with open_run(ended) as context:
        data = report_data(context)
    assert [step.mechanism for step in data.steps] == ["half-the-round"]
    assert data.steps[0].gain > 1.3
    total = data.ratio("final", "stock")
    assert total is not None and total.ratio > 1.3
    journal = Journal.open(ended / JOURNAL_NAME)
    (closing,) = journal.finished_keys(lambda key: key.startswith("final/") and key.count("/") == 1)
    assert journal.result(closing)["judged"]["final"].startswith("96 positions: 96 exact"), "4 answers of 24 tokens"
    journal.close()
    assert data.figure("stock") is not None and data.figure("final-ar") is not None
    assert data.calibration is not None
    assert data.calibration.baseline_note.startswith("ar: 144 of 144 positions exact"), "3 answers of 48 tokens"
    assert data.calibration.baseline_note in (ended / "report.html").read_text()
    accepted = data.figure("final")
    assert accepted is not None and accepted.accepted_length == pytest.approx(23 / 8, abs=0.15)


def test_no_file_foretells_the_prompts(ended: Path) -> None:
    """A candidate that read them all could answer the timed prompts before they are asked."""
    asked: list[set[str]] = []
    for _ in range(2):
        with open_run(ended) as context:
            asked.append({prompt.text for prompt in context.prompts("x/x-1").take("tuning", 8)})
            hidden = {path.name for path in context.secret_paths()}
    assert not asked[0] & asked[1]
    assert {"hidden.jsonl", "tuning.jsonl", "journal.db", "journal.db-wal", "journal.db-shm"} <= hidden


def test_memory_holds_what_was_found(ended: Path) -> None:
    with open_run(ended) as context:
        found = {item.mechanism.name: item for item in context.memory.mechanisms()}
        stats, told = context.memory.stats(), report_data(context).memory
    assert found["half-the-round"].status == "verified"
    assert found["half-the-round"].effects[0].ratio > 1.3
    assert found["slower"].effects[0].reason == "no-gain"
    assert found["lossy"].effects[0].reason == "token-mismatch"
    assert (stats.recalled, stats.tried, stats.accepted) == (6, 4, 1)
    assert (told.recalled, told.tried, told.accepted) == (6, 4, 1), "report and memory count alike"


def test_what_is_silent_for_long_is_said_as_it_begins(ended: Path) -> None:
    """Each line stands before the event that tells its result."""
    journal = Journal.open(ended / JOURNAL_NAME)
    events, [merged] = journal.events(), journal.attempts(state=AttemptState.merged)
    told = [f"{e.kind}: {': '.join(e.data[key] for key in ('attempt', 'text') if e.data.get(key))}" for e in events]

    def place(beginning: str) -> int:
        return next(position for position, line in enumerate(told) if line.startswith(beginning))

    for begins, ends in (
        ("doing: the plain engine answers 3 prompts", "calibration"),
        ("doing: the reference against itself", "calibration"),
        ("doing: starting ar, stock; then", "prompts"),
        (f"doing: {merged.id}: the gate's own prompts", f"verdict: {merged.id}"),
        (f"doing: {merged.id}: its tokens are forced", f"verdict: {merged.id}"),
    ):
        assert place(begins) < place(ends), begins
    assert place("doing: starting ar, stock, final, final-ar") < place("doing: the closing answers are forced")


def test_resuming_an_ended_run_repeats_nothing(ended: Path) -> None:
    journal = Journal.open(ended / JOURNAL_NAME)
    before = {row.key: row.starts for row in journal.steps()}
    news = [[event.data for event in journal.events(kind=kind)] for kind in ("calibration", "doing")]
    outcome = resume(ended, plain=True)
    journal = Journal.open(ended / JOURNAL_NAME)
    after = {row.key: row.starts for row in journal.steps()}
    assert outcome.exit_code == 0
    assert after == before
    assert [[event.data for event in journal.events(kind=kind)] for kind in ("calibration", "doing")] == news


def test_nothing_is_left_behind(ended: Path) -> None:
    assert list((ended / "worktrees").iterdir()) == []
    assert (ended / "report.html").stat().st_size > 10_000
    workspace = Workspace.open(ended)
    assert workspace.best() != workspace.first_commit
