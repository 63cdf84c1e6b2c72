"""Trace attribution and gap tables on hand-made traces whose answer is known."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from specpilot.contracts import GapTable as Contract
from specpilot.costmodel import (
    CostModelError,
    Hardware,
    Regime,
    analyse,
    attribute,
    gap_table,
    predicted_gain,
    rich_table,
)
from specpilot.costmodel.roofline import Bound, RoundBound
from specpilot.costmodel.trace import load_events
from tests.costmodel.published import SMOL_DFLASH, SMOLLM2_135M

TOY = Hardware("toy", "cpu", 10.0, {"float32": 100.0}, 1.0, 1 << 20, "datasheet")


def event(name, ts, dur, tid=1, **args):
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def rounds(count=3, mlp=4000.0, start=0.0, host=500.0):
    """Rounds of draft.mlp 1 ms, target.mlp `mlp` us and `host` us outside any scope, back to back."""
    found, at = [], start
    for _ in range(count):
        length = 1000 + mlp + host
        found += [
            event("round", at, length, rows=8, requests=1, committed=3, context_len=100),
            event("draft.mlp", at + 100, 1000),
            event("target.mlp", at + 1200, mlp),
        ]
        at += length + 50
    return found


def test_median_per_round_and_host_remainder():
    events = rounds(3) + rounds(1, mlp=40_000.0, start=1e6)  # one outlier does not move the median
    profile = attribute(events, ["draft.mlp", "target.mlp", "host"])
    assert profile.component_ms == pytest.approx({"draft.mlp": 1.0, "target.mlp": 4.0, "host": 0.5})
    assert profile.round_ms == pytest.approx(5.5)
    assert (profile.rounds, profile.rows, profile.context_len) == (4, 8, 100)
    assert profile.accepted_length == 3.0 and profile.warnings == ()


def test_nested_scopes_count_once():
    events = [
        event("round", 0, 10_000),
        event("target.mlp", 1000, 6000),
        event("target.norm", 2000, 1000),
        event("target.norm", 4000, 500),
        event("draft.mlp", 4100, 200),  # nested two deep
    ]
    profile = attribute(events, ["target.mlp", "target.norm", "draft.mlp", "host"])
    expected = {"target.mlp": 4.5, "target.norm": 1.3, "draft.mlp": 0.2, "host": 4.0}
    assert profile.component_ms == pytest.approx(expected)
    assert sum(profile.component_ms.values()) == pytest.approx(profile.round_ms)


def test_time_outside_rounds_is_not_counted():
    events = [*rounds(2), event("prefill", 90_000, 30_000), event("target.mlp", 91_000, 25_000)]
    assert attribute(events, ["draft.mlp", "target.mlp"]).component_ms["target.mlp"] == pytest.approx(4.0)


def test_unrelated_and_malformed_entries():
    noise = [{"name": "aten::mm", "ph": "X", "ts": 0, "dur": 9}, {"name": "round", "ph": "B", "ts": 3}, {"ph": "M"}]
    assert attribute([*noise, *rounds(1)], ["target.mlp", "draft.mlp"]).rounds == 1
    with pytest.raises(CostModelError, match="no usable ts"):
        attribute([*rounds(1), {"name": "target.mlp", "ph": "X", "ts": 1}], ["target.mlp"])
    with pytest.raises(CostModelError, match="no `round` event"):
        attribute([event("target.mlp", 0, 5)], ["target.mlp"])


def test_missing_scope_and_overlapping_threads_are_warned_of():
    profile = attribute(rounds(2), ["draft.mlp", "target.mlp", "draft.fc", "sample"])
    assert profile.component_ms["draft.fc"] == 0.0
    assert any("draft.fc" in w and "sample" not in w for w in profile.warnings)
    overlapping = [event("round", 0, 1000), event("target.mlp", 0, 900), event("draft.mlp", 0, 900, tid=2)]
    profile = attribute(overlapping, ["target.mlp", "draft.mlp"])
    assert profile.component_ms["host"] == 0.0
    assert any("several threads" in w for w in profile.warnings)


def test_engine_names_map_to_components():
    events = [event("round", 0, 1000), event("ffn", 0, 700)]
    profile = attribute(events, ["target.mlp", "host"], scopes={"ffn": "target.mlp"})
    assert profile.component_ms == pytest.approx({"target.mlp": 0.7, "host": 0.3})


def test_gpu_timeline_wins_over_the_launching_threads():
    cpu = [event("round", 0, 100), event("target.mlp", 0, 40)]
    gpu = [dict(event("round", 50, 1000, tid=7), cat="gpu_user_annotation")]
    gpu.append(dict(event("target.mlp", 50, 800, tid=7), cat="gpu_user_annotation"))
    profile = attribute(cpu + gpu, ["target.mlp", "host"])
    assert (profile.rounds, profile.round_ms, profile.component_ms["target.mlp"]) == (1, 1.0, 0.8)


def test_loads_both_forms_and_gzip(tmp_path: Path):
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_text(json.dumps(rounds(1)))
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": rounds(1)}).encode()))
    assert load_events(plain) == load_events(packed)
    for text, words in (("{", "not a Chrome trace"), ('{"a": 1}', "no `traceEvents`")):
        plain.write_text(text)
        with pytest.raises(CostModelError, match=words):
            load_events(plain)
    with pytest.raises(CostModelError, match="profile the engine first"):
        load_events(tmp_path / "none.json")


def bounds(**ms):
    parts = tuple(Bound(name.replace("_", "."), value, 0.0, 0.0, 1.0, 1.0, 1.0) for name, value in ms.items())
    return RoundBound(parts, sum(ms.values()))


def test_gap_table_arithmetic_and_ranking():
    measured = {"draft.mlp": 2.0, "target.mlp": 6.0, "target.head": 1.0, "host": 1.0}
    table = gap_table(bounds(draft_mlp=0.5, target_mlp=3.0, target_head=1.0), measured, accepted_length=2.5)
    assert [row.component for row in table.rows] == ["target.mlp", "draft.mlp", "host", "target.head"]
    mlp = table.rows[0]
    assert (mlp.ratio, mlp.share, mlp.recoverable_ms) == (0.5, 0.6, 3.0)
    assert mlp.expected_gain == pytest.approx(10 / 7)
    assert table.round_ms == 10.0 and table.bound_ms == 4.5
    assert table.tokens_per_s == pytest.approx(250.0)
    assert table.tokens_per_s_at_bound == pytest.approx(2500 / 4.5)
    assert table.share_of_bound == pytest.approx(0.45)
    assert predicted_gain(table, ["target.mlp"]) == pytest.approx(mlp.expected_gain)
    assert predicted_gain(table, ["target.mlp", "draft.mlp", "host"]) == pytest.approx(10 / 4.5)
    assert predicted_gain(table, ["target.mlp"], reached=0.6) == pytest.approx(10 / 9)
    assert predicted_gain(table, ["target.head"], reached=0.5) == 1.0  # already better than that
    with pytest.raises(CostModelError, match="no component draft.fc"):
        predicted_gain(table, ["draft.fc"])
    assert Contract(**table.as_dict()).rows[0].component == "target.mlp"  # the contract takes it as it is


def test_above_the_roof_is_reported_and_makes_up_for_nothing():
    table = gap_table(bounds(target_mlp=3.0), {"target.mlp": 2.0, "host": 0.5})
    row = next(row for row in table.rows if row.component == "target.mlp")
    assert row.ratio == 1.5 and row.recoverable_ms == 0.0 and row.expected_gain == 1.0
    assert table.bound_ms == 3.0 and table.share_of_bound == pytest.approx(2.0 / 2.5), (
        "the host is all that is above its bound"
    )
    assert any("target.mlp" in w and "150%" in w and "model is wrong" in w for w in table.warnings)
    assert any("2.500 ms" in w and "120%" in w for w in table.warnings)


def test_what_is_undercut_at_the_commonest_width_is_taken_off_the_mean_bound_as_a_share():
    """Bounds of 4 ms, measured 3 and 1.5: the head undercuts its 2 ms by 0.5, an eighth. Mean bound of all widths: 3.2 ms."""
    measured = {"target.mlp": 3.0, "target.head": 1.5}
    table = gap_table(bounds(target_mlp=2.0, target_head=2.0), measured, round_ms=4.0, bound_ms=3.2)
    assert table.share_of_bound == pytest.approx(3.2 * (1 - 0.5 / 4.0) / 4.0)
    alone = gap_table(bounds(target_mlp=2.0, target_head=2.0), measured)
    assert alone.share_of_bound == pytest.approx(3.5 / 4.5)
    nothing = gap_table(bounds(target_mlp=0.0), {"target.mlp": 1.0})
    assert nothing.share_of_bound == 0.0


def test_unknown_component_and_disagreeing_round_are_warned_of():
    table = gap_table(bounds(target_mlp=1.0), {"target.mlp": 2.0, "draft.tree": 2.0}, round_ms=2.0)
    assert any("no arithmetic for draft.tree" in w for w in table.warnings)
    assert any("without the profiler" in w for w in table.warnings)
    assert table.tokens_per_s == pytest.approx(500.0)


def test_analyse_end_to_end_takes_the_regime_from_the_rounds(tmp_path: Path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": rounds(5)}))
    table = analyse(trace, SMOLLM2_135M, SMOL_DFLASH, TOY, Regime(rows=4, accepted_length=9), commit="abc")
    assert table.accepted_length == 3.0 and table.hardware["regime"]["rows"] == 8
    assert table.hardware["regime"]["context_len"] == 100
    assert table.round_ms == pytest.approx(5.5) and table.commit == "abc"
    assert any("no scope" in w and "target.qkv" in w for w in table.warnings)
    assert json.loads(json.dumps(table.as_dict()))["rows"]


def test_an_autoregressive_trace_expects_no_drafting(tmp_path: Path):
    trace = tmp_path / "trace.json"
    alone = [event("round", 0, 900, rows=1, requests=1, committed=1), event("target.mlp", 0, 800)]
    trace.write_text(json.dumps(alone))
    table = analyse(trace, SMOLLM2_135M, SMOL_DFLASH, TOY, Regime(rows=8, accepted_length=3))
    assert not [row for row in table.rows if row.component.startswith("draft.")]
    assert not any("draft" in warning for warning in table.warnings)
    assert table.hardware["regime"]["rows"] == 1 and table.accepted_length == 1.0
    # drafting that verified nothing still has a bound
    trace.write_text(json.dumps([*alone, event("draft.mlp", 800, 100)]))
    table = analyse(trace, SMOLLM2_135M, SMOL_DFLASH, TOY, Regime(rows=8))
    assert next(row for row in table.rows if row.component == "draft.mlp").bound_ms > 0


def test_rounds_may_name_a_reduced_draft_head(tmp_path: Path):
    trace = tmp_path / "trace.json"
    whole = [event("round", 0, 900, rows=8, requests=1, committed=3), event("draft.head", 0, 100)]
    reduced = [{**whole[0], "args": {**whole[0]["args"], "draft_vocab": 4096, "draft_rows": 5}}, whole[1]]
    bounds_of = []
    for events in (whole, reduced):
        trace.write_text(json.dumps(events))
        table = analyse(trace, SMOLLM2_135M, SMOL_DFLASH, TOY, Regime(rows=8))
        head = next(row for row in table.rows if row.component == "draft.head")
        bounds_of.append(table.hardware["operations"][head.component])
    assert bounds_of == [2 * 7 * 49152 * 576, 2 * 4 * 4096 * 576]


def test_table_without_measurement_has_bounds_only(tmp_path: Path):
    table = analyse(None, SMOLLM2_135M, "ngram", TOY, Regime(rows=8))
    assert table.round_ms == 0.0 and table.share_of_bound == 0.0 and table.bound_ms > 0
    assert not [row for row in table.rows if row.component.startswith("draft.")]
    assert all(row.measured_ms == 0 and row.expected_gain == 1.0 for row in table.rows)


def test_rendering_shows_every_component_and_warning():
    table = gap_table(bounds(draft_mlp=0.5, target_mlp=3.0), {"draft.mlp": 2.0, "target.mlp": 2.0, "host": 1.0})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(rich_table(table, title="now"))
    text = console.export_text()
    for word in ("draft.mlp", "target.mlp", "host", "150%", "model is wrong", "recoverable"):
        assert word in text


def test_rounds_of_the_commonest_width_make_the_table() -> None:
    """Two rounds of 8 rows and 10 ms, one of 2 rows and 4 ms: the table is of the 10 ms, the acceptance of all three."""
    events = [
        {
            "name": "round",
            "ph": "X",
            "ts": 20_000.0 * k,
            "dur": dur,
            "pid": 1,
            "tid": 1,
            "args": {"rows": rows, "committed": c},
        }
        for k, (rows, dur, c) in enumerate([(8, 10_000.0, 4), (2, 4_000.0, 1), (8, 10_000.0, 4)])
    ]
    profile = attribute(events, ["host"])
    assert (profile.round_ms, profile.rows, profile.rounds, profile.varied) == (10.0, 8, 2, True)
    assert profile.widths == {8: 2, 2: 1}
    assert profile.accepted_length == 3.0


def test_an_engine_that_varies_its_width_is_held_against_the_mean_bound(tmp_path: Path) -> None:
    def table_of(*widths: int):
        events = [event("round", 1e5 * k, 9e4, rows=n, requests=1, committed=2) for k, n in enumerate(widths)]
        (tmp_path / "trace.json").write_text(json.dumps(events))
        return analyse(tmp_path / "trace.json", SMOLLM2_135M, "none", TOY, Regime(rows=1), round_ms=90.0)

    wide, narrow, both = table_of(8, 8), table_of(2, 2), table_of(8, 2, 8)
    assert both.bound_ms == pytest.approx((2 * wide.bound_ms + narrow.bound_ms) / 3)
    assert both.share_of_bound == pytest.approx(both.bound_ms / 90.0)
    assert sum(row.bound_ms for row in both.rows) == pytest.approx(wide.bound_ms)  # the rows: of the commonest width
    assert any("mean over all 2 widths" in warning for warning in both.warnings)


def test_roofs_around_a_measurement_are_means_and_the_best_stays_the_best() -> None:
    before = Hardware(
        "m", "cpu", 40.0, {"float32": 200.0}, 1.0, 1 << 20, "measured", best={"read_gbs": 50.0, "fork_join_us": 0.5}
    )
    after = Hardware("m", "cpu", 30.0, {"float32": 160.0}, 3.0, 1 << 20, "measured", lower_bound=True, best={"read_gbs": 45.0, "fork_join_us": 0.7})  # fmt: skip
    between = before.until(after)
    assert (between.bandwidth_gbs, between.peak(), between.launch_us, between.lower_bound) == (35.0, 180.0, 2.0, True)
    assert between.best == {"read_gbs": 50.0, "fork_join_us": 0.5}
