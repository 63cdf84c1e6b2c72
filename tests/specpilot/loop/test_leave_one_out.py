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
    assert [item.words for item in data.left_out] == ["still helps", "still helps"]
    assert "Each merged change re-tested" in (ended / "report.html").read_text()


def test_resuming_tests_nothing_again(ended: Path) -> None:
    before = starts(ended)
    assert resume(ended, plain=True).exit_code == 0
    assert starts(ended) == before


def test_what_others_require_is_not_even_started(ended: Path) -> None:
    with open_run(ended) as context:
        stored = context.memory.get("tokens").mechanism
        context.memory.add(stored.model_copy(update={"requires": ["rounds"]}), origin="test")
        assert module.needed_by(context, "rounds") == ["tokens"] and module.needed_by(context, "tokens") == []
        step = next(item for item in module.standing(context) if module.name_of(context, item.attempt_id) == "rounds")
        told = module._without(context, "without/x/rounds", step, context.trees.best())
        assert told.outcome is Without.not_told and told.detail == "tokens cannot do without it"
        assert not context.journal.finished("without/x/rounds/assess")


def test_without_time_it_says_what_was_not_tested(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPECTED_S", 1e9)
    with open_run(ended) as context:
        head = context.trees.best()
        context.journal.set_meta(module.PLAN, None)
        monkeypatch.setattr(context.journal, "finished", lambda key: False)
        assert module.leave_one_out(context, head) == head
        last = context.journal.events(kind="note")[-1]
    assert last.data["text"].startswith("the wall clock left no time to re-test by leaving it out: ")
    assert "rounds" in last.data["text"] and "tokens" in last.data["text"]


def test_what_hurts_is_taken_out_and_the_parts_still_make_the_whole(tmp_path: Path) -> None:
    """A burden is merged by hand behind two honest mechanisms; the run must find it, gate the rest and go on with that.

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
    burden = _merge_a_burden(run)
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
    assert workspace.read(workspace.best(), "behaviour.json") == workspace.read(burden.before, "behaviour.json")
    journal = Journal.open(run / JOURNAL_NAME)
    states = {row.id: row.state for row in journal.attempts()}
    journal.close()
    assert states["x-1"] is AttemptState.superseded and states["without-x-1"] is AttemptState.merged
    with RunSource.open(run) as source:
        assert [step.name for step in source.merged][-2:] == ["burden", "without-x-1"]
    before = starts(run)
    assert resume(run, plain=True).exit_code == 0
    assert starts(run) == before


def _merge_a_burden(run: Path) -> Merged:
    """A merge record of a change that makes every round slower: what a gain of the past looks like when it has turned."""
    with open_run(run) as context:
        head = context.trees.best()
        worktree = context.trees.checkout("x-1", head)
        told = json.loads((worktree / "behaviour.json").read_text())
        slower = json.dumps(told | {"round_s": 0.008}, indent=1, sort_keys=True)
        (worktree / "behaviour.json").write_text(f"{slower}\n")
        commit = context.trees.commit_all("x-1", "A burden")
        candidate = Candidate(attempt_id="x-1", worker="external", base_commit=head, commit=commit, branch="specpilot/x-1",
                              claim=Claim(component="host", hypothesis="It was good once."))  # fmt: skip
        data = {"candidate": candidate.model_dump(mode="json"), "remember": {"name": "burden"}}
        context.journal.create_attempt("x-1", round=0, worker="external", component="host", data=data)
        advance(context, "x-1", AttemptState.accepted)
        merged = Merged(attempt_id="x-1", before=head, after=commit, merged=True, reason=None, detail="by hand",
                        gain=1.05, low=1.01, high=1.1)  # fmt: skip
        context.journal.step("x/x-1/merge", lambda: merged, model=Merged)
        advance(context, "x-1", AttemptState.merged)
        context.trees.set_head(commit)
        context.trees.prune_unknown(set())
    return merged
