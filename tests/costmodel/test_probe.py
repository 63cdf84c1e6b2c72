"""The machine probe: positive, cached, and honest without a compiler."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from specpilot.costmodel import measure_machine, measured_machine, resolve_hardware, this_machine
from specpilot.costmodel import probe as probe_module

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_identity_is_stable_and_plausible():
    first, second = this_machine(), this_machine()
    assert first == second and len(first.fingerprint) == 16
    assert 1 <= first.threads <= (os.cpu_count() or 1)
    assert first.cache_bytes >= 256 << 10


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short measurements: the tests check the machinery, not this machine."""
    monkeypatch.setattr(probe_module, "REPEATS", 3)
    monkeypatch.setattr(probe_module, "ATTEMPTS", 1)
    monkeypatch.setattr(probe_module, "working_set", lambda cache_bytes: 96 << 20)


@needs_compiler
def test_native_probe_is_positive_and_no_median_beats_the_best_pass():
    found = measure_machine()
    assert found.source == "measured" and found.copy_gbs and found.ridge > 0 and found.launch_us > 0
    assert 0 < found.bandwidth_gbs <= found.best["read_gbs"]
    assert 0 < found.copy_gbs <= found.best["copy_gbs"]
    assert 0 < found.peak() <= found.best["fma_gflops"]
    assert found.launch_us >= found.best["fork_join_us"] > 0
    assert found.at_best().bandwidth_gbs == found.best["read_gbs"]


def test_without_a_compiler_numpy_measures_a_flagged_lower_bound(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = measured_machine(tmp_path / "machine.json")
    assert found.lower_bound and found.bandwidth_gbs > 0 and found.peak() > 0
    assert found.launch_us == 1.0, "Python's own hand-over of 100 us would make every bound too long"
    assert any("no working g++" in note for note in found.notes)


def test_a_broken_compiler_counts_as_none(monkeypatch, tmp_path: Path):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe_module._native(1, 64 << 20, 1) is None


def test_cache_is_keyed_by_machine_and_survives_damage(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler: measuring with numpy is quick
    path = tmp_path / "home" / "machine.json"
    first = measured_machine(path)
    stored = json.loads(path.read_text())
    assert list(stored) == [this_machine().fingerprint]
    assert measured_machine(path) == first  # no second measurement
    stored[this_machine().fingerprint]["bandwidth_gbs"] = 123.0
    stored["another-machine"] = {"bandwidth_gbs": 1}
    path.write_text(json.dumps(stored))
    assert measured_machine(path).bandwidth_gbs == 123.0
    assert measured_machine(path, remeasure=True).bandwidth_gbs != 123.0
    assert "another-machine" in json.loads(path.read_text())
    path.write_text("not json")
    assert measured_machine(path).bandwidth_gbs > 0


def test_a_cached_lower_bound_is_measured_again_once_there_is_a_compiler(tmp_path: Path, monkeypatch):
    path = tmp_path / "machine.json"
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        assert measured_machine(path).lower_bound
    if shutil.which("g++"):
        assert not any("no working g++" in note for note in measured_machine(path).notes)


def test_auto_follows_the_gpu_when_there_is_one(tmp_path: Path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_hardware("auto", tmp_path / "m.json").name == "NVIDIA H200"
    fake.write_text("#!/bin/sh\necho 'driver failed' >&2\nexit 9\n")
    assert resolve_hardware("auto", tmp_path / "m.json").kind == "cpu"
    assert resolve_hardware("cpu-generic", tmp_path / "m.json").bandwidth_gbs == 27.0
