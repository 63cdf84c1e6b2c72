"""Run folders built with the real journal and the real workspace: two merged changes, one rejected, full evidence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpilot.contracts import (
    AttemptState,
    Calibration,
    Candidate,
    Check,
    Claim,
    Comparison,
    Reason,
    SideSummary,
    Verdict,
)
from specpilot.deployment import Deployment
from specpilot.export import ExportResult, export_run
from specpilot.journal import Journal
from specpilot.loop.records import Assessment, Merged
from specpilot.models import ResolvedModels
from specpilot.workspace import Workspace
from tests.helpers.fake_deployment import write_fake_deployment
from tests.helpers.fake_server import write_fake_tree

Change = Callable[[Path], None]
SECRET = "the-runs-secret-0123456789"


def side(commit: str, rate: float) -> SideSummary:
    return SideSummary(
        commit=commit, variant="final", decode_tokens_per_s=rate, end_to_end_tokens_per_s=rate, ttft_s=0.1,
        accepted_length=3.0, target_forwards_per_token=0.4, startup_s=1.0, tokens=100,
    )  # fmt: skip


def assessment(attempt: str, base: str, commit: str, ratio: float) -> Assessment:
    comparison = Comparison(
        base=side(base, 10.0), candidate=side(commit, 10.0 * ratio), ratio=ratio, low=ratio - 0.1, high=ratio + 0.1,
        end_to_end_ratio=ratio, end_to_end_low=ratio - 0.1, end_to_end_high=ratio + 0.1, alpha=0.05, pairs=[ratio] * 4,
        detectable=1.02, decision="gain", seconds=9.0,
    )  # fmt: skip
    verdict = Verdict(
        passed=True, reason=None, detail="", checks=[Check(name="forcing", passed=True, detail="ok")], positions=200,
        exact=199, near_ties=1,
    )  # fmt: skip
    return Assessment(
        attempt_id=attempt, base_commit=base, commit=commit, comparison=comparison, verdict=verdict, accepted=True,
        reason=None, detail="",
    )  # fmt: skip


class RunBuilder:
    """Makes one run; `merge` adds a change to its head as the loop records it."""

    def __init__(self, folder: Path, deployment: Deployment, tree: Path, models: ResolvedModels) -> None:
        meta = {
            "run": {"run_id": "run-7", "deployment_name": deployment.name, "secret": SECRET, "created": "2026-11-30",
                    "memory_url": "postgresql://me:hunter2@host/db", "version": "0"},
            "deployment": deployment.to_yaml(),
            "folder": str(deployment.folder),
        }  # fmt: skip
        self.folder = folder
        self.journal = Journal.create(folder / "journal.db", meta)
        self.workspace = Workspace.create(folder, tree)
        self.head = self.workspace.first_commit
        self.number = 0
        preflight = models.model_dump(mode="json") | {"first_commit": self.head}
        self.journal.step("preflight", lambda: preflight)
        calibration = Calibration(epsilon=0.03, near_tie_rate_limit=0.2, positions=100, near_ties=2, max_gap=0.02,
                                  gap_quantiles={"0.99": 0.01}, method="batch shape")  # fmt: skip
        self.journal.step("calibrate", lambda: calibration, model=Calibration)
        self.journal.step("selftest", lambda: {"passed": True})

    def merge(self, change: Change, ratio: float = 1.5, mechanism: str | None = None, task: str = "") -> str:
        """Commit `change` on the head, walk an attempt through every state, merge it; the new head."""
        name = f"r1-worker-{self.number}"
        worktree = self.workspace.checkout(name, self.head)
        change(worktree)
        commit = self.workspace.commit_all(name, task or name)
        claim = Claim(
            component="target.mlp",
            hypothesis="Fewer bytes.\n---\ndiff of hope",
            counters=["calls"],
            mechanism=mechanism,
        )
        candidate = Candidate(attempt_id=name, worker="recall", base_commit=self.head, commit=commit, branch=f"specpilot/{name}",
                              claim=claim)  # fmt: skip
        found = assessment(name, self.head, commit, ratio)
        data: dict[str, Any] = {
            "task": task or f"Change number {self.number}",
            "candidate": candidate.model_dump(mode="json"),
        }
        self.journal.create_attempt(name, round=1, worker="recall", component="target.mlp", data=data)
        for state in ("working", "submitted", "measured", "gated", "accepted", "merged"):
            self.journal.move_attempt(name, AttemptState(state), data={"assessment": found.model_dump(mode="json")})
        self.journal.step(f"r1/attempt/{name}", lambda: found, model=Assessment)
        step = Merged(attempt_id=name, before=self.head, after=commit, merged=True, reason=None, detail="", gain=ratio,
                      low=ratio - 0.1, high=ratio + 0.1)  # fmt: skip
        self.journal.step(f"r1/merge/{self.number}", lambda: step, model=Merged)
        self.workspace.set_head(commit)
        self.number += 1
        self.head = commit
        return commit

    def reject(self) -> None:
        """An attempt that came to nothing, and a merge step that left it out."""
        self.journal.create_attempt("r1-bad", round=1, worker="search", component="host")
        self.journal.move_attempt("r1-bad", AttemptState.rejected, reason=Reason.no_gain)
        step = Merged(attempt_id="r1-bad", before=self.head, after=self.head, merged=False, reason=Reason.superseded_by_sum,
                      detail="", gain=0.99, low=0.9, high=1.1)  # fmt: skip
        self.journal.step("r1/merge/9", lambda: step, model=Merged)

    def finish(self) -> None:
        """The closing session and the report."""
        ratio = {"of": "final", "over": "stock", "ratio": 2.25, "low": 2.0, "high": 2.5}
        rows = {
            name: {"decode_tokens_per_s": 10.0, "accepted_length": None}
            for name in ("ar", "stock", "final", "final-ar")
        }
        self.journal.step(f"final/{self.head[:12]}", lambda: {"variants": rows, "ratios": [ratio]})
        self.journal.set_meta("stop_reason", "rounds-done")
        self.journal.event("ended", {"stop": "rounds-done"})
        (self.folder / "report.html").write_text("<html>report</html>")


def fake_models(deployment: Deployment) -> ResolvedModels:
    from specpilot.models import weights_digest

    target = deployment.folder / "target"
    digest = weights_digest(target)
    return ResolvedModels(target_dir=target, target_sha256=digest, drafter=str(target), drafter_sha256=digest)


def build_run(folder: Path) -> RunBuilder:
    """A finished run of the made-up engine with two merged changes; everything it needs lies under `folder`."""
    deployment = write_fake_deployment(folder / "my deployment")
    tree = write_fake_tree(folder / "tree")
    builder = RunBuilder(folder / "the run", deployment, tree, fake_models(deployment))

    def faster(worktree: Path) -> None:
        (worktree / "behaviour.json").write_text('{\n "round_s": 0.003\n}\n')

    def awkward_files(worktree: Path) -> None:
        (worktree / "notes.txt").write_text("a\r\nb\r\n", newline="")
        (worktree / "blob.bin").write_bytes(bytes(range(256)))

    builder.merge(faster, 1.5, "faster-rounds", "Replay faster-rounds: Faster é rounds")
    builder.merge(awkward_files)
    builder.reject()
    builder.finish()
    return builder


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    """A run that the test may change."""
    return build_run(tmp_path)


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> RunBuilder:
    """A run that nobody changes."""
    return build_run(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def shared_export(shared_run: RunBuilder, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportResult, Path]:
    """Its export, which nobody changes either."""
    to = tmp_path_factory.mktemp("out") / "my engine"
    return export_run(shared_run.folder, to), to


@pytest.fixture
def exported(shared_export: tuple[ExportResult, Path], tmp_path: Path) -> tuple[ExportResult, Path]:
    """A copy of the export that the test may change."""
    result, original = shared_export
    to = tmp_path / "moved to" / "my engine"
    shutil.copytree(original, to)
    return result, to
