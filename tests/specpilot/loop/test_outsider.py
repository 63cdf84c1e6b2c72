"""`specpilot attempt open | submit` on a run at rest: the same gate, an exit code that tells, and a clock that stands still."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from specpilot.agents import AgentError
from specpilot.contracts import AttemptState, StopReason
from specpilot.errors import UsageError
from specpilot.gate.timing import in_flight
from specpilot.journal import Journal
from specpilot.loop import budget, observe, rounds
from specpilot.loop.attempts import advance
from specpilot.loop.external import finish_judging, open_attempt, submit_attempt
from specpilot.loop.rounds import _assess_all, run_round, waiting_outsiders
from specpilot.loop.run import open_run, optimize, resume
from specpilot.loop.state import merged_mechanisms
from specpilot.loop.summary import report_data
from specpilot.paths import JOURNAL_NAME
from specpilot.run_lock import RunLock
from tests.helpers.command_line import specpilot
from tests.helpers.fake_server import Behaviour
from tests.specpilot.loop.setting import fake_setting, text_of

STOCK = Behaviour(round_s=0.04)


@pytest.fixture(scope="module")
def rested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of no rounds: prepared and profiled, waiting for outsiders."""
    folder = tmp_path_factory.mktemp("outsider")
    deployment = fake_setting(folder, STOCK)
    manifest = folder / "tree/engine.toml"  # the engine's code may be edited as well
    manifest.write_text(manifest.read_text().replace('["behaviour.json"]', '["behaviour.json", "fake_server.py"]'))
    memory = f"sqlite:///{folder / 'memory.sqlite'}"
    quiet = deployment.model_copy(update={"budget": deployment.budget.model_copy(update={"rounds": 0})})
    quiet._folder = deployment.folder
    assert optimize(quiet, folder / "run", plain=True, memory=memory).exit_code == 0
    return folder / "run"


def elapsed(run: Path) -> float:
    journal = Journal.open(run / JOURNAL_NAME)
    try:
        return float(journal.get_meta("elapsed_s"))
    finally:
        journal.close()


def submit(run: Path, behaviour: Behaviour, folder: Path) -> tuple[int, str, str]:
    """Opens an attempt, edits its worktree, submits it: exit code, attempt, words."""
    with open_run(run) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
    (worktree / "behaviour.json").write_text(text_of(behaviour))
    claim = folder / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "host", "hypothesis": "Another speed.", "predicted_gain": 1.5}))
    done = specpilot("attempt", "submit", str(run), attempt, "--claim", str(claim))
    return done.returncode, attempt, done.stdout


def test_resuming_an_ended_run_costs_none_of_its_time(rested: Path) -> None:
    before = elapsed(rested)
    assert before > 0
    for _ in range(2):
        assert resume(rested, plain=True).exit_code == 0
    assert elapsed(rested) == before


def test_the_profile_is_of_the_deployments_load(rested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests at a time, so three share each round: twice the tokens of one need no more rounds."""
    with open_run(rested) as context:
        load = context.deployment.regime.model_copy(update={"concurrency": 3})
        context.deployment = context.deployment.model_copy(update={"regime": load})
        asked: list[int] = []
        run_under_load = observe.run_under_load

        def listen(server, prompts, load, tokens, side):
            asked.append(load.concurrency)
            leg = run_under_load(server, prompts, load, tokens, side)
            assert len(prompts) == 1 or in_flight(leg) > 2.0
            return leg

        monkeypatch.setattr(observe, "run_under_load", listen)
        with context.engine(context.trees.first_commit, "stock", "profiled") as server:
            table = observe.profile_engine(context, "profiled", server)
    assert asked == [3, 3, 3] and table.hardware["regime"]["requests"] == 3
    assert table.round_ms > 40.0


def test_a_rejected_attempt_exits_10_and_an_accepted_one_0(rested: Path, tmp_path: Path) -> None:
    code, attempt, words = submit(rested, replace(STOCK, token_s=0.004), tmp_path)
    assert code == 10 and f"{attempt} rejected (no-gain): " in words
    code, attempt, words = submit(rested, replace(STOCK, round_s=0.02), tmp_path)
    assert code == 0 and f"{attempt} accepted: " in words
    journal = Journal.open(rested / JOURNAL_NAME)
    assert [row.state for row in journal.attempts()] == [AttemptState.rejected, AttemptState.merged]
    journal.close()
    before = elapsed(rested)
    assert resume(rested, plain=True).final["variants"], "the closing session of the new head is work, and counts"
    assert elapsed(rested) > before
    with open_run(rested) as context:
        (name,) = merged_mechanisms(context)
        (effect,) = context.memory.get(name).effects
    # The trace always shows a round of 6 ms, all of it host: 1.5x would leave 4 ms, and the engine after it shows 6 again.
    assert (effect.predicted_ms, effect.realised_ms) == (pytest.approx(4.0), pytest.approx(6.0))


def test_an_attempt_that_the_clock_left_waiting_is_judged_later(
    rested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither dropped nor lost: by a later round of the run, or by submitting it once more at rest."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
    (worktree / "behaviour.json").write_text(text_of(replace(STOCK, round_s=0.012)))
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "target.mlp", "hypothesis": "Another speed."}))
    with RunLock(rested), open_run(rested) as context:
        assert submit_attempt(context, attempt, claim) is None, "the run is busy"
        waiting = waiting_outsiders(context)
        assert [item.attempt_id for item in waiting] == [attempt]
        monkeypatch.setattr(budget, "CLOSING_RESERVE_S", 10_000.0)
        assert _assess_all(context, 1, waiting) == ([], StopReason.budget_wall_clock)
        assert context.journal.attempt(attempt).state is AttemptState.submitted
    done = specpilot("attempt", "submit", str(rested), attempt, "--claim", str(claim))
    assert done.returncode == 0 and f"{attempt} accepted" in done.stdout


def test_a_round_cut_off_before_merging_keeps_its_outsider_and_loses_its_profile(
    rested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is merged when the round goes on, once; an engine that stopped writing traces costs the table only."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
    longer = replace(STOCK, round_s=0.012, accepted=(6, 5, 6), no_trace=True)
    (worktree / "behaviour.json").write_text(text_of(longer))
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "target.mlp", "hypothesis": "More tokens in a round."}))
    with RunLock(rested), open_run(rested) as context:
        assert submit_attempt(context, attempt, claim) is None, "the run is busy"
        context.journal.set_meta("stop_reason", None)  # a run that has been given another round
        base = context.trees.best()

        def cut(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(rounds, "merge_winners", cut)
            run_round(context, 1, [])
        assert context.journal.attempt(attempt).state is AttemptState.accepted
    with RunLock(rested), open_run(rested) as context:
        result = run_round(context, 1, [])
        assert result.merged == [attempt] and result.head == context.trees.best() != base
        assert context.journal.attempt(attempt).state is AttemptState.merged
        measured = [row.starts for row in context.journal.steps() if row.key == f"r1/attempt/{attempt}"]
        assert measured == [1]
        (name,) = merged_mechanisms(context)[-1:]
        assert name.startswith("target-mlp-") and context.memory.get(name).status == "verified"
        assert run_round(context, 2, []).head == context.trees.best() == result.head, "nothing found, nothing lost"
        table = rounds.observe(context, "r2/observe", result.head)
        assert table.rows == [] and table.round_ms == 0.0
        notes = [event.data["text"] for event in context.journal.events(kind="note")]
        assert sum("cannot be profiled any more" in note for note in notes) == 1


@pytest.mark.parametrize("place", ["specpilot.loop.merge.merge_one", "specpilot.workspace.Workspace.set_head"])
def test_judging_at_rest_that_was_cut_off_is_gone_on_with(
    rested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Measured and not merged, merged and not the head: a resume, or the same command again, brings it to its end."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
        before = context.trees.best()
    told = json.loads((worktree / "behaviour.json").read_text())
    longer = {"accepted": [8, 8, 8], "round_s": 0.006} if told["accepted"] != [8, 8, 8] else {"round_s": 0.002}
    (worktree / "behaviour.json").write_text(json.dumps(told | longer, indent=1, sort_keys=True) + "\n")
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "target.mlp", "hypothesis": "More tokens in a round."}))

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, open_run(rested) as context, pytest.raises(KeyboardInterrupt):
        patched.setattr(place, cut)
        submit_attempt(context, attempt, claim)
    with open_run(rested) as context:
        assert context.trees.best() == before
        finish_judging(context)
        assert context.journal.attempt(attempt).state is AttemptState.merged and context.trees.best() != before
        head = context.trees.best()
        finish_judging(context)
        assert context.trees.best() == head


def test_claims_that_the_memory_could_not_keep_are_refused_before_anything_is_measured(
    rested: Path, tmp_path: Path
) -> None:
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
        context.memory.add(
            context.memory.mechanisms()[0].mechanism.model_copy(update={"name": "shipped"}), origin="seed"
        )
        some = context.memory.mechanisms()[0].mechanism
        context.memory.add(some.model_copy(update={"name": "user-own"}), origin="run", status="verified")
        context.memory.add(some.model_copy(update={"name": "below"}), origin="run")
        context.memory.add(some.model_copy(update={"name": "above", "requires": ["below"]}), origin="run")
    (worktree / "behaviour.json").write_text(text_of(replace(STOCK, round_s=0.004)))
    told = {"component": "target.mlp", "hypothesis": "Another speed."}
    claim = tmp_path / "claim.yaml"
    for extra, words in (
        ({"remember": {"name": "new", "title": "t", "requires": ["nobody"]}}, "does not hold: nobody"),
        ({"remember": {"name": "shipped", "title": "t"}}, "shipped is a mechanism that comes with"),
        ({"remember": {"name": "new", "title": "t", "requires": ["new"]}}, "cannot require itself"),
        ({"mechanism": "shipped"}, "unknown key 'mechanism'"),
        ({"remember": {"name": "new", "title": "t", "notes": "\ud800"}}, "cannot read"),
        ({"predicted_gain": 10**400}, "must be a ratio"),
        ({"remember": {"name": "user-own", "title": "t"}}, "verified already"),
        ({"remember": {"name": "below", "title": "t", "requires": ["above"]}}, "would require it"),
    ):
        claim.write_text(yaml.safe_dump(told | extra))
        with open_run(rested) as context, pytest.raises((UsageError, AgentError), match=words):
            submit_attempt(context, attempt, claim)
    with open_run(rested) as context:
        assert context.journal.attempt(attempt).state is AttemptState.working


def test_a_counter_that_no_file_names_is_refused_while_the_claim_can_be_mended(rested: Path, tmp_path: Path) -> None:
    """The brief lists what merged changes added beside what `engine.toml` declares; a misspelt name is told at once."""
    with open_run(rested) as context:
        declared = list(context.spec.counters)
        merged = {"candidate": {"claim": {"counters": ["fast_rows", declared[0]]}}}
        context.journal.create_attempt("x-merged", round=0, worker="external", component="*", data=merged)
        advance(context, "x-merged", AttemptState.merged)
        attempt, worktree, brief = open_attempt(context, "*", "try")
        assert f"Counters that exist: {', '.join([*declared, 'fast_rows'])}. You may" in brief
    claim = tmp_path / "claim.yaml"

    def refused(counter: str) -> str:
        claim.write_text(yaml.safe_dump({"component": "*", "hypothesis": "Counted.", "counters": [counter]}))
        with open_run(rested) as context:
            try:
                submit_attempt(context, attempt, claim)
            except UsageError as error:
                return f"{error.message} {error.hint}"
        return ""

    told = refused("fast_row")
    assert "the counter 'fast_row', which the engine does not have" in told and "did you mean 'fast_rows'?" in told
    assert "changes nothing" in refused(declared[0]), "known: the next thing to be told is that nothing was edited"
    assert "changes nothing" in refused("fast_rows")
    assert "changes nothing" in refused("token_s"), "a word of the engine's own files may be a counter"
    with open_run(rested) as context:
        assert context.journal.attempt(attempt).state is AttemptState.working
        context.journal.move_attempt("x-merged", AttemptState.superseded)


def test_drafts_stored_for_the_tuning_prompts_gain_nothing(rested: Path, tmp_path: Path) -> None:
    """Lossless, and eight tokens a round instead of three wherever a prompt is a tuning prompt, which workers may read."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
        pool = context.prompts("which")
        asked = {which: [p.ids for p in pool.take(which, 4)] for which in ("tuning", "hidden", "closing")}
        tokenizer = Tokenizer.from_file(str(Path(context.identity.target_dir) / "tokenizer.json"))
        known = tokenizer.encode("tuning question", add_special_tokens=False).ids
    holds = {which: [str(known)[1:-1] in str(ids) for ids in found] for which, found in asked.items()}
    assert all(holds["tuning"]) and not any(holds["hidden"] + holds["closing"])
    told = json.loads((worktree / "behaviour.json").read_text())
    (worktree / "behaviour.json").write_text(json.dumps(told | {"known": known}, indent=1, sort_keys=True) + "\n")
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "*", "hypothesis": "Drafts from stored answers."}))
    with open_run(rested) as context:
        assessment = submit_attempt(context, attempt, claim)
    assert assessment is not None and assessment.comparison is not None
    before, after = assessment.comparison.base.accepted_length, assessment.comparison.candidate.accepted_length
    assert before is not None and after == pytest.approx(before), "on what was timed it drafts no better"
    assert not assessment.accepted


def test_a_patch_that_the_memory_cannot_hold_is_measured_all_the_same(rested: Path, tmp_path: Path) -> None:
    """Latin-1 in a text file: the attempt has its fate, the memory goes without, and the run is not stuck."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
    engine = worktree / "fake_server.py"
    engine.write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + engine.read_bytes())
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "target.mlp", "hypothesis": "A comment."}))
    with open_run(rested) as context:
        before = len(context.memory.mechanisms())
        assessment = submit_attempt(context, attempt, claim)
        assert assessment is not None and not assessment.accepted and assessment.comparison is not None
        notes = [event.data["text"] for event in context.journal.events(kind="note")]
        assert any(note.startswith(f"{attempt} is not remembered: ") for note in notes)
        assert len(context.memory.mechanisms()) == before


@pytest.mark.parametrize(("program", "warned"), [(None, 1), ("/usr/bin/bwrap", 0)])
def test_a_run_without_a_sandbox_says_so(
    rested: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, warned: int
) -> None:
    monkeypatch.setattr("specpilot.loop.context.bubblewrap", lambda: program)
    with open_run(rested) as context:
        before = len(context.journal.events(kind="note"))
        context.warn_unconfined()
        notes = [event.data for event in context.journal.events(kind="note")[before:]]
    assert len(notes) == warned
    assert all(note["level"] == "warning" and "no usable bubblewrap" in note["text"] for note in notes)


def test_commands_to_go_on_with_survive_the_shell(rested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(rested) as context:
        monkeypatch.setattr(context.meta, "__dict__", context.meta.__dict__ | {"run_id": "a 'b\" c"})
        words = [shlex.split(command.command) for command in report_data(context).commands]
    assert ["specpilot", "export", "a 'b\" c", "--to", "engine"] in words


def test_closing_figures_of_other_tokens_are_withheld(rested: Path, tmp_path: Path) -> None:
    """An engine that is honest to the gate, and as `final-ar`, which no gate asks, sends one token over and over."""
    with open_run(rested) as context:
        attempt, worktree, _ = open_attempt(context, "*", "try")
    (worktree / "behaviour.json").write_text(text_of(replace(STOCK, round_s=0.0003, accepted=(8, 8, 8))))
    engine, text = worktree / "fake_server.py", (worktree / "fake_server.py").read_text()
    place = '        if body.get("stream"):'
    assert place in text
    lie = f'        if os.environ["SPECPILOT_VARIANT"] == "final-ar":\n            tokens = [7] * len(tokens)\n{place}'
    engine.write_text(text.replace(place, lie))
    claim = tmp_path / "claim.yaml"
    claim.write_text(yaml.safe_dump({"component": "target.mlp", "hypothesis": "Another speed."}))
    with open_run(rested) as context:
        assessment = submit_attempt(context, attempt, claim)
        assert assessment is not None and assessment.accepted, "the gate never asks that variant"
    final = resume(rested, plain=True).final
    assert set(final["variants"]) == {"ar", "stock", "final"}
    assert list(final["withheld"]) == ["final-ar"] and "forcing.closing" in final["withheld"]["final-ar"]
    assert not any("final-ar" in (ratio["of"], ratio["over"]) for ratio in final["ratios"])
    journal = Journal.open(rested / JOURNAL_NAME)
    notes = [event.data["text"] for event in journal.events(kind="note")]
    journal.close()
    assert sum("closing figures of final-ar are withheld" in note for note in notes) == 1
