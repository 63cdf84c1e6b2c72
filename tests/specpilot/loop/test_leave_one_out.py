"""Leave one out on the made-up engine: what helps, what no longer shows, what hurts, what cannot be taken out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specpilot.contracts import AttemptState, Candidate, Claim, StopReason
from specpilot.deployment import Deployment
from specpilot.export.source import RunSource
from specpilot.journal import Journal
from specpilot.loop import leave_one_out as module
from specpilot.loop.attempts import advance
from specpilot.loop.records import LeftOut, Merged, Without
from specpilot.loop.run import open_run, optimize, resume
from specpilot.loop.summary import report_data
from specpilot.memory import MemoryStore
from specpilot.paths import JOURNAL_NAME
from specpilot.workspace import Workspace
from tests.helpers.fake_server import Behaviour
from tests.specpilot.loop.setting import fake_setting, patch_between, remember

STOCK = Behaviour(round_s=0.008, token_s=0.003)
"""Two independent delays, far apart in the file, so that each mechanism takes one away and both merge."""


def setting(folder: Path) -> tuple[Deployment, str]:
    """A deployment, and a memory with one mechanism per delay."""
    memory = f"sqlite:///{folder / 'memory.sqlite'}"
    with MemoryStore(memory, seed_folder=None) as store:
        remember(store, "rounds", patch_between(STOCK, replace(STOCK, round_s=0.002)))
        remember(store, "tokens", patch_between(STOCK, replace(STOCK, token_s=0.0)))
    return fake_setting(folder, STOCK), memory


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    deployment, memory = setting(folder)
    assert optimize(deployment, folder / "run", plain=True, memory=memory).stop is StopReason.rounds_done
    return folder / "run"


def starts(run: Path) -> dict[str, int]:
    journal = Journal.open(run / JOURNAL_NAME)
    try:
        return {row.key: row.starts for row in journal.steps()}
    finally:
        journal.close()


def results(run: Path) -> dict[str, LeftOut]:
    """Name to result, of everything that was left out once."""
    journal = Journal.open(run / JOURNAL_NAME)
    try:
        keys = [r.key for r in journal.steps() if r.finished and r.key.startswith("without/") and r.key.count("/") == 2]
        found = [journal.result(key, LeftOut) for key in keys]
        return {item.name: item for item in found}
    finally:
        journal.close()


def test_both_mechanisms_still_help(ended: Path) -> None:
    told = results(ended)
    assert set(told) == {"rounds", "tokens"}
    for item in told.values():
        assert item.outcome is Without.still_helps and item.commit is None
        assert item.gain is not None and item.low is not None and 1.0 < item.low < item.gain
    with open_run(ended) as context:
        data = report_data(context)
    assert sorted(item.words[:30] for item in data.left_out) == ["still helps", "still helps (laid on last: as "]
    assert "Each merged change re-tested" in (ended / "report.html").read_text()


def test_what_was_laid_on_last_is_not_measured_twice(ended: Path) -> None:
    """The engine without it is the very one that it was measured against."""
    with open_run(ended) as context:
        *before, last = module.standing(context)
        assert last.after == context.trees.best()
    told = {item.attempt_id: item for item in results(ended).values()}
    again = told[last.attempt_id]
    assert (again.gain, again.low, again.high) == (last.gain, last.low, last.high) and "laid on last" in again.detail
    assert [item.attempt_id for item in before if told[item.attempt_id].detail == ""] == [before[0].attempt_id]
    assert [key for key in starts(ended) if key.startswith("without/") and key.endswith("/assess")] == [
        f"without/{last.after[:12]}/{before[0].attempt_id}/assess"
    ]


def test_resuming_tests_nothing_again(ended: Path) -> None:
    before = starts(ended)
    assert resume(ended, plain=True).exit_code == 0
    assert starts(ended) == before


def test_without_time_it_says_what_was_not_tested(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECTED_S", 1e9)
    with open_run(ended) as context:
        head, plan = context.trees.best(), context.journal.get_meta(module.PLAN)
        first, last = module.standing(context)
        name = module.name_of(context, first.attempt_id)
        key = f"without/{head[:12]}/{first.attempt_id}"
        finished = context.journal.finished
        monkeypatch.setattr(context.journal, "finished", lambda asked: asked != key and finished(asked))
        for _ in range(2):
            assert module.leave_one_out(context, head) == head
        notes = [e.data["text"] for e in context.journal.events(kind="note") if "no time to re-test" in e.data["text"]]
        assert notes == [f"the wall clock left no time to re-test by leaving it out: {name}"], "said once"
        (untold,) = [item for item in report_data(context).left_out if item.detail == module.NO_TIME]
        assert (untold.name, untold.words) == (name, "not told (not measured: no time left)")
        assert module.expected_s(context) == 2e9, "a further change on top makes both of them owed"
        monkeypatch.undo()
        assert module.leave_one_out(context, head) == head
        assert context.journal.get_meta(module.PLAN) == plan | {"missed": []}, "with time again nothing is missed"
        assert module.missed(context) == [] and last.after == head


def test_what_others_require_is_not_even_started(ended: Path) -> None:
    with open_run(ended) as context:
        stored = context.memory.get("tokens").mechanism
        context.memory.add(stored.model_copy(update={"requires": ["rounds"]}), origin="test")
        assert module.needed_by(context, "rounds") == ["tokens"] and module.needed_by(context, "tokens") == []
        step = next(item for item in module.standing(context) if module.name_of(context, item.attempt_id) == "rounds")
        told = module._for_free(context, step, context.trees.best())
        assert told is not None and told.outcome is Without.not_told and told.detail == "tokens cannot do without it"
        assert not context.journal.finished("without/x/rounds/assess")


def test_what_hurts_is_taken_out_and_the_parts_still_make_the_whole(tmp_path: Path) -> None:
    """A burden is merged by hand behind two honest mechanisms, and something else on top; the run must find it, gate the
    rest and go on with that.

    It changed the very line of the first of them, which therefore does not come out while the burden is there.
    """
    deployment, memory = setting(tmp_path)
    run = tmp_path / "run"
    quiet = deployment.model_copy(
        update={"measurement": deployment.measurement.model_copy(update={"leave_one_out": False})}
    )
    quiet._folder = deployment.folder
    assert optimize(quiet, run, plain=True, memory=memory).exit_code == 0
    assert results(run) == {}
    burden = _merge_by_hand(run, "x-1", "burden", {"round_s": 0.008})
    later = _merge_by_hand(run, "x-2", "later", {"prefill_s": 0.0015})
    journal = Journal.open(run / JOURNAL_NAME)
    journal.set_meta("deployment", deployment.to_yaml())
    journal.set_meta("elapsed_s", 0.0)
    journal.close()
    assert resume(run, plain=True).exit_code == 0
    told = results(run)
    assert told["burden"].outcome is Without.hurts and told["burden"].commit is not None
    assert told["burden"].gain is not None and told["burden"].gain < 0.8
    assert told["tokens"].outcome is Without.still_helps
    assert told["rounds"].outcome is Without.not_told and "does not come out" in told["rounds"].detail
    workspace = Workspace.open(run)
    assert workspace.best() == told["burden"].commit
    left, before = (json.loads(workspace.read(c, "behaviour.json")) for c in (workspace.best(), burden.before))
    assert left == before | {"prefill_s": 0.0015} and later.before == burden.after
    assert told["later"].head == workspace.best(), "the engine without it is another one by now: measured after all"
    journal = Journal.open(run / JOURNAL_NAME)
    states = {row.id: row.state for row in journal.attempts()}
    journal.close()
    assert states["x-1"] is AttemptState.superseded and states["without-x-1"] is AttemptState.merged
    with RunSource.open(run) as source:
        assert [step.name for step in source.merged][-3:] == ["burden", "later", "without-x-1"]
    before = starts(run)
    assert resume(run, plain=True).exit_code == 0
    assert starts(run) == before


def _merge_by_hand(run: Path, attempt: str, name: str, changes: dict[str, float]) -> Merged:
    """A merge record of any change; of one that makes every round slower: what a gain of the past looks like when it has turned."""
    with open_run(run) as context:
        head = context.trees.best()
        worktree = context.trees.checkout(attempt, head)
        told = json.loads((worktree / "behaviour.json").read_text())
        slower = json.dumps(told | changes, indent=1, sort_keys=True)
        (worktree / "behaviour.json").write_text(f"{slower}\n")
        commit = context.trees.commit_all(attempt, name)
        candidate = Candidate(attempt_id=attempt, worker="external", base_commit=head, commit=commit, branch=f"specpilot/{attempt}",
                              claim=Claim(component="host", hypothesis="It was good once."))  # fmt: skip
        data = {"candidate": candidate.model_dump(mode="json"), "remember": {"name": name}}
        context.journal.create_attempt(attempt, round=0, worker="external", component="host", data=data)
        advance(context, attempt, AttemptState.accepted)
        merged = Merged(attempt_id=attempt, before=head, after=commit, merged=True, reason=None, detail="by hand",
                        gain=1.05, low=1.01, high=1.1)  # fmt: skip
        context.journal.step(f"x/{attempt}/merge", lambda: merged, model=Merged)
        advance(context, attempt, AttemptState.merged)
        context.trees.set_head(commit)
        context.trees.prune_unknown(set())
    return merged
