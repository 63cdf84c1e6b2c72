"""The recall worker proposes what the memory recalls, in order, and says what it left out."""

from __future__ import annotations

import pytest

from specpilot.agents import ComponentGap, DoesNotApplyError, RecallWorker
from specpilot.memory import Effect, Hardware, Mechanism, MemoryStore


@pytest.fixture
def store(tmp_path):
    with MemoryStore(tmp_path / "memory.db", seed_folder=None) as opened:
        yield opened


@pytest.fixture
def add(store, patch):
    def build(name, changes=None, ratio=None, **fields):
        text = patch(changes or {"line_3 = 3\n": "line_3 = 4\n"})
        base = {"component": "target.mlp", "title": f"the {name}", "hypothesis": "h", "patch": text}
        store.add(Mechanism(name=name, **{**base, **fields}), origin="x")
        if ratio:
            effect = Effect(
                deployment="d",
                deployment_fingerprint="f",
                hardware=Hardware(kind="cpu", isa=["avx2"]),
                ratio=ratio,
                low=ratio,
                high=ratio,
                samples=[ratio],
                outcome="verified",
            )
            store.record_effect(name, effect)

    return build


def test_best_first_with_claim_and_reason(store, add, context):
    add("small", ratio=1.1)
    add("big", ratio=1.9, counters=["calls"], forbidden_counters=["fallbacks"])
    proposals = RecallWorker(store).plan(context(gaps=(ComponentGap("target.mlp", 9, 4, 5, 1.4),)))
    assert [p.mechanism for p in proposals] == ["big", "small"]
    assert proposals[0].claim.fields() == {
        "component": "target.mlp", "hypothesis": "h", "predicted_gain": pytest.approx(1.9), "counters": ["calls"],
        "forbidden_counters": ["fallbacks"], "mechanism": "big",
    }  # fmt: skip
    assert "at least 1.90x" in proposals[0].why and "wastes 5.0 ms" in proposals[0].why


def test_requirement_waits_until_it_is_merged(store, add, context):
    add("base", ratio=1.2)
    add("on_top", ratio=2.0, requires=["base"])
    worker = RecallWorker(store)
    assert [p.mechanism for p in worker.plan(context())] == ["base"]
    assert "on_top: waits for base" in worker.notes
    assert [p.mechanism for p in worker.plan(context(present=("base",)))] == ["on_top"]


def test_caps_tried_and_unfit_are_noted(store, add, context):
    for name in ("a", "b", "c"):
        add(name)
    add("gpu", preconditions={"hardware": {"kind": "cuda"}})
    worker = RecallWorker(store)
    proposals = worker.plan(context(max_proposals=1, tried=frozenset({"a"})))
    assert [p.mechanism for p in proposals] == ["b"]
    assert worker.notes == ["a: tried in this run already", "c: left for a later round, 1 are proposed at a time",
                            "gpu: does not fit here: it needs a cuda, this device is a cpu"]  # fmt: skip


def test_stale_patch_is_reported_not_crashed(store, add, context, tree):
    add("late")
    (tree / "module.py").write_text("all new\n")
    (proposal,) = RecallWorker(store).plan(context())
    with pytest.raises(DoesNotApplyError):
        proposal.apply(tree)


def test_how_often_recall_helped(store, add, context):
    for name in ("a", "b", "c"):
        add(name)
    worker = RecallWorker(store)
    proposals = worker.plan(context())
    assert store.stats().recalled == 0, "a proposal that waits for a later round is no recall"
    worker.enter("run-1", proposals)
    store.record_recall("run-1", "a", tried=True, accepted=True, ratio=1.5)
    store.record_recall("run-1", "b", tried=True, accepted=False, ratio=0.99)
    worker.enter("run-1", worker.plan(context()))
    stats = store.stats()
    assert (stats.recalled, stats.tried, stats.accepted) == (3, 2, 1)


def test_what_this_deployment_refuted_waits_until_nothing_else_is_left(store, add, context):
    for name, requires in (("fresh", []), ("null", []), ("later", ["fresh"])):
        add(name, requires=requires)
    effect = Effect(
        deployment="d", deployment_fingerprint="here", hardware=Hardware(kind="cpu", isa=["avx2"]), ratio=1.0, low=0.9,
        high=1.1, samples=[1.0], outcome="refuted", reason="no-gain", run="run-0",
    )  # fmt: skip
    store.record_effect("null", effect)
    worker = RecallWorker(store)

    def plan(**fields):
        return [p.mechanism for p in worker.plan(context(deployment_fingerprint="here", **fields))]

    assert plan() == ["fresh"]
    told = "null: tried when nothing else is left that promises as much: this deployment tried it before on such a machine, and it did not gain (no effect: 1.00x"
    assert any(note.startswith(told) for note in worker.notes)
    assert plan(present=("fresh",)) == ["later"]
    assert plan(present=("fresh", "later")) == ["null"], "it may be tried again, on the faster engine"
    assert plan(tried=frozenset({"fresh"})) == ["null"]
    proof = effect.model_copy(
        update={"ratio": 1.5, "low": 1.4, "high": 1.6, "outcome": "verified", "reason": "", "run": "a"}
    )
    store.record_effect("null", proof.model_copy(update={"deployment_fingerprint": "other"}))
    assert plan() == ["fresh", "null"], "it promises more than all that is left: last, but in this round"
    assert [p.mechanism for p in worker.plan(context(deployment_fingerprint="new"))] == ["null", "fresh"], (
        "proven elsewhere"
    )
