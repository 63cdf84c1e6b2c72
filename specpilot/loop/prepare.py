"""Prepare: identities, repository, machine, gate. Nothing is optimised before the gate has proved itself."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from specpilot.contracts import Calibration, Leg
from specpilot.deployment import Deployment
from specpilot.drafters import check_drafter
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import DigestError
from specpilot.evaluation.baselines import Baselines, measure_variants
from specpilot.evaluation.legs import run_leg
from specpilot.evaluation.prompts import check_prompt_files
from specpilot.gate.calibrate import calibrate
from specpilot.gate.hidden import served_block_size
from specpilot.gate.records import CheatOutcome, SelfTestResult
from specpilot.gate.selftest import SelfTestContext, require_sound, resolution_note, self_test
from specpilot.loop.assess import patiently
from specpilot.loop.context import RunContext
from specpilot.loop.machine import machine_facts
from specpilot.loop.observe import time_floor
from specpilot.loop.records import Prepared
from specpilot.models import ensure_models
from specpilot.words import count as counted
from specpilot.workspace import Workspace

CALIBRATION_PROMPTS = 12
CALIBRATION_TOKENS = 48
BASELINE_PROMPTS = 3
"""Answers of the `ar` baseline that the reference scores for information: does plain decoding here pass the gate?"""


def prepare(context: RunContext) -> None:
    """Runs or recalls every preparatory step, in order. Raises SpecPilotError when the run cannot be sound."""
    context.say("phase", name="prepare", detail="checkpoints, repository, machine")
    check_prompt_files(context.deployment)
    context.models = ensure_models(context.deployment, progress=context.doing)
    open_repository(context)
    context.prepared = context.journal.step("preflight", lambda: _identities(context), model=Prepared)
    _assert_same_models(context)
    if not context.journal.finished("machine"):
        context.doing("this machine's bandwidth and peak, measured if they are not known")
    context.journal.step("machine", lambda: machine_facts(context))
    if not context.journal.finished("selftest"):
        context.warn_unconfined()
    context.say("phase", name="gate", detail="calibration and planted cheats")
    calibration(context)
    _self_test(context)


def open_repository(context: RunContext) -> None:
    """Creates the run's repository from the engine tree, or opens the one that is there."""
    if (context.run_dir / "repo").exists():
        context.workspace = Workspace.open(context.run_dir)
        return
    tree = context.deployment.engine_tree()
    context.workspace = Workspace.create(context.run_dir, tree, starting_tunables(tree, context.deployment))


def starting_tunables(tree: Path, deployment: Deployment) -> dict[str, str]:
    """`tunables.toml` with the deployment's starting values; nothing where it sets none."""
    wanted = deployment.engine.tunables
    if not wanted:
        return {}
    path = tree / "tunables.toml"
    present = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {path.name: load_engine_spec(tree).tunables_text(present | wanted)}


def _identities(context: RunContext) -> Prepared:
    models = context.resolved
    config = json.loads((models.target_dir / "config.json").read_text())
    return Prepared(
        target_dir=str(models.target_dir),
        target_sha256=models.target_sha256,
        drafter=models.drafter,
        drafter_sha256=models.drafter_sha256,
        first_commit=context.trees.first_commit,
        architecture=config.get("model_type", "unknown"),
        block_size=check_drafter(Path(models.drafter)) if models.drafter_sha256 else None,
        python=context.deployment.engine.python or sys.executable,
    )


def _assert_same_models(context: RunContext) -> None:
    """A resumed run must continue with the very weights it began with."""
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

    first = context.trees.first_commit

    def run() -> Calibration:
        pool = context.prompts("calibrate")
        context.doing(f"the plain engine answers {counted(BASELINE_PROMPTS, 'prompt')}")
        with context.engine(first, "ar", "calibrate-ar") as ar:
            plain = pool.take("tuning", BASELINE_PROMPTS)
            answers = run_leg(ar, plain, concurrency=1, max_new_tokens=CALIBRATION_TOKENS, side="base").generations
        context.doing(f"the reference against itself in another batch shape, {counted(CALIBRATION_PROMPTS, 'prompt')}")
        with context.engine(first, "reference", "calibrate") as reference:
            return calibrate(
                reference,
                pool.take("tuning", CALIBRATION_PROMPTS),
                context.deployment.gate,
                max_new_tokens=CALIBRATION_TOKENS,
                baseline=answers,
            )

    known = context.journal.finished("calibrate")
    result: Calibration = context.journal.step(
        "calibrate", lambda: patiently(context, "calibrate", run), model=Calibration
    )
    context.tell_again(known, "calibration", **result.model_dump(mode="json"))
    return result


def _self_test(context: RunContext) -> None:
    """The gate against the planted cheats; raises GateUnsoundError if it is fooled."""
    cheats = context.deployment.gate.cheats
    if cheats == "none":
        context.say("note", level="warning", text="the gate was not tested: gate.cheats is 'none'")
        return

    def run() -> SelfTestResult:
        context.doing("self-test: the reference and the unchanged engine start")
        with context.engine(context.trees.first_commit, "reference", "selftest-reference") as reference:
            return self_test(
                SelfTestContext(
                    deployment=context.deployment,
                    workspace=context.trees,
                    spec=context.spec,
                    models=context.resolved,
                    pool=context.prompts("selftest"),
                    reference=reference,
                    calibration=context.journal.result("calibrate", Calibration),
                    log_dir=context.logs / "selftest",
                    floor=time_floor(context),
                    recorder=context.recorder("selftest"),
                    on_outcome=lambda outcome: _show(context, outcome),
                    doing=context.doing,
                ),
                cheats,
            )

    done_before = context.journal.finished("selftest")
    result: SelfTestResult = context.journal.step(
        "selftest", lambda: patiently(context, "selftest", run), model=SelfTestResult
    )
    context.tell_again(
        done_before,
        "selftest-end",
        passed=result.passed,
        caught=sum(o.caught for o in result.outcomes),
        cheats=len(result.outcomes),
        null_ratio=result.null_ratio,
        null_low=result.null_low,
        null_high=result.null_high,
        seconds=result.seconds,
    )
    if not done_before and (note := resolution_note(result)):
        context.say("note", level="warning", text=note)
    require_sound(result)


def _show(context: RunContext, outcome: CheatOutcome) -> None:
    context.say("selftest", **outcome.model_dump(mode="json"))


def first_baselines(context: RunContext) -> None:
    """A first look at `ar` and `stock`, before any work; the figures of the report come from the closing session."""
    context.say("phase", name="baselines", detail="ar and stock, first look")
    first = context.trees.first_commit
    variants = [("ar", first, "ar"), ("stock", first, "stock")]
    context.journal.step(
        "baselines", lambda: measure_four(context, "baselines", variants, prompts=whole_batches(context, 3))
    )


def whole_batches(context: RunContext, least: int) -> int:
    """At least so many prompts in whole batches of the deployment's concurrency, and at least two batches."""
    size = context.deployment.regime.concurrency
    return size * max(2, -(-least // size))


def measure_four(
    context: RunContext,
    key: str,
    variants: list[tuple[str, str, str]],
    *,
    prompts: int,
    which: str = "tuning",
    judged: Callable[[Baselines, dict[str, list[Leg]], int], Baselines] | None = None,
) -> dict:
    """Measures named (name, commit, variant) engines round-robin in one session on prompts of the set `which`; JSON-ready.

    `judged` sees the figures, the answers and the largest block size that an engine stated, after the engines have been stopped,
    and says what remains of the figures.
    """
    legs: dict[str, list[Leg]] = {}
    context.doing(f"starting {', '.join(name for name, _, _ in variants)}; then every prompt goes through each in turn")
    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(context.engine(commit, variant, f"{key}-{name}")))
            for name, commit, variant in variants
        ]
        answered = count(1)

        def on_leg(_: str, batch: int, __: float) -> None:
            if next(answered) % len(servers) == 0:
                context.say("prompts", done=(batch + 1) * context.deployment.regime.concurrency, of=prompts)

        result = measure_variants(
            servers,
            context.prompts(key).take(which, prompts),
            settings=context.deployment.measurement,
            regime=context.deployment.regime,
            on_leg=on_leg,
            keep=legs,
        )
        block = max(served_block_size(server.identity) for _, server in servers)
    if judged is not None:
        result = judged(result, legs, block)
    data = result.model_dump(mode="json")
    context.say("baseline", **data)
    return data
