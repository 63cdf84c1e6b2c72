"""The search's trials inside a whole run on the made-up engine: real worktrees, processes and screening legs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from specpilot.contracts import StopReason
from specpilot.deployment import load_deployment
from specpilot.journal import Journal
from specpilot.loop.run import optimize
from specpilot.paths import JOURNAL_NAME
from tests.helpers.fake_server import Behaviour
from tests.specpilot.loop.setting import fake_setting

KNOB = '\n[tunables.rows]\ntype = "int"\nmin = 1\nmax = 8\ndefault = 4\ncomponent = "target.mlp"\n'


def test_each_trial_is_screened_against_the_rounds_base(tmp_path: Path) -> None:
    """A knob that the engine never reads: both arms get their trial, and every one of them can be measured."""
    folder = fake_setting(tmp_path, replace(Behaviour(), round_s=0.004)).folder
    manifest = tmp_path / "tree" / "engine.toml"
    text = manifest.read_text().replace('include = ["behaviour.json"]', 'include = ["behaviour.json", "tunables.toml"]')
    manifest.write_text(text + KNOB)
    (tmp_path / "tree" / "tunables.toml").write_text("rows = 4\n")
    file = folder / "deployment.yaml"
    data = yaml.safe_load(file.read_text()) | {"agents": {"recall": {"enabled": False}, "search": {"trials": 1}}}
    file.write_text(yaml.safe_dump(data))
    outcome = optimize(load_deployment(file), tmp_path / "run", plain=True, memory=f"sqlite:///{tmp_path / 'm.sqlite'}")
    assert outcome.stop is StopReason.rounds_done
    journal = Journal.open(tmp_path / "run" / JOURNAL_NAME)
    trials = [event.data for event in journal.events() if event.kind == "trial"]
    journal.close()
    assert sorted(trial["arm"] for trial in trials) == ["random", "tpe"]
    assert all(trial["ratio"] > 0.0 and 1 <= trial["values"]["rows"] <= 8 for trial in trials)
