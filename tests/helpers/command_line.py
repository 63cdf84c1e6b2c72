"""The command line in tests: its entry point in this process, and runs and deployments for it to look at."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml

from specpilot.cli import main
from specpilot.contracts import AttemptState, Reason
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME, runs_dir

NGRAM = "cpu_c1_smollm2-135m_ngram"
"""A deployment that comes with SpecPilot and needs no drafter."""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def specpilot(*words: str, env: dict[str, str] | None = None) -> Done:
    """The entry point, in this process: starting an interpreter each time would take most of the suite's time."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "200", **(env or {})}), redirect_stdout(out), redirect_stderr(err):
        with pytest.raises(SystemExit) as ended:
            main(words)
    code = ended.value.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def fails(code: int, *words: str, env: dict[str, str] | None = None) -> str:
    """The one message of a failing command."""
    done = specpilot(*words, env=env)
    assert done.returncode == code, done
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr


def make_run(name: str = "20260101-000000-d-aaaa") -> Path:
    folder = runs_dir() / name
    meta = {"run": {"run_id": name, "deployment_name": "d"}}
    journal = Journal.create(folder / JOURNAL_NAME, meta)
    journal.create_attempt("r1-recall-1", round=1, worker="recall", component="target.head")
    journal.move_attempt("r1-recall-1", AttemptState.rejected, reason=Reason.no_gain, detail="1.00x")
    journal.step("baselines", lambda: {"x": 1})
    journal.event("phase", {"name": "gate"})
    journal.close()
    return folder


def local_deployment(folder: Path) -> Path:
    """A complete deployment whose checkpoint is missing."""
    for name in ("tuning.jsonl", "hidden.jsonl"):
        (folder / name).write_text("".join(f'{{"id": "{k}", "text": "hello {name} {k}"}}\n' for k in range(8)))
    data = {
        "name": "local",
        "target": {"path": "checkpoint", "architecture": "LlamaForCausalLM"},
        "drafter": {"method": "ngram"},
        "workload": {"tuning": "tuning.jsonl", "hidden": "hidden.jsonl"},
    }
    (folder / "deployment.yaml").write_text(yaml.safe_dump(data))
    return folder / "deployment.yaml"
