"""One planted cheat (or an honest control) through the very checks that judge real candidates.

Plants it on a worktree, starts it, gathers only the evidence its stage needs, and asks `judge`. Started servers are stopped on
every way out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specpilot.contracts import Calibration, Candidate, Claim, Leg, Reason, Verdict
from specpilot.deployment import Deployment
from specpilot.engine_tree import EngineSpec
from specpilot.evaluation.errors import CandidateFailed, blame_candidate
from specpilot.evaluation.legs import run_leg
from specpilot.evaluation.prompts import Prompt
from specpilot.evaluation.server import EngineServer
from specpilot.gate.cheats.corpus import Cheat, Stage, plant
from specpilot.gate.diffcheck import check_diff
from specpilot.gate.hidden import eos_token_ids, probe_replay, served_block_size, vocab_size
from specpilot.gate.records import CheatOutcome, DiffReport, GatePolicy, HiddenPass, TimeFloor
from specpilot.gate.verdict import judge, rejection
from specpilot.models import ResolvedModels
from specpilot.workspace import Workspace

VARIANT = "final"
EVERY_STAGE = frozenset({Stage.timed, Stage.hidden, Stage.natural, Stage.replay})


@dataclass(frozen=True)
class Bench:
    """What all trials of one self-test share."""

    deployment: Deployment
    workspace: Workspace
    spec: EngineSpec
    models: ResolvedModels
    reference: EngineServer
    calibration: Calibration
    policy: GatePolicy
    floor: TimeFloor | None
    log_dir: Path
    recorder: Callable[[int, int, float], None] | None
    prompts: Sequence[Prompt]
    """Short prompts, the same for all trials: every trial is a process of its own and has seen none of them."""
    base_legs: Sequence[Leg] = ()
    temperature: float = 0.0

    def server(self, name: str, tree: Path, commit: str) -> EngineServer:
        """An engine of `commit`, not started."""
        return EngineServer(
            tree=tree,
            spec=self.spec,
            variant=VARIANT,
            commit=commit,
            models=self.models,
            deployment=self.deployment,
            log_dir=self.log_dir / name,
            recorder=self.recorder,
        )

    def with_threads(self, threads: int) -> Bench:
        """The same bench whose engines use `threads` threads each."""
        engine = self.deployment.engine.model_copy(update={"threads": max(1, threads)})
        deployment = self.deployment.model_copy(update={"engine": engine})
        deployment._folder = self.deployment._folder
        return replace(self, deployment=deployment)


def timed_leg(server: EngineServer, bench: Bench, side: str) -> Leg:
    """The bench's first three prompts, one at a time, greedy."""
    return run_leg(server, bench.prompts[:3], concurrency=1, max_new_tokens=bench.policy.hidden_tokens, side=side)


def gather(server: EngineServer, bench: Bench, stages: frozenset[Stage]) -> tuple[list[Leg], HiddenPass]:
    """Evidence of a started engine: timed legs of both sides, and a hidden pass of the stages asked for.

    Raises CandidateFailed when the engine does not answer.
    """
    policy, prompts = bench.policy, bench.prompts
    tokens, limit = policy.hidden_tokens, policy.natural_tokens
    legs: list[Leg] = []
    hidden: list[Leg] = []
    natural = sampled = replay = None
    with blame_candidate():
        if Stage.timed in stages:
            legs = [*bench.base_legs, timed_leg(server, bench, "candidate")]
        if Stage.hidden in stages:
            hidden = [run_leg(server, prompts[:4], concurrency=4, max_new_tokens=tokens, side="candidate")]
        if Stage.natural in stages:
            natural = run_leg(
                server, prompts[:2], concurrency=2, max_new_tokens=limit, side="candidate", ignore_eos=False
            )
        if Stage.sampled in stages:
            # No seed, as in the hidden pass: a shared one would give all four answers the same random numbers.
            sampled = run_leg(
                server,
                prompts[:4],
                concurrency=2,
                max_new_tokens=tokens,
                temperature=bench.temperature,
                side="candidate",
            )
        if Stage.replay in stages:
            replay = probe_replay(server.client, prompts[0], tokens)
    return legs, HiddenPass(
        legs=hidden,
        natural=natural,
        sampled=sampled,
        temperature=bench.temperature,
        replay=replay,
        requested_tokens=tokens,
        natural_limit=limit,
        eos_token_ids=eos_token_ids(bench.models.target_dir),
        vocab_size=vocab_size(bench.models.target_dir),
        block_size=served_block_size(server.identity),
        startup_s=server.startup_s,
        server_info=server.identity,
    )


def try_engine(
    name: str, tree: Path, candidate: Candidate, bench: Bench, stages: frozenset[Stage], diff: DiffReport | None
) -> Verdict:
    """Start `tree`, gather evidence, stop it, judge."""
    if diff is not None and not diff.passed:
        return rejection(diff.reason or Reason.outside_editable, diff.detail)
    try:
        with blame_candidate(), bench.server(name, tree, candidate.commit) as server:
            legs, hidden = gather(server, bench, stages)
    except CandidateFailed as error:
        return rejection(error.reason, error.detail)
    return judge_evidence(candidate, bench, legs, hidden, diff)


def judge_evidence(
    candidate: Candidate, bench: Bench, legs: list[Leg], hidden: HiddenPass, diff: DiffReport | None = None
) -> Verdict:
    """`judge` with the bench's reference, calibration and limits."""
    return judge(
        candidate,
        legs,
        None,
        hidden=hidden,
        reference_factory=lambda: bench.reference,
        calibration=bench.calibration,
        bound=bench.floor,
        policy=bench.policy,
        diff=diff,
        target_sha256=bench.models.target_sha256,
    )


def try_cheat(cheat: Cheat, bench: Bench) -> CheatOutcome:
    """Plant a cheat, judge it, and say whether it was rejected for a right reason. Its worktree is removed."""
    began = time.monotonic()
    name = f"cheat-{cheat.id}"
    base = bench.workspace.first_commit
    tree = bench.workspace.worktree(name, base)
    try:
        plant(cheat, tree)
        commit = bench.workspace.commit_all(name, f"Planted cheat {cheat.id}")
        diff = check_diff(tree, base, commit, bench.spec.editable, bench.policy)
        verdict = try_engine(
            name, tree, _candidate(name, base, commit, cheat.claim), bench, frozenset({cheat.stage}), diff
        )
    finally:
        bench.workspace.remove(name)
    return CheatOutcome(
        cheat=cheat.id,
        stage=cheat.stage,
        expected=cheat.expects,
        got=verdict.reason,
        caught=verdict.reason in cheat.expects,
        evidence=verdict.detail,
        seconds=time.monotonic() - began,
    )


def try_honest(server: EngineServer, bench: Bench) -> CheatOutcome:
    """The unchanged, started engine through every stage: it must pass (`caught` then means: judged rightly)."""
    began = time.monotonic()
    claim = Claim(component="host", hypothesis="Unchanged tree", counters=["rounds"])
    stages = EVERY_STAGE | {Stage.sampled} if bench.temperature > 0.0 else EVERY_STAGE
    try:
        legs, hidden = gather(server, bench, stages)
        verdict = judge_evidence(_candidate("honest", server.commit, server.commit, claim), bench, legs, hidden)
    except CandidateFailed as error:
        verdict = rejection(error.reason, error.detail)
    return CheatOutcome(
        cheat="honest",
        stage="all",
        expected=[],
        got=verdict.reason,
        caught=verdict.passed,
        evidence=verdict.detail
        if not verdict.passed
        else f"{verdict.positions} positions, {verdict.near_ties} near-ties",
        seconds=time.monotonic() - began,
    )


def _candidate(name: str, base: str, commit: str, claim: Claim) -> Candidate:
    return Candidate(
        attempt_id=name, worker="self-test", base_commit=base, commit=commit, branch=f"specpilot/{name}", claim=claim
    )
