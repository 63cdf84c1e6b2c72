"""The recall worker: asks the memory what helped in places like this one, and replays it.

It only ever adds candidates. Each is measured and gated like any other, and how often that helped is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specpilot.memory import MemoryStore, Recalled, RecallQuery

from .base import ClaimDraft, PatchEdit, Proposal, WorkContext


@dataclass
class RecallWorker:
    """Proposes stored mechanisms in the memory's order.

    A mechanism whose requirements are not merged yet waits for a later round. What this very deployment on this kind of
    machine has refuted before, or seen no effect of, waits while anything is left that promises as much, and comes last then.
    `notes` says, after `plan`, what was left out and why.
    """

    store: MemoryStore
    name: str = "recall"
    notes: list[str] = field(default_factory=list)

    def plan(self, context: WorkContext) -> list[Proposal]:
        """At most `context.max_proposals` replays, best first. Those that become attempts are for `enter`."""
        self.notes = []
        proposals: list[Proposal] = []
        found = self.store.assess(query_of(context))
        fresh = [i for i in found if not (i.unmet or i.waits_for or i.refuted_on_this or i.name in context.tried)]
        promised = max((item.score for item in fresh), default=0.0)
        for item in found:
            if item.unmet:
                self.notes.append(f"{item.name}: does not fit here: {'; '.join(item.unmet)}")
            elif item.name in context.tried:
                self.notes.append(f"{item.name}: tried in this run already")
            elif item.waits_for:
                self.notes.append(f"{item.name}: waits for {', '.join(item.waits_for)}")
            elif item.refuted_on_this and item.score <= promised:
                self.notes.append(
                    f"{item.name}: tried when nothing else is left that promises as much: this deployment tried it before on such a machine, and it did not gain "
                    f"({item.refuted_on_this})"
                )
            elif len(proposals) >= context.max_proposals:
                self.notes.append(
                    f"{item.name}: left for a later round, {context.max_proposals} are proposed at a time"
                )
            else:
                proposals.append(self._proposal(item))
        return proposals

    def enter(self, run_id: str, proposals: list[Proposal]) -> None:
        """Tell the memory which proposals became attempts: a mechanism counts as recalled once per run, however often."""
        for proposal in proposals:
            self.store.record_recall(run_id, str(proposal.mechanism), tried=False, accepted=False)

    def _proposal(self, item: Recalled) -> Proposal:
        mechanism = item.stored.mechanism
        gain = item.score if item.stored.effects else mechanism.predicted_gain
        return Proposal(
            worker=self.name,
            component=mechanism.component,
            task=f"Replay {mechanism.name}: {mechanism.title}",
            claim=ClaimDraft(
                component=mechanism.component,
                hypothesis=mechanism.hypothesis,
                predicted_gain=gain,
                counters=tuple(mechanism.counters),
                forbidden_counters=tuple(mechanism.forbidden_counters),
                mechanism=mechanism.name,
            ),
            edit=PatchEdit(mechanism.patch),
            why=item.why,
            mechanism=mechanism.name,
        )


def query_of(context: WorkContext) -> RecallQuery:
    """What the memory needs to know of a round."""
    return RecallQuery(
        hardware=context.hardware,
        architecture=context.architecture,
        drafter=context.drafter,
        engine=context.engine,
        concurrency=context.concurrency,
        temperature=context.temperature,
        recoverable_ms={gap.component: gap.recoverable_ms for gap in context.gaps},
        present=list(context.present),
        deployment_fingerprint=context.deployment_fingerprint,
    )
