"""The live view: plain lines without a terminal, a screen on one, and never an exception into the run."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.console import Console

from specpilot.report.data import Again, ReportData, Step
from specpilot.report.html import render_report
from specpilot.report.state import AttemptLine, RunState
from specpilot.report.summary import final_summary
from specpilot.report.view import RunView
from tests.specpilot.report.sample import CHEATS, report_data, run_events


def text_of(renderable: object, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(renderable)
    return console.export_text()


def played(**options: object) -> tuple[RunView, str]:
    out = io.StringIO()
    view = RunView("demo", "run-1", console=Console(file=out, width=200), **options)  # type: ignore[arg-type]
    with view:
        for kind, data in run_events():
            view.event(kind, data)
        view.event("done", {"stop": "rounds-done", "report": "/tmp/report.html", "data": report_data()})
    return view, out.getvalue()


def test_without_a_terminal_every_event_is_a_plain_line():
    view, text = played()
    assert view.plain and "\x1b[" not in text
    for name, reason in CHEATS:
        assert f"cheat {name}: rejected ({reason})" in text
    for words in (
        "run run-1 of demo",
        "baseline stock: 69.9 tokens/s, accepted length 3.08",
        "profile: round 89.3 ms timed (tracing off), 17% of the bound; most recoverable, profiled (tracing on): target.mlp",
        "r1-recall-1 native-bf16-skinny-gemm: measured 1.710x",
        "gate passed: 3,072 tokens forced, 3,068 exact, 4 near-ties, 0 violations",
        "gate REJECTED (token-mismatch)",
        "merge r1-recall-2 reduced-draft-head: 1.130x [1.100, 1.160], so far 1.93x",
        "search tpe verify_drafts=5: 1.040x",
        "warning: r1-recall-3",
        "report: /tmp/report.html",
        "2.14x [2.050, 2.240] over the stock speculative engine",
        "not explained by the steps",
    ):
        assert words in text, words


def test_no_news_is_told_twice():
    """The measurement, the gate and the merge tell their states themselves; a rejection repeats no detail."""
    _, text = played()
    lines = [line.split(" ", 1)[1] for line in text.splitlines() if " r1-" in line]
    assert [line for line in lines if line.startswith("r1-recall-1 ")] == [
        "r1-recall-1 native-bf16-skinny-gemm: planned",
        "r1-recall-1 native-bf16-skinny-gemm: submitted",
        "r1-recall-1 native-bf16-skinny-gemm: measured 1.710x [1.659, 1.761], gain after 6 pairs",
        "r1-recall-1 native-bf16-skinny-gemm: gate passed: 3,072 tokens forced, 3,068 exact, 4 near-ties, 0 violations",
    ]
    assert "r1-recall-3 w12-weights: rejected (no-gain)" in lines, "its ratio is in the line before"
    assert "r1-external-1 sample: rejected (token-mismatch)" in lines, "the gate's line has the detail"
    assert len(lines) == len(set(lines))
    state = RunState()
    unmeasured = {"id": "x-1", "worker": "external", "state": "rejected", "reason": "crashed", "detail": "no start"}
    assert state.apply("attempt", unmeasured) == ["x-1: rejected (crashed): no start"]


def test_a_searched_change_is_called_by_both_its_names():
    state = RunState()
    task = "Set prefill_chunk = 38, verify_drafts = 4"
    attempt = {"id": "r3-search-1", "worker": "search", "component": "*", "task": task, "state": "submitted"}
    assert state.apply("attempt", attempt) == [f"r3-search-1 {task}: submitted"]
    state.apply("attempt", attempt | {"state": "merged", "mechanism": "set-prefill-chunk-38"})
    told = state.apply("merge", {"attempt_id": "r3-search-1", "merged": True, "gain": 1.13, "low": 1.0, "high": 1.28})
    assert told == ["merge r3-search-1 set-prefill-chunk-38: 1.130x [1.000, 1.280], so far 1.13x"]
    step = Step(attempt_id="r3-search-1", mechanism="set-prefill-chunk-38", gain=1.13)
    left = Again(attempt_id="r3-search-1", name="set-prefill-chunk-38", outcome="hurts")
    data = report_data().model_copy(update={"steps": [step], "left_out": [left]})
    assert text_of(final_summary(data)).count("r3-search-1 set-prefill-chunk-38") == 2
    assert render_report(data).count("r3-search-1 set-prefill-chunk-38") == 2
    assert Step(attempt_id="x-1", gain=1.1).names == "x-1", "one name is not said twice"


def kinds_said() -> set[str]:
    """Every kind of event that the program writes, by its source."""
    found = set()
    for file in (Path(__file__).parents[3] / "specpilot").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr in ("say", "event") and isinstance(first, ast.Constant):
                    found.add(str(first.value))
    return found


def test_every_kind_of_event_is_read_and_explained():
    assert {"phase", "trial", "extended", "left-out", "pair"} <= kinds_said()
    assert {kind for kind in kinds_said() if not hasattr(RunState, f"_{kind.replace('-', '_')}")} == set()
    assert {kind for kind in kinds_said() if f"- `{kind}`:" not in (RunView.__doc__ or "")} == set()


def test_a_missed_cheat_stands_out():
    state = RunState()
    outcome = {"cheat": "lossy-accept", "caught": False, "got": None, "expected": ["token-mismatch"]}
    assert state.apply("selftest", outcome) == ["cheat lossy-accept: MISSED: not rejected, expected token-mismatch"]
    told = state.apply("selftest", {"outcomes": [outcome], "passed": False})
    assert told[-1] == "gate self-test FAILED: 0 of 1 planted cheats rejected"


def test_a_session_of_several_engines_tells_how_far_it_is():
    state = RunState()
    state.apply("phase", {"name": "closing", "detail": "ar, stock, final and final-ar in one session"})
    assert state.apply("prompts", {"done": 3, "of": 8}) == ["closing: 3 of 8 prompts answered by every engine"]
    assert state.detail.startswith("3 of 8")


def test_what_is_done_to_an_attempt_names_it_in_full():
    state = RunState()
    state.apply(
        "attempt", {"id": "r3-search-1", "worker": "search", "mechanism": "set-pack-rows-32", "state": "submitted"}
    )
    phase = {"name": "round 3", "detail": "measured in pairs with the round's base", "attempt": "r3-search-1"}
    named = "round 3: r3-search-1 set-pack-rows-32: "
    assert state.apply("phase", phase) == [named + "measured in pairs with the round's base"]
    assert state.apply("doing", {"text": "laid on the head", "attempt": "r3-search-1"}) == [named + "laid on the head"]
    assert state.apply("doing", {"text": "starting ar, stock"}) == ["round 3: starting ar, stock"]


def test_screen_shows_every_part_and_fits_a_small_terminal():
    console = Console(file=io.StringIO(), width=110, height=50, force_terminal=True)
    view = RunView("demo", "run-1", console=console)
    assert not view.plain
    for kind, data in run_events():
        view.event(kind, data)
    text = text_of(view.render())
    for words in ("demo", "round 1", "left", "self-test passed", "target.mlp", "worth", "merged", "w12-weights", "no-gain",
                  "product of steps 1.93x", "log"):  # fmt: skip
        assert words in text, words
    small = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    view.console = small
    shown = text_of(view.render(), 80)
    assert len(shown.splitlines()) <= 24 and "attempts" in shown and "merged" in shown and "baselines" not in shown
    view.console = console
    many = RunState(round=1, attempts={f"a{i}": AttemptLine(f"a{i}", round=1, state="rejected") for i in range(99)})
    many.attempts["busy"] = AttemptLine("busy", round=1, state="working", pairs="3/12")
    view.state = many
    shown = text_of(view.render())
    assert "busy" in shown and "pair 3/12" in shown and len(shown.splitlines()) < 50


def test_live_screen_runs_and_leaves_the_summary():
    out = io.StringIO()
    view = RunView("demo", "run-1", console=Console(file=out, width=110, height=40, force_terminal=True))
    with view:
        for kind, data in run_events():
            view.event(kind, data)
        view.event("done", {"stop": "rounds-done", "report": "/runs/x/report.html", "data": report_data()})
    assert out.getvalue().rstrip().endswith("report  /runs/x/report.html")
    assert "over the stock speculative engine" in out.getvalue()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("unknown", {}), ("gaps", {"rows": [{"component": "x"}]}), ("selftest", {}), ("baseline", {}), ("attempt", {}),
        ("comparison", {"ratio": "fast", "pairs": None}), ("merge", {}), ("verdict", {"detail": None}), ("note", {}),
        ("gaps", {"rows": None}), ("baseline", {"variants": {"ar": {}}}), ("budget", {"limit_s": 0}), ("done", {}),
        ("trial", {"values": None}), ("selftest-end", {"null_ratio": "x"}), ("verdict", {"passed": True, "positions": None}),
    ],
)  # fmt: skip
def test_odd_events_never_raise(kind, data):
    out = io.StringIO()
    view = RunView(console=Console(file=out, width=100))
    view.event(kind, data)
    view.render()
    assert text_of(view.render())


def test_markup_in_foreign_words_is_not_interpreted():
    out = io.StringIO()
    view = RunView(console=Console(file=out, width=100))
    view.event("note", {"level": "info", "text": "[red]boo[/red] [/nothing]"})
    assert "[red]boo[/red] [/nothing]" in out.getvalue()


def test_time_of_earlier_sessions_counts():
    state = RunState()
    state.apply("budget", {"elapsed_s": 600.0, "limit_s": 900.0})
    view = RunView(console=Console(file=io.StringIO(), width=100))
    view.state = state
    text = text_of(view.render())
    assert "10:0" in text and (" 5:00 left" in text or " 4:5" in text)


def test_summary_of_a_run_that_ended_early():
    text = text_of(final_summary(ReportData(deployment="d", run_id="r", stop_reason="interrupted")))
    assert "no closing measurement" in text and "interrupted" in text
    data = report_data()
    assert data.unexplained == pytest.approx(2.14 / (1.71 * 1.13 * 1.06))
    assert data.explained == pytest.approx(1.71 * 1.13 * 1.06)
