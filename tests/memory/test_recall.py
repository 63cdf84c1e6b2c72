"""Which mechanisms are recalled, in which order, and the words that say why."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from specpilot.memory import Hardware, MemoryStore
from specpilot.memory.recall import measured_by

AVX512 = Hardware(kind="cpu", isa=["avx2", "avx512f"])


def names(found):
    return [item.name for item in found]


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (Hardware(kind="cpu", isa=["fma", "avx2"]), "cpu/avx2"),
        (Hardware(kind="cpu", isa=["avx2", "AVX512F"]), "cpu/avx512"),
        (Hardware(kind="cpu", isa=["sse4_2"]), "cpu/scalar"),
        (Hardware(kind="cpu", isa=["asimd", "neon"]), "cpu/neon"),
        (Hardware(kind="cuda", isa=["sm_90"]), "cuda/sm_90"),
    ],
)
def test_hardware_class(hardware, expected):
    assert hardware.hardware_class == expected


@pytest.mark.parametrize(
    ("preconditions", "words"),
    [
        ({"engine": "sglang"}, "engine sglang"),
        ({"hardware": {"kind": "cuda"}}, "needs a cuda"),
        ({"hardware": {"kind": "cpu", "isa": ["avx2", "avx512f"]}}, "needs avx512f, which"),
        ({"architectures": ["qwen3"]}, "qwen3 targets"),
        ({"drafters": ["ngram"]}, "ngram drafters"),
        ({"regime": {"max_concurrency": 1}}, "up to concurrency 1"),
        ({"regime": {"min_concurrency": 4}}, "from concurrency 4"),
        ({"regime": {"max_temperature": 0.0}}, "up to temperature 0"),
    ],
)
def test_unmet_precondition_is_not_recalled_and_says_why(store, mechanism, query, preconditions, words):
    store.add(mechanism(preconditions=preconditions), origin="a")
    asked = query(concurrency=2, temperature=0.7)
    assert store.recall(asked) == []
    (assessed,) = store.assess(asked)
    assert words in " ".join(assessed.unmet)


def test_preconditions_at_their_boundary_hold(store, mechanism, query):
    pre = {
        "hardware": {"kind": "cpu", "isa": ["AVX2"]},
        "architectures": ["llama"],
        "drafters": ["dflash"],
        "engine": "slim",
        "regime": {"min_concurrency": 2, "max_concurrency": 2, "max_temperature": 0.7},
    }
    store.add(mechanism(preconditions=pre), origin="a")
    assert names(store.recall(query(concurrency=2, temperature=0.7))) == ["bf16_gemm"]


def test_order_of_the_four_groups(store, mechanism, effect, query):
    for name in ("here", "elsewhere", "unproven", "refuted"):
        store.add(mechanism(name, predicted_gain=9.0), origin="a")
    store.record_effect("here", effect(1.1))
    store.record_effect("elsewhere", effect(3.0, hardware=AVX512))
    store.record_effect("refuted", effect(3.0, hardware=AVX512))
    store.record_effect("refuted", effect(1.0, outcome="refuted", reason="no-gain"))
    found = store.recall(query())
    assert names(found) == ["here", "elsewhere", "unproven", "refuted"]
    assert "verified on cpu/avx2 (cpu_c1): at least 1.00x" in found[0].why
    assert "verified on cpu/avx512 only: at least 2.90x there" in found[1].why
    assert found[1].score == pytest.approx(1.95), "half of the gain is expected to carry over"
    assert "never verified; predicted 9.00x" in found[2].why
    assert found[3].refuted_here and "refuted on this kind of machine (no-gain on cpu_c1): tried last" in found[3].why


def test_refuted_on_another_deployment_but_verified_on_one_is_not_refuted(store, mechanism, effect, query):
    store.add(mechanism(), origin="a")
    store.record_effect("bf16_gemm", effect(1.5, deployment_fingerprint="good"))
    store.record_effect("bf16_gemm", effect(1.0, deployment_fingerprint="bad", outcome="refuted", reason="no-gain"))
    assert not store.recall(query())[0].refuted_here
    assert not store.recall(query(deployment_fingerprint="good"))[0].refuted_here
    assert store.recall(query(deployment_fingerprint="bad"))[0].refuted_here


def test_lower_end_decides_before_wasted_time_and_wasted_time_before_name(store, mechanism, effect, query):
    for name, component in (("a", "target.head"), ("b", "target.mlp"), ("c", "target.head"), ("d", "draft.fc")):
        store.add(mechanism(name, component=component), origin="x")
    store.record_effect("a", effect(2.0, low=1.20))
    store.record_effect("b", effect(1.5, low=1.21))
    store.record_effect("c", effect(1.6, low=1.50))
    store.record_effect("d", effect(1.5, low=1.20))
    found = store.recall(query(recoverable_ms={"target.mlp": 20.0, "target.head": 5.0}))
    assert names(found) == ["c", "b", "a", "d"]
    assert "target.mlp wastes 20.0 ms per round here" in found[1].why


def test_whole_round_mechanism_counts_all_components(store, mechanism, query):
    store.add(mechanism("part", component="target"), origin="x")
    store.add(mechanism("all", component="*"), origin="x")
    found = store.recall(query(recoverable_ms={"target.mlp": 2.0, "draft.mlp": 1.0, "targeted": 50.0}))
    assert names(found) == ["all", "part"]
    assert "target wastes 2.0 ms" in found[1].why


def test_requirement_comes_first_and_is_named(store, mechanism, effect, query):
    store.add(mechanism("base", component="host"), origin="x")
    store.add(mechanism("on_top", requires=["base"]), origin="x")
    store.record_effect("on_top", effect(3.0))
    found = store.recall(query())
    assert names(found) == ["base", "on_top"]
    assert found[1].waits_for == ["base"] and "waits for base" in found[1].why
    after = store.recall(query(present=["base"]))
    assert names(after) == ["on_top"] and after[0].waits_for == []


def test_requirement_that_cannot_be_met_hides_what_needs_it(store, mechanism, query):
    store.add(mechanism("gpu_only", preconditions={"hardware": {"kind": "cuda"}}), origin="x")
    store.add(mechanism("middle", requires=["gpu_only"]), origin="x")
    store.add(mechanism("top", requires=["middle"]), origin="x")
    store.add(mechanism("lost", requires=["nowhere"]), origin="x")
    assert store.recall(query()) == []
    assert "requires nowhere" in {a.name: a for a in store.assess(query())}["lost"].unmet[0]


def test_circular_requirements_end(store, mechanism, query):
    store.add(mechanism("a", requires=["b"]), origin="x")
    store.add(mechanism("b", requires=["a"]), origin="x")
    assert sorted(names(store.recall(query()))) == ["a", "b"]


def test_present_mechanism_is_not_recalled(store, mechanism, query):
    store.add(mechanism(), origin="x")
    assert store.recall(query(present=["bf16_gemm"])) == []


def test_a_noisy_null_does_not_refute_an_earlier_proof_here(store, mechanism, effect, query):
    store.add(mechanism(), origin="a")

    def record(day, ratio, **fields):
        at = datetime(2026, 11, day, tzinfo=UTC)
        store.record_effect("bf16_gemm", effect(ratio, at=at, run=f"run-{day}", **fields))
        return store.recall(query(deployment_fingerprint="f1"))[0]

    null = {"outcome": "refuted", "reason": "no-gain"}
    assert record(1, 1.84).refuted_on_this == ""
    assert record(2, 1.31, low=0.0, high=math.inf, **null).refuted_on_this == "", "1.84 is still possible"
    told = record(3, 1.02, low=0.98, high=1.06, **null)
    assert told.refuted_here and told.refuted_on_this == "no effect: 1.02x [0.98, 1.06], run run-3"
    assert record(4, 1.5).refuted_on_this == "", "proven again"
    told = record(5, 1.6, low=1.4, high=1.8, outcome="refuted", reason="token-mismatch")
    assert told.refuted_on_this == "token-mismatch: 1.60x [1.40, 1.80], run run-5"
    elsewhere = store.recall(query(deployment_fingerprint="another"))[0]
    assert not elsewhere.refuted_here and elsewhere.refuted_on_this == ""


def test_a_null_without_any_proof_here_is_enough_to_wait(store, mechanism, effect, query):
    store.add(mechanism(), origin="a")
    store.record_effect("bf16_gemm", effect(1.3, low=0.0, high=math.inf, outcome="refuted", reason="no-gain"))
    assert store.recall(query(deployment_fingerprint="f1"))[0].refuted_on_this.startswith(
        "no effect: 1.30x [0.00, inf]"
    )


def test_who_measured_is_said_in_words(effect, url):
    """A round's worker is what an attempt's id (`r3-search-1`) begins with; the seeds' run has a name that tells nobody anything."""
    assert measured_by(effect(run="run-7", round=3, worker="search")) == "run run-7, round 3, search"
    assert measured_by(effect(run="run-7")) == "run run-7"
    assert measured_by(effect(run="")) == "an unknown run"
    with MemoryStore(url) as seeded:
        told = [measured_by(one) for item in seeded.mechanisms() for one in item.effects]
    assert "the run that made the seed memory" in told and not any("seedrun" in words for words in told)


def test_what_was_measured_here_is_expected_again(store, mechanism, effect, query):
    """1.84x [1.6, 2.1] here once, 2.2x predicted: the prediction is brought to 2.1, and the two means by the logarithm are 1.966."""
    store.add(mechanism(predicted_gain=2.2), origin="a")
    store.record_effect("bf16_gemm", effect(1.84, low=1.6, high=2.1))
    found = store.recall(query(deployment_fingerprint="f1"))[0]
    assert found.score == pytest.approx(math.sqrt(1.84 * 2.1))
    assert found.why.startswith("measured 1.84x here before (once), expected 1.97x; verified on cpu/avx2")
    assert store.recall(query(deployment_fingerprint="other"))[0].score == 1.6, "elsewhere the lower end, as ever"
    store.record_effect("bf16_gemm", effect(1.70, low=1.5, high=1.9, run="run-2", at=datetime(2026, 11, 2, tzinfo=UTC)))
    found = store.recall(query(deployment_fingerprint="f1"))[0]
    assert found.score == pytest.approx((1.84 * 1.70 * 1.9) ** (1 / 3)) and "(2 times)" in found.why


def test_a_claim_never_outbids_a_measurement(store, mechanism, effect, query):
    null = {"low": 0.97, "high": 1.03, "outcome": "refuted", "reason": "no-gain"}
    for name, predicted in (("boaster", 900.0), ("modest", 0.1)):
        store.add(mechanism(name, predicted_gain=predicted), origin="a")
        store.record_effect(name, effect(1.0, **null))
    found = {item.name: item.score for item in store.recall(query(deployment_fingerprint="f1"))}
    assert found == {"boaster": pytest.approx(math.sqrt(1.03)), "modest": pytest.approx(math.sqrt(0.97))}


def test_the_order_follows_what_was_measured_here(store, mechanism, effect, query):
    """A narrow small gain has the higher lower end; the larger one measured here goes first all the same."""
    for name in ("large", "narrow"):
        store.add(mechanism(name), origin="a")
    store.record_effect("large", effect(1.8, low=1.2, high=2.7))
    store.record_effect("narrow", effect(1.3, low=1.28, high=1.32))
    assert names(store.recall(query(deployment_fingerprint="f1"))) == ["large", "narrow"]
    assert names(store.recall(query(deployment_fingerprint="other"))) == ["narrow", "large"]


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "refuted", "reason": "token-mismatch"},
        {"outcome": "refuted", "reason": "no-gain", "low": 0.0, "high": math.inf},
        {"hardware": AVX512},
    ],
)
def test_what_says_nothing_about_the_gain_here_does_not_count(store, mechanism, effect, query, fields):
    store.add(mechanism(predicted_gain=1.2), origin="a")
    before = store.recall(query(deployment_fingerprint="f1"))[0].score
    store.record_effect("bf16_gemm", effect(4.0, **fields))
    told = store.recall(query(deployment_fingerprint="f1"))[0]
    assert "here before" not in told.why
    assert before == pytest.approx(1.1) and told.score <= 3.0
