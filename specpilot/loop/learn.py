"""Learn: what a round found out goes to memory with its evidence, whether it worked or not."""

from __future__ import annotations

from typing import Any

from specpilot.agents import ClaimDraft, WorkContext, mechanism_from
from specpilot.agents.external import MechanismDraft
from specpilot.contracts import Candidate, Claim, GapTable
from specpilot.loop.context import RunContext
from specpilot.loop.machine import environment_of, hardware_of
from specpilot.loop.records import Assessment
from specpilot.loop.state import mechanism_of, merge_records, profile_of
from specpilot.memory import Effect, Hardware, InvalidMechanismError, NoSuchMechanismError
from specpilot.memory.records import sha256_json


def memory_hardware(context: RunContext) -> Hardware:
    """This machine in the memory's words."""
    hardware = hardware_of(context)
    kind = "cuda" if hardware.kind == "gpu" else hardware.kind
    return Hardware(kind=kind, isa=list(hardware.isa), name=hardware.name)


def fingerprint(context: RunContext) -> str:
    """Identity of what is optimised: weights, regime, engine. Budgets and names do not enter."""
    deployment = context.deployment
    return sha256_json(
        {
            "target": context.identity.target_sha256,
            "drafter": context.identity.drafter_sha256 or context.identity.drafter,
            "regime": deployment.regime.model_dump(mode="json"),
            "engine": context.spec.name,
        }
    )


def learn(context: RunContext, number: int, work: WorkContext, results: list[tuple[Candidate, Assessment]]) -> None:
    """Writes every outcome of a round to memory. Safe to repeat: an effect is stored once.

    What the memory cannot hold (a patch in no known encoding, a name that it does not know) is said and left out: the engine
    was measured and judged without the memory, and a resumed run would only meet the same again.
    """
    for candidate, assessment in results:
        replayed = candidate.claim.mechanism
        if replayed and candidate.worker == "recall":
            ratio = assessment.comparison.ratio if assessment.comparison and assessment.accepted else None
            context.memory.record_recall(
                context.meta.run_id, replayed, tried=True, accepted=assessment.accepted, ratio=ratio
            )
        if assessment.comparison is None:
            continue
        try:
            name = replayed or _remember(context, candidate, work)
            context.memory.record_effect(name, effect_of(context, number, candidate, assessment))
        except (InvalidMechanismError, NoSuchMechanismError, ValueError) as error:
            why = str(error).splitlines()[0]
            context.say("note", level="warning", text=f"{candidate.attempt_id} is not remembered: {why}")


def _remember(context: RunContext, candidate: Candidate, work: WorkContext) -> str:
    """A change that no mechanism stands for yet becomes one; whether it is verified or refuted, its effect says."""
    row = context.journal.attempt(candidate.attempt_id)
    data = row.data
    remember = data.get("remember")
    draft = MechanismDraft(**{**remember, "requires": tuple(remember["requires"])}) if remember else None
    claim = candidate.claim
    mechanism = mechanism_from(
        ClaimDraft(
            claim.component,
            claim.hypothesis,
            claim.predicted_gain,
            tuple(claim.counters),
            tuple(claim.forbidden_counters),
        ),
        context.trees.diff(candidate.base_commit, candidate.commit),
        work,
        task=str(data.get("task") or ""),
        remember=draft,
        first_tree=context.tree_at(context.trees.first_commit),
    )
    context.memory.add(mechanism, origin=context.meta.run_id)
    if mechanism_of(row) is None:  # or recall would offer the engine what is in it already
        context.journal.move_attempt(row.id, row.state, reason=row.reason, data={"mechanism": mechanism.name})
    return mechanism.name


def learn_realised(context: RunContext) -> None:
    """Adds to the memory what profiles taken since show of merged changes: the component's time in the engine after each.

    Only where the engines before and after it were both profiled: between these two nothing else was merged. Safe to repeat.
    """
    for step in merge_records(context):
        row = context.journal.attempt(step.attempt_id)
        name, candidate = mechanism_of(row), row.data.get("candidate")
        before, after = profile_of(context, step.before), profile_of(context, step.after)
        if name is None or candidate is None or before is None or after is None:
            continue
        found = component_ms(after, row.component)
        if found is not None:
            commit = Candidate.model_validate(candidate).commit
            context.memory.record_realised(name, run=context.meta.run_id, commit=commit, realised_ms=found[0])


def component_ms(table: GapTable, component: str) -> tuple[float, float] | None:
    """(measured, bound) milliseconds per round of a component, of all that a prefix such as `target` covers, or of the round (`*`)."""
    rows = [r for r in table.rows if component in ("*", r.component) or r.component.startswith(f"{component}.")]
    return (sum(r.measured_ms for r in rows), sum(r.bound_ms for r in rows)) if rows else None


def predicted_ms(table: GapTable | None, claim: Claim) -> float | None:
    """What the claimed gain would leave of its component if all of it were taken there, but no less than the component's bound.

    None without a profile of the engine before, a prediction, or such a component.
    """
    found = component_ms(table, claim.component) if table is not None else None
    if table is None or found is None or claim.predicted_gain is None:
        return None
    measured, bound = found
    saved = table.profiled_ms * (1.0 - 1.0 / claim.predicted_gain)
    return max(min(bound, measured), measured - saved)


def effect_of(context: RunContext, number: int, candidate: Candidate, assessment: Assessment) -> Effect:
    """A measured assessment in the memory's words."""
    comparison = assessment.comparison
    assert comparison is not None
    gate: dict[str, Any] = {}
    if assessment.verdict is not None:
        gate = assessment.verdict.model_dump(mode="json", exclude={"checks"})
        gate["checks"] = {check.name: check.passed for check in assessment.verdict.checks}
    return Effect(
        deployment=context.deployment.name,
        deployment_fingerprint=fingerprint(context),
        hardware=memory_hardware(context),
        ratio=comparison.ratio,
        low=comparison.low,
        high=comparison.high,
        accepted_length_before=comparison.base.accepted_length,
        accepted_length_after=comparison.candidate.accepted_length,
        predicted_gain=candidate.claim.predicted_gain,
        predicted_ms=predicted_ms(profile_of(context, candidate.base_commit), candidate.claim),
        samples=comparison.pairs,
        gate=gate,
        environment=environment_of(context),
        run=context.meta.run_id,
        round=number,
        worker=candidate.worker,
        commit=candidate.commit,
        outcome="verified" if assessment.accepted else "refuted",
        reason="" if assessment.accepted else str(assessment.reason or "no-gain"),
    )
