"""The planted cheats: well-formed, plantable on today's tree, and (marked `cheats`) every one of them caught."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from specpilot.contracts import Reason
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import GateUnsoundError, UsageError
from specpilot.gate.cheats import Cheat, Stage, load_cheats, plant, select
from specpilot.gate.records import CheatOutcome, SelfTestResult, TimeFloor
from specpilot.gate.selftest import require_sound, self_test

from .tiny import tiny_context

ROOT = Path(__file__).parents[3]
SLIM = ROOT / "engines" / "slim"
CHEATS = {cheat.id: cheat for cheat in load_cheats()}


def test_corpus_is_large_and_names_its_reasons() -> None:
    assert len(CHEATS) >= 14
    assert len(select(list(CHEATS.values()), "quick")) >= 8
    assert all(cheat.expects and cheat.rows for cheat in CHEATS.values())
    assert {cheat.stage for cheat in CHEATS.values()} == set(Stage)


@pytest.mark.parametrize("name", sorted(CHEATS))
def test_each_cheat_plants_valid_code_on_the_stock_tree(name: str, tmp_path: Path) -> None:
    cheat = CHEATS[name]
    tree = tmp_path / "slim"
    shutil.copytree(SLIM, tree, ignore=shutil.ignore_patterns("__pycache__"))
    plant(cheat, tree)
    if cheat.module:
        ast.parse((tree / "slim_engine" / "turbo.py").read_text())
        server = (tree / "slim_engine" / "server.py").read_text()
        ast.parse(server)
        assert server.index("import turbo") < server.index('if __name__ == "__main__"')
        spec = load_engine_spec(SLIM)
        assert spec.editable("slim_engine/turbo.py")
        assert spec.editable("slim_engine/server.py")


def test_planting_says_what_no_longer_fits(tmp_path: Path) -> None:
    (tmp_path / "slim_engine").mkdir()
    (tmp_path / "slim_engine" / "server.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="no `if __name__"):
        plant(CHEATS["replay"], tmp_path)
    (tmp_path / "engine.toml").write_text("nothing\n")
    with pytest.raises(UsageError, match="no line like"):
        plant(CHEATS["evaluator-edit"], tmp_path)


def test_selection() -> None:
    cheats = list(CHEATS.values())
    assert select(cheats, "none") == []
    assert [c.id for c in select(cheats, ["replay", "filler"])] == ["replay", "filler"]
    assert [c.id for c in select(cheats, "replay")] == ["replay"]
    with pytest.raises(UsageError, match="no planted cheat nonsense"):
        select(cheats, ["nonsense"])

    def ids(found: list[Cheat]) -> set[str]:
        return {c.id for c in found}

    everything = ids(select(cheats, "all", sampling=True, floor=True))
    assert everything == set(CHEATS)
    assert everything - ids(select(cheats, "all")) == {"cold-sampling"}
    plain = ids(select(cheats, "all", speculation=False, acceptance=False))
    assert not {"lossy-accept", "speculation-off", "oracle-draft"} & plain
    assert "replay" in plain
    assert "cold-sampling" in ids(select(cheats, "quick", sampling=True))


def outcome(caught: bool, got: Reason | None) -> CheatOutcome:
    return CheatOutcome(
        cheat="replay",
        stage="replay",
        expected=[Reason.replayed_answers],
        got=got,
        caught=caught,
        evidence="e",
        seconds=1.0,
    )


def test_an_unsound_gate_ends_the_run_with_its_own_exit_code() -> None:
    require_sound(SelfTestResult(passed=True, outcomes=[outcome(True, Reason.replayed_answers)]))
    missed = SelfTestResult(
        passed=False,
        outcomes=[outcome(False, None)],
        honest=[outcome(False, Reason.crashed)],
        null_decision="gain",
        null_ratio=1.2,
        null_low=1.1,
        null_high=1.3,
    )
    with pytest.raises(GateUnsoundError) as caught:
        require_sound(missed)
    assert caught.value.exit_code == 7
    for words in (
        "'replay': expected replayed-answers, got no rejection",
        "unchanged engine was rejected: crashed",
        "different: 1.200",
    ):
        assert words in caught.value.message


def test_the_table_in_the_documentation_is_the_corpus() -> None:
    text = (ROOT / "docs" / "gate.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (\w+) \| (.+?) \| (yes|no) \|$", text, flags=re.MULTILINE)
    documented = {name: (does, stage, reasons, quick) for name, does, stage, reasons, quick in rows}
    assert documented == {
        c.id: (c.does, c.stage.value, " or ".join(c.expects), "yes" if c.quick else "no") for c in CHEATS.values()
    }


@pytest.mark.cheats
def test_whole_corpus_is_caught_on_a_tiny_model(tmp_path: Path) -> None:
    floor = TimeFloor(round_s=0.0003, source="a fraction of what the tiny engine needs")
    apart = {"cold-sampling", "speculation-off"}
    with tiny_context(tmp_path / "greedy", floor=floor) as context:
        result = self_test(context, [name for name in CHEATS if name not in apart])
    assert [(o.cheat, o.got, o.evidence) for o in result.outcomes if not o.caught] == []
    assert len(result.outcomes) == len(CHEATS) - 2
    assert result.passed


@pytest.mark.cheats
def test_cold_sampling_is_caught_and_exact_sampling_passes(tmp_path: Path) -> None:
    with tiny_context(tmp_path, temperature=1.0) as context:
        result = self_test(context, ["cold-sampling"])
    assert result.outcomes[0].got is Reason.distribution_mismatch
    assert result.passed


@pytest.mark.cheats
def test_speculation_off_is_caught_where_drafts_are_accepted(tmp_path: Path) -> None:
    with tiny_context(tmp_path, drafter="ngram", scale=0.02) as context:
        result = self_test(context, ["speculation-off"])
    assert result.outcomes[0].got is Reason.speculation_off
    assert result.passed
