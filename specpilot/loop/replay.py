"""Replay: what `specpilot memory verify` asks of the loop. Intervals, fit of a patch, and a fresh measurement.

A fresh measurement is a small run of its own: checkpoints, gate and baselines are prepared as for `optimize`, then
one attempt goes the way of every attempt. Nothing is merged; only the memory learns.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import typer

from specpilot.agents import ClaimDraft, DoesNotApplyError, PatchEdit, Proposal
from specpilot.agents.recall import query_of
from specpilot.contracts import AttemptState
from specpilot.deployment import find_deployment, load_deployment
from specpilot.errors import NOT_ACCEPTED, UsageError
from specpilot.evaluation.stats import level_of
from specpilot.loop.assess import assess
from specpilot.loop.attempts import advance, reject, settle, supersede
from specpilot.loop.context import RunContext
from specpilot.loop.explore import submit, work_context
from specpilot.loop.learn import effect_of, fingerprint
from specpilot.loop.records import Assessment
from specpilot.loop.run import open_run, optimize
from specpilot.loop.state import present_gaps
from specpilot.memory import Effect, Mechanism
from specpilot.memory.recall import unmet_preconditions
from specpilot.paths import runs_dir
from specpilot.run_lock import RunLock
from specpilot.workspace import Workspace

ENGINES = Path(__file__).resolve().parents[1] / "engines"
ATTEMPT = "replay-1"
CENTRED = 1e-6
"""Relative difference allowed between the two half-widths of a stored interval, which is symmetric in the logarithm."""


class LoopReplay:
    """`specpilot.memory.cli.Loop`."""

    def interval_problem(self, effect: Effect) -> str:
        """Empty when some level gives exactly this interval from the effect's samples (the level is not stored)."""
        logs = [math.log(sample) for sample in effect.samples]
        shown = f"interval [{effect.low:.3f}, {effect.high:.3f}]"
        if effect.low == 0.0 or math.isinf(effect.high):
            open_both = effect.low == 0.0 and math.isinf(effect.high)
            return "" if open_both else f"{shown} is open on one side only"
        below, above = (math.log(effect.ratio / effect.low), math.log(effect.high / effect.ratio))
        if abs(below - above) > CENTRED * max(above, 1e-3):
            return f"{shown} is not centred on {effect.ratio:.3f}x"
        return "" if level_of(logs, above) is not None else f"{shown} does not follow from its {len(logs)} samples"

    def fit(self, chain: list[Mechanism]) -> tuple[bool | None, str]:
        """Whether the patches apply, one on the other, to the installed engine; None where there is no such engine."""
        engine = chain[-1].preconditions.engine or "slim"
        if not (ENGINES / engine / "engine.toml").is_file():
            return None, f"not tried: the engine {engine} does not come with SpecPilot"
        with tempfile.TemporaryDirectory(prefix="specpilot-fit-") as folder:
            trees = Workspace.create(Path(folder), ENGINES / engine)
            try:
                lay(trees, chain)
            except DoesNotApplyError as error:
                return False, f"does not fit the installed engine {engine}: {error.message}"
        return True, f"applies to the installed engine {engine}"

    def replay(self, chain: list[Mechanism], deployment: str, url: str) -> int:
        """0: measured again and accepted; 10: not; else why the run could not be prepared."""
        path = find_deployment(deployment)
        chosen = load_deployment(path, ["budget.rounds=0"])
        folder = runs_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-replay-{chain[-1].name}"
        prepared = optimize(chosen, folder, source=path, memory=url)
        if prepared.exit_code:
            return prepared.exit_code
        with open_run(folder) as context, RunLock(folder):
            try:
                assessment = measure_mechanism(context, chain)
            finally:
                context.trees.prune_unknown(set())
            typer.echo(outcome_text(context, chain[-1], assessment))
        typer.echo(f"run: {folder}")
        return 0 if assessment.accepted else NOT_ACCEPTED


def lay(trees: Workspace, chain: list[Mechanism]) -> str:
    """A commit with the patches of `chain` on the engine as found. Raises DoesNotApplyError."""
    worktree = trees.checkout("replay-base", trees.first_commit)
    commit = trees.first_commit
    for mechanism in chain:
        PatchEdit(mechanism.patch).apply(worktree)
        before, commit = commit, trees.commit_all("replay-base", f"Replay {mechanism.name}")
        if commit == before:
            raise DoesNotApplyError(f"{mechanism.name} changes nothing: the engine has it already")
    return commit


def measure_mechanism(context: RunContext, chain: list[Mechanism]) -> Assessment:
    """The last of `chain` on top of the others as one attempt of the run; its effect goes to the memory."""
    mechanism = chain[-1]
    table = present_gaps(context)
    assert table is not None, "a run of no rounds profiles the stock engine"
    base = lay(context.trees, chain[:-1])
    work = work_context(context, 0, base, table, [item.name for item in chain[:-1]], 1)
    if unmet := unmet_preconditions(mechanism.preconditions, query_of(work)):
        raise UsageError(f"{mechanism.name} does not fit {context.deployment.name}: {'; '.join(unmet)}")
    item = submit(context, 0, ATTEMPT, _proposal(mechanism), base)
    if item.candidate is None:
        assert item.reason is not None
        reject(context, ATTEMPT, item.reason, item.detail)
        raise UsageError(f"{mechanism.name}: {item.reason}: {item.detail}", "`specpilot memory verify` without --run.")
    advance(context, ATTEMPT, AttemptState.submitted)
    assessment = assess(context, f"replay/{ATTEMPT}", item.candidate, base)
    settle(context, item.candidate, assessment)
    if assessment.accepted:
        supersede(context, ATTEMPT, "measured for the memory, not to be merged")
    if assessment.comparison is not None:
        context.memory.record_effect(mechanism.name, effect_of(context, 0, item.candidate, assessment))
    return assessment


def outcome_text(context: RunContext, mechanism: Mechanism, assessment: Assessment) -> str:
    """What the new measurement says beside the stored ones."""
    now = assessment.comparison
    words = "confirmed" if assessment.accepted else f"not confirmed ({assessment.reason}: {assessment.detail})"
    seen = f"{now.ratio:.3f}x [{now.low:.3f}, {now.high:.3f}] over {len(now.pairs)} pairs" if now else "not measured"
    stored = context.memory.get(mechanism.name).effects
    same = [e for e in stored if e.run != context.meta.run_id and e.deployment_fingerprint == fingerprint(context)]
    before = (
        ", ".join(f"{e.ratio:.3f}x [{e.low:.3f}, {e.high:.3f}]" for e in same) or "none with these weights and load"
    )
    return f"measured again on {context.deployment.name}: {seen}: {words}; stored before: {before}"


def _proposal(mechanism: Mechanism) -> Proposal:
    claim = ClaimDraft(
        component=mechanism.component,
        hypothesis=mechanism.hypothesis,
        predicted_gain=mechanism.predicted_gain,
        counters=tuple(mechanism.counters),
        forbidden_counters=tuple(mechanism.forbidden_counters),
        mechanism=mechanism.name,
    )
    task = f"Replay {mechanism.name}: {mechanism.title}"
    return Proposal("replay", mechanism.component, task, claim, PatchEdit(mechanism.patch), mechanism=mechanism.name)
