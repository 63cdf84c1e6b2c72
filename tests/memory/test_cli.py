"""The `memory` commands: what a user reads, and how they exit."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

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


def test_verify_lists_replays_and_calls_the_loop(filled):
    listed = call("verify", "bf16_gemm", "--url", filled)
    assert listed.exit_code == 0 and "replay: bf16_gemm version 1 on cpu_c1" in listed.output
    asked = []
    app = make_app(lambda stored, deployment: asked.append((stored.mechanism.name, deployment)) or 7)
    done = call("verify", "bf16_gemm", "--run", "--url", filled, app=app)
    assert asked == [("bf16_gemm", "cpu_c1")] and done.exit_code == 7
    assert call("verify", "bf16_gemm", "--run", "--url", filled).exit_code == 2


def test_verify_finds_evidence_that_contradicts_its_samples(store, mechanism, effect, url):
    store.add(mechanism(), origin="a")
    store.record_effect("bf16_gemm", effect(1.5, samples=[1.0, 1.0]))
    result = call("verify", "bf16_gemm", "--url", url)
    assert result.exit_code == 8 and "its samples give 1.000x" in result.output


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
