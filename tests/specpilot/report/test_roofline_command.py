"""`specpilot roofline`: bounds of a deployment without an engine, and the profiles of a run, as text and as JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specpilot.cli import main
from specpilot.journal import Journal
from specpilot.models import weights_digest
from specpilot.paths import JOURNAL_NAME, runs_dir
from tests.costmodel.published import SMOLLM2_135M
from tests.specpilot.report.sample import AFTER, BEFORE, gaps

DEPLOYMENT = """
name: here
target: {path: target, architecture: LlamaForCausalLM}
drafter: {method: ngram}
hardware: cpu-generic
regime: {concurrency: 2, input_tokens: 200, output_tokens: 100}
workload: {tuning: tuning.jsonl, hidden: hidden.jsonl}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def deployment(home: Path) -> Path:
    folder = home / "deployment"
    (folder / "target").mkdir(parents=True)
    config = {**SMOLLM2_135M, "architectures": ["LlamaForCausalLM"]}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    for name in ("target/model.safetensors", "target/tokenizer.json", "tuning.jsonl", "hidden.jsonl"):
        (folder / name).write_text("{}")
    (folder / "deployment.yaml").write_text(DEPLOYMENT)
    return folder


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["roofline", *arguments])
    return int(ended.value.code or 0)


def test_bounds_of_a_deployment_without_an_engine(deployment, capsys):
    assert run("-d", str(deployment), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["bandwidth_gbs"] == 27.0
    ar, speculative = found["ar"], found["speculative"]
    regime = ar["hardware"]["regime"]
    assert (regime["requests"], regime["rows"], regime["context_len"], regime["kv_bits"]) == (2, 1, 250, 32.0)
    assert speculative["hardware"]["regime"]["rows"] == 8
    mlp = next(row for row in ar["rows"] if row["component"] == "target.mlp")
    assert mlp["bound_ms"] == pytest.approx(3 * 1536 * 576 * 30 * 2 / 27e9 * 1e3 + 60 * 2e-3)
    assert mlp["measured_ms"] == 0 and ar["round_ms"] == 0


def test_text_shows_machine_bounds_and_formats(deployment, capsys):
    assert run("-d", str(deployment), "--weights", "w12") == 0
    text = capsys.readouterr().out
    for words in (
        "read bandwidth",
        "ar round of here",
        "speculative round of here",
        "target.mlp",
        "12.03 bits",
        "w12",
        "compute",
        "ceiling by number of drafts",
    ):
        assert words in text, words


def found_for(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


def finished_run(folder: Path, deployment: Path, closing: float | None, **changed: str | None) -> None:
    """A run's journal as far as the command reads it: whose engine it was, and the accepted lengths of stock."""
    meta = {"deployment": (deployment / "deployment.yaml").read_text(), "final_head": "abc" * 6}
    journal = Journal.create(folder / JOURNAL_NAME, meta)
    ran = {"target_sha256": weights_digest(deployment / "target"), "drafter_sha256": None, **changed}
    journal.step("preflight", lambda: ran)
    journal.step("baselines", lambda: {"variants": {"stock": {"accepted_length": 2.25}}})
    if closing is not None:
        journal.step(f"final/{'abc' * 4}", lambda: {"variants": {"stock": {"accepted_length": closing}}})
    journal.close()


def test_the_accepted_length_is_named_with_where_it_comes_from(deployment, capsys):
    """At 8 rows and accepted length L the rate at the bound is 2 requests x L / bound."""
    found = found_for(capsys, "-d", str(deployment))
    assumed, table = found["assumed"], found["speculative"]
    assert assumed["accepted_length"] == table["accepted_length"] == 3.0
    assert "assumed, no run of this deployment" in assumed["source"] and assumed["rows"] == 8
    assert table["tokens_per_s_at_bound"] == pytest.approx(2 * 3.0 / table["bound_ms"] * 1e3)
    given = found_for(capsys, "-d", str(deployment), "--accepted-length", "4.5")
    assert given["assumed"]["source"] == "given as --accepted-length" and given["assumed"]["accepted_length"] == 4.5
    assert given["speculative"]["bound_ms"] == table["bound_ms"], "the round's bound does not depend on it"
    assert run("-d", str(deployment)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "accepted length 3.00: assumed" in text and "tokens/s and `over ar` hold only at that accepted length" in text
    )
    assert "2 requests, 1 row," in text


def test_a_measured_accepted_length_comes_before_an_assumed_one(deployment, capsys):
    """The closing session's before the first look's, and only of the same weights under the same name."""
    runs = runs_dir()
    finished_run(runs / "20260101-000000-other", deployment, 3.75, target_sha256="0" * 64)
    assert "assumed" in found_for(capsys, "-d", str(deployment))["assumed"]["source"]
    finished_run(runs / "20260102-000000-early", deployment, None)
    assert found_for(capsys, "-d", str(deployment))["assumed"]["accepted_length"] == 2.25
    finished_run(runs / "20260103-000000-whole", deployment, 3.5)
    os.utime(runs / "20260103-000000-whole" / JOURNAL_NAME, (4e9, 4e9))
    (runs / "20260104-000000-damaged").mkdir()
    (runs / "20260104-000000-damaged" / JOURNAL_NAME).write_bytes(b"rubbish" * 2000)
    os.utime(runs / "20260104-000000-damaged" / JOURNAL_NAME, (5e9, 5e9))
    assumed = found_for(capsys, "-d", str(deployment))["assumed"]
    assert assumed["accepted_length"] == 3.5 and "by run 20260103-000000-whole" in assumed["source"]
    hotter = found_for(capsys, "-d", str(deployment), "--set", "regime.temperature=0.7")["assumed"]
    assert hotter["accepted_length"] == 3.0, "another temperature accepts otherwise"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --deployment or --run"),
        (("-d", "x", "--run", "y"), "either --deployment or --run"),
        (("-d", "DEPLOYMENT", "--weights", "int4"), "no weight format 'int4'"),
        (("-d", "DEPLOYMENT", "--set", "hardware=h300"), "no hardware sheet 'h300'"),
        (("-d", "no-such-deployment"), "no-such-deployment"),
        (("-d", "DEPLOYMENT", "--accepted-length", "8.5"), "verifies 8 rows commits at most 8 tokens"),
    ],
)
def test_wrong_arguments_end_with_one_message(deployment, capsys, arguments, words):
    assert run(*(str(deployment) if a == "DEPLOYMENT" else a for a in arguments)) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_profiles_of_a_run(home, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = home / "run"
    journal = Journal.create(folder / JOURNAL_NAME, {})
    journal.step("r1/observe", lambda: gaps(BEFORE, "1f0c9d2e7788"))
    journal.step("final/e9034ab111/gaps", lambda: gaps(AFTER, "e9034ab11122"))
    journal.close()
    assert run("--run", str(folder)) == 0
    text = capsys.readouterr().out
    for words in ("r1/observe (1f0c9d2e7788)", "final/e9034ab111/gaps", "29.500", "8.600", "of the bound"):
        assert words in text, words
    assert "…" not in text and max(map(len, text.splitlines())) <= 80, "no column is cut, in 80 columns"
    assert run("--run", str(folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["r1/observe", "final/e9034ab111/gaps"]
    assert found["r1/observe"]["round_ms"] == pytest.approx(sum(BEFORE.values()))


def test_a_run_without_a_profile_says_so(home, capsys):
    folder = home / "run"
    Journal.create(folder / JOURNAL_NAME, {}).close()
    assert run("--run", str(folder)) == 1
    assert "profiled no engine yet" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert run("--run", str(folder)) == 5
