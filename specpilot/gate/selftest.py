"""The gate tests itself before round 1: planted cheats must be rejected with a right reason, A/A pairs must be null.

A gate that lets one of them pass, or that refuses the unchanged engine, may judge nothing: `require_sound` then ends
the run. The A/A pair and the honest control run alone on the machine; cheats, which are not timed for a score, run
`parallel` at a time with their share of the threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specpilot.contracts import Calibration, Comparison, Leg, Reason
from specpilot.cores import usable_cores
from specpilot.deployment import Deployment, MeasurementSettings
from specpilot.engine_tree import EngineSpec
from specpilot.errors import InfrastructureError
from specpilot.evaluation.compare import compare
from specpilot.evaluation.errors import CandidateFailed
from specpilot.evaluation.legs import accepted_length
from specpilot.evaluation.prompts import Prompt, PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.evaluation.stats import Interval
from specpilot.gate.cheats.corpus import Cheat, load_cheats, select
from specpilot.gate.errors import GateUnsoundError
from specpilot.gate.policy import policy_of
from specpilot.gate.records import CheatOutcome, GatePolicy, SelfTestResult, TimeFloor
from specpilot.gate.trial import Bench, timed_leg, try_cheat, try_honest
from specpilot.models import ResolvedModels
from specpilot.words import count
from specpilot.workspace import Workspace

TOKENS = 32
"""New tokens per answer in the self-test."""
CHOSEN_FROM = 24
"""The shortest prompts of that many are used: they are forced through the reference again and again."""
AA_ALPHA = 0.01
"""Level of the A/A pairs' interval: one false alarm in a hundred runs, however often it is looked at."""
AA_CLOSE = 1.10
"""The A/A pairs go on until they tell differences of this ratio apart from none ..."""
AA_MOST_PAIRS = 12
"""... or until there are so many of them ..."""
AA_SECONDS = 40.0
"""... or so much time is spent. What they could not tell apart then is said; it does not end a run, a noisy laptop is no error."""

MACHINE = (Reason.start_failed, Reason.timed_out, Reason.crashed, Reason.resource_limit)
"""Reasons that a busy machine can give as well as a cheat: tried once more."""


@dataclass(frozen=True)
class SelfTestContext:
    """What the self-test works with. `reference` is started and stays so."""

    deployment: Deployment
    workspace: Workspace
    spec: EngineSpec
    models: ResolvedModels
    pool: PromptPool
    reference: EngineServer
    calibration: Calibration
    log_dir: Path
    floor: TimeFloor | None = None
    recorder: Callable[[int, int, float], None] | None = None
    parallel: int = 2
    aa_pairs: int = 4
    """Fewest pairs of the A/A comparison; 0 leaves it out (tests)."""
    on_outcome: Callable[[CheatOutcome], None] | None = None
    doing: Callable[[str], None] = lambda text: None
    """Told what begins."""


def self_test(context: SelfTestContext, cheats: str | Iterable[str] = "quick") -> SelfTestResult:
    """Run the self-test. `cheats`: `quick`, `all`, `none`, or ids.

    Returns the record, sound or not; `require_sound` turns an unsound one into GateUnsoundError. Raises EngineError when the stock
    engine itself fails: infrastructure.
    """
    began = time.monotonic()
    bench = make_bench(context)
    base_leg, honest, comparison = _alone(context, bench)
    chosen = _select(context, cheats, base_leg, bench.policy)
    bench = replace(bench, base_legs=[base_leg]).with_threads(_threads(context.deployment) // context.parallel)
    context.doing(f"self-test: {count(len(chosen), 'planted cheat')}, {context.parallel} at a time")
    outcomes = _run_cheats(context, bench, chosen)
    result = SelfTestResult(
        passed=all(o.caught for o in [*outcomes, *honest]),
        outcomes=outcomes,
        honest=honest,
        null_ratio=comparison.ratio if comparison else None,
        null_low=comparison.low if comparison else None,
        null_high=comparison.high if comparison else None,
        null_decision=comparison.decision if comparison else "",
        null_pairs=comparison.pairs if comparison else [],
        min_effect=context.deployment.measurement.min_effect,
        seconds=time.monotonic() - began,
    )
    return result.model_copy(update={"passed": False}) if result.biased else result


def require_sound(result: SelfTestResult) -> None:
    """Raise GateUnsoundError (exit code 7) that names what was judged wrongly."""
    if result.passed:
        return
    wrong = [
        f"planted cheat '{o.cheat}': expected {' or '.join(o.expected)}, got {o.got or 'no rejection'} ({o.evidence})"
        for o in result.outcomes
        if not o.caught
    ]
    wrong += [f"the unchanged engine was rejected: {o.got} ({o.evidence})" for o in result.honest if not o.caught]
    if result.biased:
        wrong.append(
            f"the same commit against itself came out as different: "
            f"{result.null_ratio:.3f} [{result.null_low:.3f}, {result.null_high:.3f}]"
        )
    raise GateUnsoundError(
        "the gate's self-test failed: " + "; ".join(wrong),
        "no candidate is judged by a gate that fails its own test; see docs/gate.md and the engine logs of the run.",
    )


def make_bench(context: SelfTestContext) -> Bench:
    """The bench of a self-test: short answers to the four shortest of a batch of tuning prompts."""
    policy = policy_of(context.deployment.gate).model_copy(
        update={"hidden_tokens": TOKENS, "natural_tokens": TOKENS, "stop_after_violations": 1}
    )
    prompts = sorted(context.pool.take("tuning", CHOSEN_FROM), key=lambda prompt: len(prompt.ids))
    return Bench(
        deployment=context.deployment,
        workspace=context.workspace,
        spec=context.spec,
        models=context.models,
        reference=context.reference,
        calibration=context.calibration,
        policy=policy,
        floor=context.floor,
        log_dir=context.log_dir,
        recorder=context.recorder,
        prompts=prompts[:4],
        temperature=context.deployment.regime.temperature,
    )


def _select(context: SelfTestContext, which: str | Iterable[str], base: Leg, policy: GatePolicy) -> list[Cheat]:
    return select(
        load_cheats(),
        which,
        acceptance=(accepted_length([base]) or 1.0) > policy.speculation_off_length,
        speculation=context.models.drafter != "none",
        sampling=context.deployment.regime.temperature > 0.0,
        floor=context.floor is not None,
    )


def _alone(context: SelfTestContext, bench: Bench) -> tuple[Leg, list[CheatOutcome], Comparison | None]:
    """Base leg, honest control and A/A pair, with the reference asleep while anything is timed."""
    commit = context.workspace.first_commit
    tree = context.workspace.checkout("self-test-base", commit)
    try:
        with bench.server("base", tree, commit) as base:
            context.reference.freeze()
            try:
                timed_leg(base, bench, "base")  # warm-up
                leg = timed_leg(base, bench, "base")
                comparison = _a_against_a(context, bench, base, tree, commit) if context.aa_pairs else None
            finally:
                context.reference.thaw()
            context.doing("self-test: the unchanged engine as a candidate; it must pass")
            honest = [try_honest(base, replace(bench, base_legs=[leg]))]
            if honest[0].got in MACHINE:
                raise InfrastructureError(f"the unchanged engine failed: {honest[0].evidence}", "see the engine logs")
    finally:
        context.workspace.remove("self-test-base")
    return leg, honest, comparison


def _a_against_a(context: SelfTestContext, bench: Bench, base: EngineServer, tree: Path, commit: str) -> Comparison:
    fewest = max(2, context.aa_pairs)
    settings = MeasurementSettings(min_pairs=fewest, max_pairs=max(fewest, AA_MOST_PAIRS), output_tokens_timed=TOKENS)
    context.doing(
        f"self-test: the unchanged engine against itself, {fewest} to {settings.max_pairs} pairs, about {AA_SECONDS:.0f} s at most"
    )
    base.freeze()
    try:
        with bench.server("aa", tree, commit) as other:
            base.thaw()
            comparison, _ = compare(
                base,
                other,
                _stream(context.pool),
                settings,
                AA_ALPHA,
                regime=context.deployment.regime,
                settled=partial(says_enough, min_effect=context.deployment.measurement.min_effect),
                max_seconds=AA_SECONDS,
            )
    except CandidateFailed as error:  # both sides are the stock engine: nobody's candidate failed
        raise InfrastructureError(
            f"the A/A pair could not be measured: {error.detail}", "see the engine logs"
        ) from error
    return comparison


def says_enough(interval: Interval, min_effect: float) -> bool:
    """The A/A pairs tell `AA_CLOSE` apart from none, or show a bias of `min_effect` or more."""
    close, bias = math.log(AA_CLOSE), math.log(min_effect)
    return (-close <= interval.low and interval.high <= close) or interval.low > bias or interval.high < -bias


def resolution_note(result: SelfTestResult) -> str:
    """What a reader must know of A/A pairs that told less apart than they should have; empty where they did or there were none."""
    told = result.told_apart
    if told is None or told <= AA_CLOSE:
        return ""
    differences = f"differences below {told:.2f}x" if math.isfinite(told) else "any difference"
    return (
        f"this session could not tell {differences} apart from none: the unchanged engine against itself came "
        f"out as {result.null_ratio:.2f}x [{result.null_low:.2f}, {result.null_high:.2f}] over {len(result.null_pairs)} pairs, "
        f"{AA_CLOSE:.2f}x is aimed at; a smaller gain rests on its own pairs, not on a shown absence of bias"
    )


def _stream(pool: PromptPool) -> Iterator[Prompt]:
    return pool.stream("tuning")


def _run_cheats(context: SelfTestContext, bench: Bench, cheats: Sequence[Cheat]) -> list[CheatOutcome]:
    def one(cheat: Cheat) -> CheatOutcome:
        outcome = try_cheat(cheat, bench)
        if not outcome.caught and outcome.got in MACHINE:
            outcome = try_cheat(cheat, bench)
        if context.on_outcome is not None:
            context.on_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(max_workers=max(1, context.parallel)) as pool:
        return list(pool.map(one, cheats))


def _threads(deployment: Deployment) -> int:
    return deployment.engine.threads or usable_cores()
