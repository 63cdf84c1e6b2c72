"""A realistic finished run as report data and as the events that led to it. Used by tests and to look at the report."""

from __future__ import annotations

import math
from typing import Any

from specpilot.contracts import Calibration, Check, Comparison, GapTable, SideSummary, Verdict
from specpilot.costmodel import Hardware, Regime, gap_table
from specpilot.costmodel.arithmetic import round_work
from specpilot.costmodel.drafters import drafter_shape
from specpilot.costmodel.roofline import round_bound
from specpilot.costmodel.targets import target_shape
from specpilot.report.data import (
    Cheat,
    Command,
    Fate,
    Figure,
    MemoryUse,
    Moment,
    Ratio,
    ReportData,
    SelfTest,
    Step,
)
from tests.costmodel.published import SMOL_DFLASH, SMOLLM2_135M

MACHINE = Hardware(
    name="AMD EPYC, 2 threads",
    kind="cpu",
    bandwidth_gbs=35.2,
    copy_gbs=27.5,
    peak_gflops={"float32": 197.0},
    launch_us=0.8,
    cache_bytes=32 << 20,
    source="measured",
    threads=2,
    isa=("avx", "avx2", "f16c", "fma"),
    best={"read_gbs": 33.5, "copy_gbs": 26.2, "fma_gflops": 192.0, "fork_join_us": 0.84},
)
BEFORE = {
    "draft.fc": 0.6, "draft.kv": 0.5, "draft.norm": 0.3, "draft.qkv": 0.9, "draft.attention": 1.1, "draft.o": 0.5,
    "draft.mlp": 2.4, "draft.head": 12.9, "target.embed": 0.1, "target.norm": 2.6, "target.qkv": 7.2,
    "target.attention": 9.8, "target.o": 4.3, "target.mlp": 29.5, "target.head": 13.2, "sample": 0.3, "host": 3.1,
}  # fmt: skip
AFTER = {
    "draft.fc": 0.2, "draft.kv": 0.2, "draft.norm": 0.1, "draft.qkv": 0.4, "draft.attention": 0.4, "draft.o": 0.2,
    "draft.mlp": 0.9, "draft.head": 1.1, "target.embed": 0.02, "target.norm": 0.5, "target.qkv": 1.9,
    "target.attention": 1.6, "target.o": 1.1, "target.mlp": 8.6, "target.head": 3.2, "sample": 0.05, "host": 0.6,
}  # fmt: skip


def gaps(measured: dict[str, float], commit: str, draft_vocab: int | None = None) -> GapTable:
    """A gap table whose bounds come from the cost model and whose times are given."""
    regime = Regime(rows=8, context_len=310, kv_bits=32, accepted_length=3.1, draft_vocab=draft_vocab)
    bound = round_bound(round_work(target_shape(SMOLLM2_135M), drafter_shape(SMOL_DFLASH), regime), MACHINE)
    described = {
        **MACHINE.as_dict(),
        "intensity": {b.component: b.intensity for b in bound.components},
        "operations": {b.component: b.operations for b in bound.components},
        "bytes": {b.component: b.bytes for b in bound.components},
        "fused_bound_ms": bound.fused_ms,
    }
    table = gap_table(bound, measured, accepted_length=3.1, commit=commit, hardware=described)
    return GapTable.model_validate(table.as_dict())


def side(commit: str, rate: float) -> SideSummary:
    return SideSummary(
        commit=commit, variant="final", decode_tokens_per_s=rate, end_to_end_tokens_per_s=rate * 0.82, ttft_s=0.41,
        accepted_length=3.11, target_forwards_per_token=0.32, startup_s=3.2, tokens=1024,
    )  # fmt: skip


def comparison(ratio: float, spread: float = 0.03, pairs: int = 6) -> Comparison:
    values = [ratio * math.exp(spread * math.sin(3 * i)) for i in range(pairs)]
    return Comparison(
        base=side("1f0c9d2e77", 35.0), candidate=side("a41be09d55", 35.0 * ratio), ratio=ratio,
        low=ratio * (1 - spread), high=ratio * (1 + spread), end_to_end_ratio=1 + (ratio - 1) * 0.8,
        end_to_end_low=1.0, end_to_end_high=ratio, alpha=0.01, pairs=values, detectable=1.02,
        decision="gain" if ratio * (1 - spread) > 1 else "null", seconds=41.0,
    )  # fmt: skip


def verdict(
    positions: int, near_ties: int, violations: int = 0, reason: str | None = None, detail: str = ""
) -> Verdict:
    names = ["diff inside editable paths", "accounting", "lengths", "token forcing", "near-tie rate", "engagement"]
    return Verdict(
        passed=reason is None,
        reason=reason,  # type: ignore[arg-type]
        detail=detail,
        checks=[Check(name=n, passed=not (reason and n == "token forcing"), detail="as expected") for n in names],
        positions=positions,
        exact=positions - near_ties - violations,
        near_ties=near_ties,
        violations=violations,
        max_gap=0.011 if not violations else 4.27,
    )


def attempts() -> list[Fate]:
    return [
        Fate(
            id="r1-recall-1", round=1, worker="recall", component="target.mlp", mechanism="native-bf16-skinny-gemm",
            state="merged", hypothesis="Weights stay BF16 in memory and are widened in registers, so half the bytes are read.",
            predicted_gain=1.62, commit="a41be09d55", comparison=comparison(1.71), verdict=verdict(3072, 4),
        ),
        Fate(
            id="r1-recall-2", round=1, worker="recall", component="draft.head", mechanism="reduced-draft-head",
            state="merged", hypothesis="Drafting needs only frequent tokens: a head of 8,192 rows instead of 49,152.",
            predicted_gain=1.12, commit="c77e021a90", comparison=comparison(1.14), verdict=verdict(3072, 3),
        ),
        Fate(
            id="r1-recall-3", round=1, worker="recall", component="target.attention", mechanism="w12-weights",
            state="rejected", reason="no-gain", detail="ratio 0.987 [0.958, 1.017]",
            hypothesis="Twelve bits a weight read a quarter less.", predicted_gain=1.04, comparison=comparison(0.987),
        ),
        Fate(
            id="r1-external-1", round=1, worker="external", component="sample", state="rejected", reason="token-mismatch",
            detail="prompt tuning/7 position 19: emitted 281, the reference has 253 with a gap of 4.27 nats",
            hypothesis="Accept drafts within the top two <script>alert('no')</script>", predicted_gain=1.3,
            comparison=comparison(1.22), verdict=verdict(1210, 9, 3, "token-mismatch", "3 violations"),
        ),
        Fate(
            id="r2-recall-1", round=2, worker="recall", component="host", mechanism="fused-round-buffers", state="merged",
            hypothesis="One preallocated buffer per round removes allocator and dispatch time.", predicted_gain=1.05,
            commit="e9034ab111", comparison=comparison(1.06, 0.02), verdict=verdict(3072, 4),
        ),
        Fate(
            id="r2-search-1", round=2, worker="search", component="policy", state="superseded",
            detail="accepted, no gain on top of the head", hypothesis="verify_drafts=5", predicted_gain=None,
            comparison=comparison(1.05, 0.02), verdict=verdict(2048, 2),
        ),
    ]  # fmt: skip


CHEATS = (
    ("lossy-accept", "token-mismatch"), ("stored-answers", "replayed-answers"), ("speculation-off", "speculation-off"),
    ("truncated-output", "length-mismatch"), ("claimed-tokens", "accounting-mismatch"), ("idle-counter", "not-engaged"),
    ("quantised-head", "token-mismatch"), ("edited-contract", "diff-outside-editable"), ("early-stop", "stop-mismatch"),
)  # fmt: skip


def report_data() -> ReportData:
    ratios = [
        Ratio(
            of="final",
            over="stock",
            ratio=2.14,
            low=2.05,
            high=2.24,
            median=2.15,
            end_to_end_ratio=1.9,
            pairs=[2.1] * 6,
        ),
        Ratio(
            of="final", over="ar", ratio=3.62, low=3.44, high=3.81, median=3.6, end_to_end_ratio=2.8, pairs=[3.6] * 6
        ),
        Ratio(of="final-ar", over="ar", ratio=1.53, low=1.49, high=1.57, pairs=[1.5] * 6),
        Ratio(of="stock", over="ar", ratio=1.69, low=1.61, high=1.78, pairs=[1.7] * 6),
    ]
    figures = [
        Figure(name="ar", commit="1f0c9d2e77", decode_tokens_per_s=41.3, end_to_end_tokens_per_s=36.0, ttft_s=0.52,
               accepted_length=1.0, startup_s=2.9, tokens=768),
        Figure(name="stock", commit="1f0c9d2e77", decode_tokens_per_s=69.9, end_to_end_tokens_per_s=54.0, ttft_s=0.49,
               accepted_length=3.08, target_forwards_per_token=0.325, startup_s=3.4, tokens=768),
        Figure(name="final", commit="e9034ab111", decode_tokens_per_s=149.7, end_to_end_tokens_per_s=103.0, ttft_s=0.33,
               accepted_length=3.06, target_forwards_per_token=0.327, startup_s=4.1, tokens=768),
        Figure(name="final-ar", commit="e9034ab111", decode_tokens_per_s=63.2, end_to_end_tokens_per_s=51.0, ttft_s=0.33,
               accepted_length=1.0, startup_s=4.0, tokens=768),
    ]  # fmt: skip
    outcomes = [
        Cheat(
            cheat=name, stage="forcing", expected=[reason], got=reason, caught=True, evidence="position 12", seconds=3.0
        )
        for name, reason in CHEATS
    ]
    start = 1_796_000_000.0
    return ReportData(
        deployment="cpu_c1_smollm2-135m_dflash",
        run_id="20261130-101502-cpu_c1_smollm2-135m_dflash-9f3a",
        version="0.1.0",
        created="2026-11-30T10:15:02+0000",
        finished="2026-11-30T10:29:48+0000",
        summary="SmolLM2-135M-Instruct with a 3-layer DFlash drafter of block size 8, one request at a time, greedy.",
        stop_reason="rounds-done",
        elapsed_s=886,
        limit_s=900,
        rounds=2,
        hardware=MACHINE.as_dict(),
        software={"python": "3.11.9", "torch": "2.13.0+cpu", "compiler": "g++ 12.2.0", "specpilot": "0.1.0"},
        figures=figures,
        ratios=ratios,
        steps=[
            Step(attempt_id="r1-recall-1", mechanism="native-bf16-skinny-gemm", component="target.mlp", gain=1.71, low=1.66, high=1.76),
            Step(attempt_id="r1-recall-2", mechanism="reduced-draft-head", component="draft.head", gain=1.13, low=1.10, high=1.16),
            Step(attempt_id="r2-recall-1", mechanism="fused-round-buffers", component="host", gain=1.06, low=1.04, high=1.08),
        ],
        attempts=attempts(),
        gaps_before=gaps(BEFORE, "1f0c9d2e77"),
        gaps_after=gaps(AFTER, "e9034ab111", draft_vocab=8192),
        calibration=Calibration(
            epsilon=0.02, near_tie_rate_limit=0.01, positions=640, near_ties=2, max_gap=0.0084,
            gap_quantiles={"0.5": 0.0001, "0.99": 0.003, "0.999": 0.0084}, method="reference at 1 row against 64 rows",
        ),
        self_test=SelfTest(passed=True, outcomes=outcomes, null_ratio=1.003, null_low=0.981, null_high=1.026, null_decision="null"),
        memory=MemoryUse(recalled=4, tried=4, accepted=3, merged=3, gain=2.05, learned=6,
                         mechanisms=["native-bf16-skinny-gemm", "reduced-draft-head", "fused-round-buffers"]),
        trials=8,
        events=[
            Moment(at=start + 11 * i, kind=kind, text=text)
            for i, (kind, text) in enumerate(
                [("phase", "prepare: checkpoints, repository, machine"), ("phase", "gate: calibration and planted cheats"),
                 *[("selftest", f"cheat {n}: rejected ({r})") for n, r in CHEATS],
                 ("phase", "round 1: observe"), ("comparison", "r1-recall-1: measured 1.710x [1.659, 1.761]"),
                 ("merge", "native-bf16-skinny-gemm: 1.710x"), ("phase", "round 2: observe"), ("phase", "closing")]
            )
        ],
        commands=[
            Command(what="see again", command="specpilot status 20261130-101502"),
            Command(what="export", command="specpilot export 20261130-101502 --to ./engine"),
            Command(what="serve", command="./engine/serve.sh final 8000"),
            Command(what="re-check", command="./engine/verify.sh"),
        ],
        notes=["The machine's memory bandwidth wandered between 33 and 51 GB/s during the run; only ratios within a session count."],
        run_dir="/home/user/.specpilot/runs/20261130-101502",
    )  # fmt: skip


def run_events() -> list[tuple[str, dict[str, Any]]]:
    """The events of that run as the loop sends them."""
    data = report_data()
    found: list[tuple[str, dict[str, Any]]] = [
        ("phase", {"name": "prepare", "detail": "checkpoints, repository, machine"}),
        ("phase", {"name": "gate", "detail": "calibration and planted cheats"}),
        ("calibration", data.calibration.model_dump(mode="json") if data.calibration else {}),
        *[("selftest", {"cheat": n, "caught": True, "got": r, "expected": [r]}) for n, r in CHEATS],
        ("selftest-end", {"passed": True, "caught": 9, "cheats": 9, "null_ratio": 1.003, "null_low": 0.98, "null_high": 1.03}),
        ("phase", {"name": "baselines", "detail": "ar and stock, first look"}),
        ("baseline", {
            "variants": {f.name: f.model_dump() for f in data.figures[:2]},
            "ratios": [r.model_dump() for r in data.ratios if r.of == "stock"],
        }),
        ("phase", {"name": "round 1", "detail": "observe"}),
        ("gaps", data.gaps_before.model_dump(mode="json") if data.gaps_before else {}),
        ("budget", {"limit_s": 900.0, "elapsed_s": 301.0}),
    ]  # fmt: skip
    for fate in data.attempts:
        base = {
            "id": fate.id,
            "round": fate.round,
            "worker": fate.worker,
            "component": fate.component,
            "mechanism": fate.mechanism,
        }
        if fate.round != 1:
            continue
        found += [("attempt", {**base, "state": s}) for s in ("planned", "working", "submitted")]
        if fate.comparison:
            found.append(("pair", {"attempt": fate.id, "pair": 2, "of": 6, "mean": 1.5, "low": 1.2, "high": 1.9}))
            found.append(("comparison", {"attempt": fate.id, **fate.comparison.model_dump(mode="json")}))
        if fate.verdict:
            found.append(("verdict", {"attempt": fate.id, **fate.verdict.model_dump(mode="json")}))
        found.append(("attempt", {**base, "state": fate.state, "reason": fate.reason, "detail": fate.detail}))
    for step in data.steps[:2]:
        found.append(("merge", {**step.model_dump(), "merged": True, "reason": None}))
    found.append(("trial", {"worker": "search", "arm": "tpe", "values": {"verify_drafts": 5}, "ratio": 1.04}))
    found.append(("note", {"level": "warning", "text": "r1-recall-3: engine took 12 s to start (try 1)"}))
    return found
