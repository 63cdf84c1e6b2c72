"""`specpilot roofline`: bounds of a deployment without an engine, and the profiles of a run, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specpilot.cli import main
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --deployment or --run"),
        (("-d", "x", "--run", "y"), "either --deployment or --run"),
        (("-d", "DEPLOYMENT", "--weights", "int4"), "no weight format 'int4'"),
        (("-d", "DEPLOYMENT", "--set", "hardware=h300"), "no hardware sheet 'h300'"),
        (("-d", "no-such-deployment"), "no-such-deployment"),
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
