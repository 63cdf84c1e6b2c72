"""Prepare: identities, repository, machine, gate. Nothing is optimised before the gate has proved itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specpilot.contracts import Calibration
from specpilot.errors import GateUnsoundError
from specpilot.evaluation.baselines import measure_variants
from specpilot.gate.calibrate import calibrate
from specpilot.gate.selftest import SelfTestResult, self_test
from specpilot.loop.context import RunContext
from specpilot.loop.machine import machine_facts
from specpilot.loop.records import Prepared
from specpilot.models import ensure_models
from specpilot.workspace import Workspace


def prepare(context: RunContext) -> None:
    """Runs or recalls every preparatory step, in order. Raises SpecPilotError when the run cannot be sound."""
    context.say("phase", name="prepare", detail="checkpoints, repository, machine")
    context.models = ensure_models(context.deployment)
    open_repository(context)
    context.prepared = context.journal.step("preflight", lambda: _identities(context), model=Prepared)
    _assert_same_models(context)
    context.journal.step("machine", lambda: machine_facts(context))
    context.say("phase", name="gate", detail="calibration and planted cheats")
    calibration(context)
    _self_test(context)


def open_repository(context: RunContext) -> None:
    """Creates the run's repository from the engine tree, or opens the one that is there."""
    if (context.run_dir / "repo").exists():
        context.workspace = Workspace.open(context.run_dir)
        return
    context.workspace = Workspace.create(context.run_dir, context.deployment.engine_tree())


def _identities(context: RunContext) -> Prepared:
    models = context.resolved
    config = json.loads((models.target_dir / "config.json").read_text())
    block = None
    drafter_config = Path(models.drafter) / "config.json"
    if drafter_config.is_file():
        loaded = json.loads(drafter_config.read_text())
        block = loaded.get("dflash_config", {}).get("block_size") or loaded.get("block_size", 16)
    return Prepared(
        target_dir=str(models.target_dir),
        target_sha256=models.target_sha256,
        drafter=models.drafter,
        drafter_sha256=models.drafter_sha256,
        first_commit=context.trees.first_commit,
        architecture=config.get("model_type", "unknown"),
        block_size=block,
        python=context.deployment.engine.python or sys.executable,
    )


def _assert_same_models(context: RunContext) -> None:
    """A resumed run must continue with the very weights it began with."""
    from specpilot.errors import DigestError

    now, then = context.resolved, context.identity
    for what, new, old in (
        ("target", now.target_sha256, then.target_sha256),
        ("drafter", now.drafter_sha256, then.drafter_sha256),
    ):
        if new != old:
            raise DigestError(
                f"the {what}'s weights changed since this run began: {old} then, {new} now",
                "start a new run, or restore the checkpoint",
            )


def calibration(context: RunContext) -> Calibration:
    """What counts as a near-tie: the reference against itself, once per run."""

    def run() -> Calibration:
        with context.engine(context.trees.first_commit, "reference", "calibrate") as reference:
            return calibrate(reference, context.prompts("calibrate"), context.deployment)

    result: Calibration = context.journal.step("calibrate", run, model=Calibration)
    context.say("calibration", **result.model_dump())
    return result


def _self_test(context: RunContext) -> None:
    def run() -> SelfTestResult:
        return self_test(context)

    result: SelfTestResult = context.journal.step("selftest", run, model=SelfTestResult)
    if not result.passed:
        raise GateUnsoundError(
            "the gate failed its own test: " + result.summary(),
            f"see {context.run_dir / 'journal.db'}; nothing was optimised",
        )


def first_baselines(context: RunContext) -> None:
    """A first look at `ar` and `stock`, before any work; the figures of the report come from the closing session."""
    context.say("phase", name="baselines", detail="ar and stock, first look")
    first = context.trees.first_commit
    variants = [("ar", first, "ar"), ("stock", first, "stock")]
    context.journal.step("baselines", lambda: measure_four(context, "baselines", variants, prompts=3))


def measure_four(
    context: RunContext, key: str, variants: list[tuple[str, str, str]], *, prompts: int
) -> dict:
    """Measures named (name, commit, variant) engines round-robin in one session; returns a JSON-ready dict."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(context.engine(commit, variant, f"{key}-{name}")))
            for name, commit, variant in variants
        ]
        result = measure_variants(
            servers,
            context.prompts(key).take("tuning", prompts),
            settings=context.deployment.measurement,
            regime=context.deployment.regime,
        )
    data = result.model_dump(mode="json")
    context.say("baseline", **data)
    return data
