"""`specpilot attempt open | submit`: a person, or any coding agent, takes part with a worktree and a claim.

Works on a run that is at rest (the attempt is measured at once) and on one that is busy (it waits for the next
round). The outsider meets the same gate as everybody.
"""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import asdict
from pathlib import Path

from specpilot.agents import ClaimDraft, parse_claim, render_brief
from specpilot.agents.external import MechanismDraft
from specpilot.contracts import AttemptState, Candidate, Claim
from specpilot.errors import UsageError
from specpilot.loop.attempts import advance, settle
from specpilot.loop.context import RunContext
from specpilot.loop.explore import component_gaps, work_context
from specpilot.loop.learn import learn
from specpilot.loop.observe import no_gaps
from specpilot.loop.records import Assessment, Merged
from specpilot.loop.state import head_of, merged_mechanisms, present_gaps
from specpilot.run_lock import RunLock

MOST_SEARCHED = 1 << 23
"""Bytes of a file in which a counter's name is looked for."""
JUDGED_ON = {AttemptState.submitted, AttemptState.measured, AttemptState.gated, AttemptState.accepted}
"""States in which an attempt is owed something: what was measured is in the journal and is not measured again."""


def open_attempt(context: RunContext, component: str, task: str) -> tuple[str, Path, str]:
    """A fresh worktree at the best commit: attempt id, folder, and the brief to read."""
    base = context.trees.best()
    table = present_gaps(context)
    known = [row.component for row in table.rows] if table else []
    if known and component != "*" and component not in known:
        raise UsageError(f"no component {component!r} in the cost model", f"one of: {', '.join(known)}, or '*'.")
    attempt_id = context.journal.create_numbered_attempt(
        "x", worker="external", component=component, data={"task": task, "base_commit": base}
    ).id
    worktree = context.trees.worktree(attempt_id, base)
    advance(context, attempt_id, AttemptState.working)
    brief = render_brief(
        attempt_id=attempt_id,
        run=context.meta.run_id,
        worktree=worktree,
        task=task,
        component=component,
        gaps=component_gaps(table) if table else [],
        round_ms=table.round_ms if table else 0.0,
        editable=context.spec.editable_paths.include,
        excluded=context.spec.editable_paths.exclude,
        merged=merged_mechanisms(context),
        failed=[
            f"{row.id} ({row.component}): {row.reason}: {row.detail[:160]}"
            for row in context.journal.attempts(state=AttemptState.rejected)
        ],
        known_counters=known_counters(context),
    )
    (worktree.parent / f"{attempt_id}.brief.txt").write_text(brief, encoding="utf-8")
    return attempt_id, worktree, brief


def submit_attempt(context: RunContext, attempt_id: str, claim_file: Path) -> Assessment | None:
    """Commits the worktree, then measures, judges and merges it; None when the run is busy and it has to wait.

    One that was left waiting by a run that has ended is judged as it was submitted; one whose judging was cut off is judged on.
    """
    row = context.journal.attempt(attempt_id)
    cut_off = row.state in JUDGED_ON and context.journal.finished(f"x/{attempt_id}")
    if row.worker == "external" and (row.state is AttemptState.submitted or cut_off):
        return _judge_or_wait(context, Candidate.model_validate(row.data["candidate"]))
    if row.worker != "external" or row.state is not AttemptState.working:
        commit = row.data.get("candidate", {}).get("commit")
        hint = f", and `git cherry-pick {commit[:12]}` in its worktree brings this change over" if commit else ""
        raise UsageError(
            f"attempt {attempt_id} is {row.state.value} and cannot be submitted", f"open another one{hint}."
        )
    submission = parse_claim(claim_file)
    _require_memorable(context, submission.remember)
    _require_countable(context, submission.claim, context.trees.worktrees / attempt_id)
    base = str(row.data["base_commit"])
    commit = context.trees.commit_all(attempt_id, submission.claim.hypothesis.splitlines()[0][:72])
    if commit == base:
        raise UsageError(f"attempt {attempt_id} changes nothing", f"edit {context.trees.worktrees / attempt_id} first.")
    candidate = Candidate(
        attempt_id=attempt_id,
        worker="external",
        base_commit=base,
        commit=commit,
        branch=f"specpilot/{attempt_id}",
        claim=Claim(**submission.claim.fields()),
    )
    remember = None
    if submission.remember is not None:
        remember = asdict(submission.remember) | {
            "preconditions": submission.remember.preconditions and submission.remember.preconditions.model_dump()
        }
    data = {"candidate": candidate.model_dump(mode="json"), "remember": remember}
    advance(context, attempt_id, AttemptState.submitted, data=data)
    return _judge_or_wait(context, candidate)


def known_counters(context: RunContext) -> list[str]:
    """Counters that the best engine has: what `engine.toml` declares, and what the merged changes proved themselves by."""
    names = dict.fromkeys(context.spec.counters)
    for row in context.journal.attempts(state=AttemptState.merged):
        names |= dict.fromkeys(((row.data.get("candidate") or {}).get("claim") or {}).get("counters") or [])
    return list(names)


def _require_countable(context: RunContext, claim: ClaimDraft, worktree: Path) -> None:
    """Raises UsageError, while the claim can still be mended, for a counter that no file of the attempt's engine could count."""
    known = known_counters(context)
    for counter in dict.fromkeys(claim.counters):
        if counter not in known and not occurs(counter, worktree):
            near = difflib.get_close_matches(counter, known, 1)
            raise UsageError(
                f"the claim names the counter {counter!r}, which the engine does not have: its name is in no file of {worktree}",
                (f"did you mean {near[0]!r}? " if near else "")
                + f"known: {', '.join(known)}; a new one is counted, and its name spelt out, in your code.",
            )


def occurs(text: str, folder: Path) -> bool:
    """Whether a regular file of an ordinary size under `folder`, git's own aside, holds `text`."""
    wanted = text.encode()
    for path in folder.rglob("*"):
        if ".git" not in path.relative_to(folder).parts and not path.is_symlink() and path.is_file():
            with contextlib.suppress(OSError):
                if path.stat().st_size <= MOST_SEARCHED and wanted in path.read_bytes():
                    return True
    return False


def _require_memorable(context: RunContext, wanted: MechanismDraft | None) -> None:
    """Raises UsageError, before anything is measured, where the memory could not keep the change as it is to be remembered."""
    if wanted is None:
        return
    known = {item.mechanism.name: item for item in context.memory.mechanisms()}
    if missing := [name for name in wanted.requires if name not in known]:
        raise UsageError(
            f"remember.requires names what the memory does not hold: {', '.join(missing)}",
            "`specpilot memory inspect` lists the names.",
        )
    taken = known.get(wanted.name)
    if taken is not None and (taken.origin == "seed" or taken.status == "verified"):
        what = (
            "a mechanism that comes with SpecPilot"
            if taken.origin == "seed"
            else "verified already, for another change"
        )
        raise UsageError(f"remember.name: {wanted.name} is {what}", "give the change a name of its own.")
    if any(item.name == wanted.name for name in wanted.requires for item in context.memory.with_requirements(name)):
        raise UsageError(f"remember.requires: what {wanted.name} requires would require it", "leave it out.")


def _judge_or_wait(context: RunContext, candidate: Candidate) -> Assessment | None:
    if RunLock.holder(context.run_dir):
        return None
    with RunLock(context.run_dir):
        return judge_waiting(context, candidate)


def finish_judging(context: RunContext) -> None:
    """Goes on with attempts whose judging at rest was cut off: what was measured is merged, what was merged becomes the head."""
    for row in context.journal.attempts():
        key = f"x/{row.id}"
        if row.worker != "external" or not context.journal.finished(key):
            continue
        if row.state in JUDGED_ON:
            judge_waiting(context, Candidate.model_validate(row.data["candidate"]))
        elif row.state is AttemptState.merged and context.journal.finished(f"{key}/merge"):
            step: Merged = context.journal.result(f"{key}/merge", Merged)
            if step.merged and context.trees.best() == step.before:
                context.trees.set_head(step.after)


def judge_waiting(context: RunContext, candidate: Candidate) -> Assessment:
    """Measures and judges a submitted attempt of a run at rest, lays it on the head if it gains, and learns."""
    from specpilot.loop.assess import assess
    from specpilot.loop.merge import merge_one

    context.warn_unconfined()
    head = head_of(context)
    assessment = assess(context, f"x/{candidate.attempt_id}", candidate, candidate.base_commit)
    settle(context, candidate, assessment)
    present = merged_mechanisms(context)
    if assessment.accepted:
        step: Merged = merge_one(context, f"x/{candidate.attempt_id}/merge", candidate, assessment, head)
        if step.merged:
            context.trees.set_head(step.after)
    table = present_gaps(context) or no_gaps(head)
    learn(context, 0, work_context(context, 0, head, table, present, 1), [(candidate, assessment)])
    return assessment


__all__ = ["ClaimDraft", "judge_waiting", "open_attempt", "submit_attempt"]
