"""The `memory` commands: what a user reads, and how they exit."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from specpilot.memory import Effect, Mechanism, MemoryStore
from specpilot.memory.cli import make_app

run = CliRunner()


@pytest.fixture
def filled(store, mechanism, effect, url):
    store.add(mechanism(), origin="run-1")
    store.record_effect("bf16_gemm", effect())
    return url


def call(*arguments, app=None):
    return run.invoke(app or make_app(), list(arguments), env={"COLUMNS": "200"})


def test_inspect_shows_effect_and_helpfulness(filled):
    result = call("inspect", "--url", filled)
    assert result.exit_code == 0, result.output
    assert "bf16_gemm" in result.output and "1.50x [1.40, 1.60]" in result.output
    assert "nothing was recalled yet" in result.output


def test_show_and_patch(filled, mechanism):
    result = call("show", "bf16_gemm", "--url", filled, "--patch")
    assert "effect: 1.500x [1.400, 1.600] over 2 pairs, cpu_c1 on cpu/avx2 (verified; run run-1" in result.output
    assert result.output.endswith(mechanism().patch)


def test_predicted_stands_beside_realised(filled, store, effect):
    assert "predicted" not in call("show", "bf16_gemm", "--url", filled).output, "nothing is known: nothing is said"
    store.record_effect("bf16_gemm", effect(3.0, run="run-2", commit="c1", predicted_ms=4.25))
    assert "component predicted 4.25 ms a round, realised ?" in call("show", "bf16_gemm", "--url", filled).output
    store.record_realised("bf16_gemm", run="run-2", commit="c1", realised_ms=5.5)
    assert "component predicted 4.25 ms a round, realised 5.50" in call("show", "bf16_gemm", "--url", filled).output
    shown = call("inspect", "--url", filled).output
    assert "ms predicted / realised" in shown and "4.2 / 5.5" in shown


def test_unknown_name_exits_2(filled):
    result = call("show", "nope", "--url", filled)
    assert (
        result.exit_code == 2
        and "no mechanism nope" in result.output
        and "known: " in result.output
        and "bf16_gemm" in result.output
    )


def test_search(filled):
    assert "bf16_gemm" in call("search", "skinny", "--url", filled).output
    assert "nothing mentions" in call("search", "zebra", "--url", filled).output


def test_export_import_and_tampering(filled, tmp_path):
    path = tmp_path / "m.json"
    assert "wrote" in call("export", str(path), "--url", filled).output
    other = f"sqlite:///{tmp_path / 'o.db'}"
    assert call("import", str(path), "--url", other).exit_code == 0
    path.write_text(path.read_text().replace("Skinny", "Fat"))
    result = call("import", str(path), "--url", other)
    assert result.exit_code == 8 and "checksum" in result.output


@dataclass
class Loop:
    """The loop's side of `verify`, with answers given in advance."""

    interval: str = ""
    fits: bool | None = True
    code: int = 0
    asked: list[tuple[list[str], str, str]] = field(default_factory=list)

    def interval_problem(self, _effect: Effect) -> str:
        return self.interval

    def fit(self, _chain: list[Mechanism]) -> tuple[bool | None, str]:
        return self.fits, "applies" if self.fits else "does not fit"

    def replay(self, chain: list[Mechanism], deployment: str, url: str) -> int:
        self.asked.append(([item.name for item in chain], deployment, url))
        return self.code


def status(url: str, name: str = "bf16_gemm") -> str:
    with MemoryStore(url, seed_folder=None) as opened:
        return opened.get(name).status


def test_verify_says_what_was_not_measured_and_calls_the_loop_when_asked(filled):
    listed = call("verify", "bf16_gemm", "--url", filled)
    assert listed.exit_code == 0 and "not measured again; --run would, on cpu_c1" in listed.output
    loop = Loop(code=10)
    done = call("verify", "bf16_gemm", "--run", "--url", filled, app=make_app(loop))
    assert loop.asked == [(["bf16_gemm"], "cpu_c1", filled)] and done.exit_code == 10
    assert call("verify", "bf16_gemm", "--run", "--url", filled).exit_code == 2


def test_verify_replays_on_top_of_what_is_required(filled, store, mechanism, effect):
    store.add(mechanism("second", requires=["bf16_gemm"]), origin="run-1")
    store.add(mechanism("third", requires=["second", "bf16_gemm"]), origin="run-1")
    loop = Loop()
    done = call("verify", "third", "--replay", "--deployment", "here", "--url", filled, app=make_app(loop))
    assert done.exit_code == 0 and loop.asked == [(["bf16_gemm", "second", "third"], "here", filled)]
    store.add(mechanism("circle", requires=["circle2"]), origin="x")
    store.add(mechanism("circle2", requires=["circle"]), origin="x")
    circle = call("verify", "circle", "--url", filled)
    assert circle.exit_code == 2 and "circle requires circle2 requires circle: a circle" in circle.output


def test_verify_marks_what_does_not_fit_stale_and_takes_it_back(filled):
    done = call("verify", "bf16_gemm", "--run", "--url", filled, app=make_app(Loop(fits=False)))
    assert done.exit_code == 10 and "patch: does not fit" in done.output
    assert "marked stale (it was verified)" in done.output and status(filled) == "stale"
    again = call("verify", "bf16_gemm", "--url", filled, app=make_app(Loop()))
    assert again.exit_code == 0 and status(filled) == "verified"


def test_verify_recomputes_intervals(filled):
    done = call("verify", "bf16_gemm", "--url", filled, app=make_app(Loop(interval="interval is off")))
    assert done.exit_code == 8 and "2026-11-01: interval is off" in done.output and status(filled) == "stale"


def test_verify_finds_evidence_that_contradicts_its_samples(store, mechanism, effect, url):
    store.add(mechanism(), origin="a")
    store.record_effect("bf16_gemm", effect(1.5, samples=[1.0, 1.0]))
    store.record_effect("bf16_gemm", effect(1.05, low=0.99))
    result = call("verify", "bf16_gemm", "--url", url)
    assert result.exit_code == 8 and "its samples give 1.000x" in result.output
    assert "called verified, but its interval begins at 0.990" in result.output
    assert status(url) == "stale"


@pytest.mark.parametrize(
    "change, told",
    [
        ("update effect set ratio = 9.0", "the effect on cpu_c1 was changed"),
        ("update effect set detail = replace(detail, '1.6', '1.7')", "the effect on cpu_c1 was changed"),
        ("update mechanism set hypothesis = 'It is magic.'", "version 1 was changed"),
        ("update mechanism set patch = patch || ' '", "does not match its checksum"),
    ],
)
def test_verify_finds_rows_changed_behind_its_back(filled, change, told):
    with sqlite3.connect(filled.removeprefix("sqlite:///")) as database:
        database.execute(change)
    result = call("verify", "bf16_gemm", "--url", filled)
    assert result.exit_code == 8 and told in result.output


def test_unusable_store_exits_3(tmp_path):
    (tmp_path / "file").write_text("x" * 5000)
    result = call("inspect", "--url", str(tmp_path / "file"))
    assert result.exit_code == 3 and "cannot open the memory" in result.output


def test_unproven_mechanism_is_no_contradiction(store, mechanism, url):
    store.add(mechanism(), origin="a")
    result = call("verify", "bf16_gemm", "--url", url)
    assert result.exit_code == 0 and "unproven" in result.output


def test_empty_memory(store, url):
    """The shipped seeds are loaded into it; without any the command says so."""
    result = call("inspect", "--url", url)
    assert result.exit_code == 0 and ("mechanism" in result.output or "the memory is empty" in result.output)
