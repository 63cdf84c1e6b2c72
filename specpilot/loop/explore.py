"""Explore: workers propose, each proposal becomes a commit in its own worktree. Nothing is run here.

Proposals are applied in parallel (git writes are serialised by the workspace); measuring happens later, one at a
time per device.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from specpilot.agents import AgentError, ComponentGap, Proposal, RecallWorker, WorkContext, Worker
from specpilot.contracts import AttemptState, Candidate, Claim, GapTable, Reason
from specpilot.journal import AttemptRow
from specpilot.loop.attempts import NOT_MEASURED, NOT_MERGED, advance, reject
from specpilot.loop.context import RunContext
from specpilot.loop.learn import fingerprint, memory_hardware
from specpilot.loop.records import Submitted, WorkerResult
from specpilot.loop.state import mechanism_of
from specpilot.workspace import UnsafeChange

SMALL = 0.25
"""Share of the best proposal's predicted log-ratio below which a proposal waits for a later round."""


def work_context(
    context: RunContext, number: int, base: str, gaps: GapTable, present: list[str], limit: int
) -> WorkContext:
    """What workers may know at the start of a round: no hidden prompt, no secret, no other worker's folder."""
    folder = context.run_dir / "workers"
    folder.mkdir(exist_ok=True)
    regime = context.deployment.regime
    return WorkContext(
        run_id=context.meta.run_id,
        round=number,
        folder=folder,
        tree=context.tree_at(base),
        base_commit=base,
        hardware=memory_hardware(context),
        architecture=context.identity.architecture,
        drafter=context.deployment.drafter.method.value,
        engine=context.spec.name,
        concurrency=regime.concurrency,
        temperature=regime.temperature,
        block_size=context.identity.block_size,
        deployment_fingerprint=fingerprint(context),
        gaps=tuple(component_gaps(gaps)),
        present=tuple(present),
        tried=frozenset(tried_mechanisms(context, number)),
        max_proposals=limit,
        seed=number,
    )


def component_gaps(table: GapTable) -> list[ComponentGap]:
    """The gap table in the workers' words."""
    return [
        ComponentGap(r.component, r.measured_ms, r.bound_ms, r.recoverable_ms, r.expected_gain, r.limit)
        for r in table.rows
    ]


def tried_mechanisms(context: RunContext, before_round: int) -> set[str]:
    """Mechanisms that earlier rounds settled: merged, refused by the gate, or surely no gain.

    One that merely showed no effect may be tried again on a faster engine: what it saves can have been hidden behind
    a bottleneck that has been removed since. Nor is one settled on which the wall clock ran out.
    """
    settled = [row for row in context.journal.attempts() if row.round < before_round and not _open_still(row)]
    return {name for name in map(mechanism_of, settled) if name}


def _open_still(row: AttemptRow) -> bool:
    """The clock ran out on it, or it merely showed no effect."""
    if row.state is AttemptState.superseded and row.detail in (NOT_MEASURED, NOT_MERGED):
        return True
    comparison = (row.data.get("assessment") or {}).get("comparison") or {}
    return row.reason is Reason.no_gain and comparison.get("decision") == "null"


def explore(context: RunContext, number: int, workers: list[Worker], work: WorkContext) -> list[Submitted]:
    """Every proposal of every worker as a submitted candidate (or a rejected attempt), in the workers' order."""
    results: list[Submitted] = []
    for worker in workers:
        result: WorkerResult = context.journal.step(
            f"r{number}/worker/{worker.name}",
            partial(_one_worker, context, number, worker, work),
            model=WorkerResult,
        )
        if result.note:
            context.say("note", text=f"{worker.name}: {result.note}", level="info")
        results += result.attempts
    for item in results:
        if item.candidate is not None:
            advance(context, item.attempt_id, AttemptState.submitted)
        else:
            reject(context, item.attempt_id, item.reason or Reason.does_not_apply, item.detail)
    return results


def _one_worker(context: RunContext, number: int, worker: Worker, work: WorkContext) -> WorkerResult:
    proposals, later = worth_now(worker.plan(work))
    if isinstance(worker, RecallWorker):
        worker.enter(work.run_id, proposals)
    with ThreadPoolExecutor(max_workers=context.deployment.agents.workers) as pool:
        attempts = list(
            pool.map(
                lambda pair: submit(context, number, f"r{number}-{worker.name}-{pair[0]}", pair[1], work.base_commit),
                enumerate(proposals, start=1),
            )
        )
    waiting = [
        f"{p.mechanism or p.component}: a later round, predicted {p.claim.predicted_gain or 1.0:.2f}x" for p in later
    ]
    return WorkerResult(
        worker=worker.name, attempts=attempts, note="; ".join([*getattr(worker, "notes", []), *waiting])
    )


def worth_now(proposals: list[Proposal]) -> tuple[list[Proposal], list[Proposal]]:
    """Splits proposals into those to measure now and those that wait for a faster engine.

    Large levers first: a small effect is dear to measure on a slow engine and is often hidden behind the bottleneck that a
    large one removes. What is predicted to gain less than `SMALL` of the best proposal's log-ratio waits a round; without
    a prediction nobody waits. Nothing is dropped: as soon as no large lever is left, all are measured.
    """
    logs = [math.log(p.claim.predicted_gain) if p.claim.predicted_gain else None for p in proposals]
    best = max((value for value in logs if value is not None), default=0.0)
    now = [value is None or value >= SMALL * best for value in logs]
    pairs = list(zip(proposals, now, strict=True))
    return [p for p, kept in pairs if kept], [p for p, kept in pairs if not kept]


def submit(context: RunContext, number: int, attempt_id: str, proposal: Proposal, base: str) -> Submitted:
    """One proposal as a commit on its own branch. A proposal that does not fit is an attempt's fate, not an error."""
    claim = Claim(**proposal.claim.fields())
    context.journal.create_attempt(
        attempt_id,
        round=number,
        worker=proposal.worker,
        component=proposal.component,
        data={"task": proposal.task, "why": proposal.why, "mechanism": proposal.mechanism},
    )
    advance(context, attempt_id, AttemptState.working)

    def failed(reason: Reason, detail: str) -> Submitted:
        return Submitted(
            attempt_id=attempt_id,
            worker=proposal.worker,
            component=proposal.component,
            why=proposal.why,
            candidate=None,
            reason=reason,
            detail=detail,
        )

    worktree = context.trees.checkout(attempt_id, base)
    try:
        proposal.apply(worktree)
        commit = context.trees.commit_all(attempt_id, proposal.task)
    except AgentError as error:
        return failed(Reason.does_not_apply, error.message)
    except UnsafeChange as error:
        return failed(Reason.outside_editable, error.message)
    if commit == base:
        return failed(Reason.empty_diff, "the proposal changes nothing")
    candidate = Candidate(
        attempt_id=attempt_id,
        worker=proposal.worker,
        base_commit=base,
        commit=commit,
        branch=f"specpilot/{attempt_id}",
        claim=claim,
    )
    context.journal.move_attempt(
        attempt_id,
        context.journal.attempt(attempt_id).state,
        data={"candidate": candidate.model_dump(mode="json")},
    )
    return Submitted(
        attempt_id=attempt_id,
        worker=proposal.worker,
        component=proposal.component,
        why=proposal.why,
        candidate=candidate,
    )
