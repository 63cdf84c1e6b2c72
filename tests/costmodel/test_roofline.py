"""Round arithmetic, bounds and the speculation model, against hand arithmetic and the worked example of facts section 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.costmodel import CostModelError, Hardware, Regime, bound_of, load_sheet, sheet_names
from specpilot.costmodel.arithmetic import round_work
from specpilot.costmodel.drafters import drafter_shape
from specpilot.costmodel.hardware import gpu_name, sheet_for_gpu
from specpilot.costmodel.roofline import bounds_by_format
from specpilot.costmodel.shapes import SCOPES
from specpilot.costmodel.speculation import (
    RoundTimes,
    acceptance_for,
    accepted_length,
    ceiling,
    speedup,
)
from specpilot.costmodel.targets import target_shape
from tests.costmodel.published import MUSE_GLIMMER_30B, QWEN3_8B, QWEN38_27B, QWEN38_DFLASH2, SMOL_DFLASH, SMOLLM2_135M

TOY = Hardware("toy", "cpu", 10.0, {"float32": 100.0}, 1.0, 1 << 20, "datasheet")
"""10 GB/s, 100 GFLOP/s: ridge at 10 operations per byte."""


def one_of(round_bound, name):
    return next(part for part in round_bound.components if part.component == name)


def works(target, drafter, regime):
    shape = None if drafter is None else drafter_shape(drafter)
    return {w.component: w for w in round_work(target_shape(target), shape, regime)}


def test_autoregressive_bound_of_qwen38_on_h100_and_h200():
    regime = Regime(context_len=0)
    for sheet, ms in (("h100-sxm", 15.3), ("h200", 1000 / 94)):
        bound = bound_of(QWEN38_27B, None, replace_launch(load_sheet(sheet)), regime)
        # the recurrent state adds 2 x 151 MB to the 51.25 GB of weights, which the published figure leaves out
        weights = 1e3 * 51.25 / load_sheet(sheet).bandwidth_gbs
        state = 1e3 * 2 * 0.151 / load_sheet(sheet).bandwidth_gbs
        assert weights == pytest.approx(ms, rel=5e-3)
        assert bound.ms == pytest.approx(weights + state, rel=2e-3)
        assert {b.limit for b in bound.components if b.component == "target.mlp"} == {"bandwidth"}


def replace_launch(hardware: Hardware) -> Hardware:
    """The published arithmetic ignores launches."""
    return replace(hardware, launch_us=1e-9)


def test_round_bytes_are_the_published_verify_and_draft_traffic():
    found = works(QWEN38_27B, QWEN38_DFLASH2, Regime(rows=8, context_len=0, accepted_length=1))
    target = sum(w.weight_bytes for n, w in found.items() if n.startswith("target."))
    draft = sum(w.weight_bytes for n, w in found.items() if n.startswith("draft."))
    assert target / 1e9 == pytest.approx(51.25, abs=0.01)
    assert draft / 1e9 == pytest.approx(6.1, abs=0.05)
    w12 = works(QWEN38_27B, QWEN38_DFLASH2, Regime(rows=8, context_len=0, weight_bits=12.03))
    assert sum(w.weight_bytes for n, w in w12.items() if n.startswith("draft.")) / 1e9 == pytest.approx(4.6, abs=0.05)


def test_kv_traffic_matches_published_bytes_per_token():
    # Qwen3.8-27B: 64 KiB per token over 16 full layers (facts 3.1); the block's own row is one more position
    one = works(QWEN38_27B, None, Regime(context_len=1000))["target.attention"].state_bytes
    two = works(QWEN38_27B, None, Regime(context_len=2000))["target.attention"].state_bytes
    assert two - one == 1000 * 64 * 1024
    # Muse: full layers 13 KiB per token, sliding layers stop at 2048
    far = [works(MUSE_GLIMMER_30B, None, Regime(context_len=n))["target.attention"].state_bytes for n in (4000, 5000)]
    assert far[1] - far[0] == 1000 * 13 * 1024


def test_hand_arithmetic_of_one_dense_component():
    found = works(SMOLLM2_135M, None, Regime(rows=1, requests=4, context_len=10))
    mlp = found["target.mlp"]
    assert mlp.weight_bytes == 3 * 1536 * 576 * 30 * 2
    assert mlp.operations == 2 * 3 * 1536 * 576 * 30 * 4
    assert mlp.launches == 60
    kv = 30 * 4 * (10 + 1) * 2 * 3 * 64 * 2
    assert found["target.attention"].state_bytes == kv
    assert found["target.attention"].operations == 4 * 30 * 9 * 64 * 4 * (10 + 1)


def test_components_come_in_round_order_and_with_known_names():
    found = list(works(SMOLLM2_135M, SMOL_DFLASH, Regime(rows=8)))
    assert found == [name for name in SCOPES if name in found]
    assert {"draft.fc", "draft.kv", "draft.head", "target.head", "sample", "host"} <= set(found)
    assert not any(name.startswith("draft.") for name in works(SMOLLM2_135M, SMOL_DFLASH, Regime(rows=1)))


def test_shared_key_value_weights_count_once():
    found = works(SMOLLM2_135M, SMOL_DFLASH, Regime(rows=8, accepted_length=3))
    assert found["draft.kv"].weight_bytes == 3 * 2 * 192 * 576 * 2
    assert found["draft.qkv"].weight_bytes == 3 * 576 * 576 * 2
    assert found["draft.qkv"].operations == 2 * 8 * 3 * (576 + 2 * 192) * 576
    assert found["draft.head"].operations == 2 * 7 * 49152 * 576
    reduced = works(SMOLLM2_135M, SMOL_DFLASH, Regime(rows=8, draft_vocab=8192))
    assert reduced["draft.head"].weight_bytes == 8192 * 576 * 2


def test_bound_takes_the_slower_roof_and_adds_the_floor():
    few = one_of(bound_of(SMOLLM2_135M, None, TOY, Regime(rows=1, context_len=0)), "target.mlp")
    many = one_of(bound_of(SMOLLM2_135M, None, TOY, Regime(rows=64, context_len=0)), "target.mlp")
    params = 3 * 1536 * 576 * 30
    assert few.ms == pytest.approx(params * 2 / 10e9 * 1e3 + 60e-3)
    assert many.ms == pytest.approx(2 * params * 64 / 100e9 * 1e3 + 60e-3)
    assert (few.limit, many.limit) == ("bandwidth", "compute")
    assert few.intensity == pytest.approx(1.0) and many.intensity == pytest.approx(64.0)


def test_activations_count_only_when_they_outgrow_the_cache():
    small = replace(TOY, cache_bytes=1024)
    inside = one_of(bound_of(SMOLLM2_135M, None, TOY, Regime(rows=4, context_len=0)), "target.mlp")
    outside = one_of(bound_of(SMOLLM2_135M, None, small, Regime(rows=4, context_len=0)), "target.mlp")
    assert outside.bytes - inside.bytes == 30 * 4 * 4 * (2 * 1536 + 576 + 576 + 1536)


@given(rows=st.integers(1, 32), requests=st.integers(1, 8), context=st.integers(0, 4096))
def test_fused_bound_never_exceeds_the_sum(rows, requests, context):
    regime = Regime(rows=rows, requests=requests, context_len=context, accepted_length=2)
    bound = bound_of(SMOLLM2_135M, SMOL_DFLASH, TOY, regime)
    assert 0 < bound.fused_ms <= bound.ms
    more = bound_of(SMOLLM2_135M, SMOL_DFLASH, TOY, replace(regime, rows=rows + 1))
    assert more.ms >= bound.ms


def test_formats_order_by_width():
    found = bounds_by_format(target_shape(QWEN3_8B), None, Regime(), load_sheet("h200"))
    assert found["float32"].ms > found["bfloat16"].ms > found["w12"].ms
    assert found["bfloat16"].ms / found["w12"].ms == pytest.approx(16 / 12.03, rel=0.06)


def test_measured_sglang_step_is_below_the_roof():
    # facts 11: Qwen3-8B shape on an H200 takes 4.97 ms at batch 1, 76 % of the read-only bandwidth
    bound = bound_of(QWEN3_8B, None, load_sheet("h200"), Regime(context_len=512))
    assert 0.55 < bound.ms / 4.97 < 0.80


def test_wrong_pairs_and_regimes_are_refused():
    with pytest.raises(CostModelError, match="not its drafter"):
        bound_of(SMOLLM2_135M, QWEN38_DFLASH2, TOY, Regime(rows=8))
    for bad in ({"rows": 0}, {"requests": 0}, {"context_len": -1}, {"weight_bits": 0}):
        with pytest.raises(CostModelError):
            Regime(**bad)


def test_sheets_load_and_match_gpu_names():
    assert sheet_names() == ["cpu-generic", "h100-sxm", "h200", "rtx-pro-6000"]
    assert [load_sheet(n).bandwidth_gbs for n in sheet_names()] == [27.0, 3350.0, 4800.0, 1790.0]
    with pytest.raises(CostModelError, match="known: auto, cpu-generic"):
        load_sheet("h300")
    with pytest.raises(CostModelError, match="no peak for 'int8'"):
        load_sheet("h200").peak("int8")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200\\nNVIDIA H200\\n", "NVIDIA H200"),
        ("No devices were found\\n", None),
        ("NVIDIA \\377\\n", "NVIDIA \ufffd"),
        ("", None),
    ],
)
def test_what_nvidia_smi_says_with_exit_0(tmp_path, monkeypatch, said, name):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_name() == name


@pytest.mark.parametrize(
    ("card", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100 SXM5", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("nvidia h200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)
def test_cards_with_a_sheet(card, sheet):
    assert sheet_for_gpu(card) == load_sheet(sheet)


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA GH200 480GB",  # contains H200; another memory
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H200 NVL",
        "NVIDIA H200X-141C",  # a virtual card
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100L-94C",
        "NVIDIA GH100",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 4090",
        "Tesla T4",
        "",
    ],
)
def test_cards_of_other_figures_get_no_sheet(card):
    with pytest.raises(CostModelError, match="no datasheet"):
        sheet_for_gpu(card)


def test_worked_example_of_the_facts():
    # T_AR 20.4 ms (75 % of the roof), W12 round (38.5 + 4.6) / 3.0 + 0.7 ms: 1.35 x accepted length; BF16: 1.03 x
    w12 = RoundTimes(draft_ms=4.6 / 3.0, verify_ms=38.5 / 3.0, host_ms=0.7)
    plain = RoundTimes(draft_ms=6.1 / 3.0, verify_ms=51.25 / 3.0, host_ms=0.7)
    assert speedup(1.0, 20.4, w12) == pytest.approx(1.35, abs=0.01)
    assert speedup(1.0, 20.4, plain) == pytest.approx(1.03, abs=0.01)
    assert speedup(8.0, 20.4, w12) == pytest.approx(10.87, abs=0.1)
    assert ceiling(8.0, 20.4, w12.round_ms) == speedup(8.0, 20.4, w12)


@given(rate=st.floats(0.0, 0.99), drafts=st.integers(0, 20))
def test_constant_acceptance_is_a_geometric_sum(rate, drafts):
    expected = (1 - rate ** (drafts + 1)) / (1 - rate)
    assert accepted_length([rate] * drafts) == pytest.approx(expected)


def test_acceptance_inverts_accepted_length():
    for rate in (0.0, 0.3, 0.75, 1.0):
        assert acceptance_for(accepted_length([rate] * 7), 7) == pytest.approx(rate, abs=1e-9)
    for bad in (0.5, 8.5):
        with pytest.raises(CostModelError, match="between 1 and 8"):
            acceptance_for(bad, 7)


def test_accepted_length_boundaries():
    assert accepted_length([]) == 1.0
    assert accepted_length([1.0] * 7) == 8.0
    assert accepted_length([0.0, 1.0]) == 1.0
    assert accepted_length([0.5, 0.5]) == 1.75
    with pytest.raises(CostModelError, match="position 2"):
        accepted_length([0.5, 1.5])
