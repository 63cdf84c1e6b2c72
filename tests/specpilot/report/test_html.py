"""The HTML report: well-formed, self-contained, complete, safe against hostile words, and honest about what is missing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.report.charts import Log, points, spread_out
from specpilot.report.data import Fate, ReportData, Step
from specpilot.report.html import components, render_report, waterfall, write_report
from tests.specpilot.report.sample import AFTER, BEFORE, CHEATS, gaps, report_data

VOID = {"meta", "link", "br", "hr", "img", "input", "circle", "line", "path"}


class Outline(HTMLParser):
    """Collects tags, ids, attributes and text; complains about tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(report_data())


def test_is_well_formed_with_real_headings_and_described_drawings(page):
    outline = Outline(page)
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    ids = [attrs["id"] for _, attrs in outline.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    for tag, attrs in outline.tags:
        if tag == "svg":
            assert attrs.get("role") == "img" and (attrs.get("aria-label") or attrs.get("aria-labelledby"))
        if tag == "th":
            assert attrs.get("scope") in ("col", "row")
        if attrs.get("aria-labelledby"):
            assert all(name in ids for name in attrs["aria-labelledby"].split())
    assert dict(outline.tags)["html"]["lang"] == "en"


def test_is_self_contained(page):
    outline = Outline(page)
    assert not [tag for tag, _ in outline.tags if tag in ("script", "link", "img", "iframe", "object", "base", "form")]
    for _, attrs in outline.tags:
        assert not {"src", "href", "srcset", "xlink:href", "action"} & set(attrs)
        assert not [name for name in attrs if name.startswith("on")]
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert len(page) < 150_000


def test_shows_every_attempt_cheat_figure_and_command(page):
    text = Outline(page).text
    data = report_data()
    for fate in data.attempts:
        assert fate.id in text and (fate.mechanism or fate.component) in text and fate.hypothesis in text
        if fate.reason:
            assert f"{fate.state}: {fate.reason}" in text
    for name, reason in CHEATS:
        assert name in text and f"rejected: {reason}" in text
    for words in ("2.14×", "2.05–2.24", "3.62×", "1.53×", "149.7", "63%", "0.0200 nats", "rounds-done", "14:46 of 15:00",
                  "specpilot export", "3,072 tokens forced: 3,068 exact, 4 near-ties, 0 violations", "not explained by the steps",
                  "AMD EPYC, 2 threads", "4 mechanisms", "predicted 1.62×", "measured 6% above", "12,474 tokens"):  # fmt: skip
        assert words in text, words


def test_hostile_words_stay_words():
    evil = "<script>alert('x')</script><img src=x onerror=y> {{ 7*7 }} \" ' & </style>"
    data = report_data()
    fates = [
        f.model_copy(update={"hypothesis": evil, "detail": evil, "mechanism": evil, "worker": evil})
        for f in data.attempts
    ]
    hostile = data.model_copy(
        update={
            "attempts": fates, "deployment": evil, "run_id": evil, "summary": evil, "notes": [evil],
            "steps": [Step(attempt_id="a", mechanism=evil, gain=1.1)],
            "events": [e.model_copy(update={"text": evil}) for e in data.events],
            "hardware": {**data.hardware, "name": evil},
            "gaps_after": gaps({**AFTER, evil: 9.0}, evil),
        }
    )  # fmt: skip
    page = render_report(hostile)
    outline = Outline(page)
    assert "<script" not in page and "onerror=y>" not in page.replace("onerror=y&gt;", "")
    assert not [tag for tag, _ in outline.tags if tag in ("script", "img")]
    assert "alert('x')" in outline.text and "{{ 7*7 }}" in outline.text and "49" not in evil


def test_waterfall_steps_chain_and_leave_the_rest_visible():
    bars = waterfall(report_data())
    assert [bar.kind for bar in bars] == ["total", "gain", "gain", "gain", "rest", "total"]
    for before, after in zip(bars[1:-1], bars[2:-1], strict=False):
        assert before.end == pytest.approx(after.start)
    assert bars[1].start == 1.0 and bars[3].end == pytest.approx(1.71 * 1.13 * 1.06)
    assert bars[4].end == pytest.approx(2.14) == bars[5].end
    assert max(bar.left + bar.width for bar in bars) == pytest.approx(100)
    data = report_data()
    worse = data.model_copy(update={"steps": [*data.steps, Step(attempt_id="x", component="host", gain=0.9)]})
    assert waterfall(worse)[4].kind == "loss"


def test_component_bars_scale_to_the_longest():
    bars = components(report_data())
    assert len(bars) == len(BEFORE) and bars[0].name == "target.mlp"
    assert bars[0].before_width == 100.0 and bars[0].ratio == pytest.approx(29.5 / 8.6)
    assert all(0 <= width <= 100 for bar in bars for width in (bar.before_width, bar.after_width, bar.bound_left))


def test_roofline_points_are_operations_over_time():
    data = report_data()
    found = {p.name: p for p in points(data.gaps_before, data.gaps_after)}
    operations = 2 * 8 * 3 * 1536 * 576 * 30
    assert found["target.mlp"].before == pytest.approx(operations / 29.5e-3 / 1e9)
    assert found["target.mlp"].intensity == pytest.approx(8.0)
    assert "host" not in found and "target.embed" not in found


@given(st.lists(st.floats(0, 400), max_size=12))
def test_labels_never_overlap_where_there_is_room(wanted):
    placed = spread_out(wanted, 17.0, 0.0, 400.0)
    ordered = sorted(placed)
    assert all(b - a >= 17.0 - 1e-6 for a, b in zip(ordered, ordered[1:], strict=False))
    assert all(-1e-6 <= value <= 400.0 + 1e-6 for value in placed)


def test_log_axis():
    axis = Log(1.0, 100.0, 0.0, 200.0)
    assert (axis(1.0), axis(10.0), axis(100.0)) == (0.0, 100.0, 200.0)
    assert axis.ticks() == [1, 2, 5, 10, 20, 50, 100]


@pytest.mark.parametrize(
    "change",
    [
        {"gaps_after": None},
        {"gaps_before": None},
        {"self_test": None, "calibration": None},
        {"ratios": []},
        {"figures": [], "ratios": [], "steps": []},
        {"attempts": []},
        {"hardware": {}},
    ],
)
def test_parts_may_be_missing(change):
    outline = Outline(render_report(report_data().model_copy(update=change)))
    assert "How it ended" in outline.text


def test_first_look_figures_are_not_called_the_closing_session():
    whole = Outline(render_report(report_data())).text
    assert "Four engines, one session" in whole and "prompts of the closing session" in whole
    early = Outline(render_report(report_data().model_copy(update={"closed": False}))).text
    assert "Four engines, one session" not in early and "The closing session was not measured" in early


def test_a_run_that_ended_at_once_has_a_report():
    bare = ReportData(deployment="d", run_id="r", stop_reason="gate-unsound", attempts=[])
    text = Outline(render_report(bare)).text
    assert "ended before its closing measurement (gate-unsound)" in text and "No candidate was tried" in text
    fate = Fate(id="a", round=1, worker="w", component="c", state="working")
    assert "working" in Outline(render_report(bare.model_copy(update={"attempts": [fate]}))).text


def test_written_whole_and_replaced(tmp_path: Path):
    path = write_report(report_data(), tmp_path / "deep" / "report.html")
    first = path.read_text()
    assert first.startswith("<!doctype html>") and first.rstrip().endswith("</html>")
    write_report(ReportData(deployment="other", run_id="r"), path)
    assert "other" in path.read_text() and [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert ReportData.model_validate_json(report_data().model_dump_json()) == report_data()
