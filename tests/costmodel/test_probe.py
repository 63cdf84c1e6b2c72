"""The machine probe: positive, cached, and honest without a compiler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specpilot.costmodel import measure_machine, measured_machine, resolve_hardware, this_machine
from specpilot.costmodel import probe as probe_module

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_identity_is_stable_and_plausible():
    first, second = this_machine(2), this_machine(2)
    assert first == second and len(first.fingerprint) == 16
    assert first.threads == 2 and first.fingerprint != this_machine(1).fingerprint
    assert first.cache_bytes >= 256 << 10


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short measurements: the tests check the machinery, not this machine."""
    monkeypatch.setattr(probe_module, "REPEATS", 3)
    monkeypatch.setattr(probe_module, "ATTEMPTS", 1)
    monkeypatch.setattr(probe_module, "working_set", lambda cache_bytes: 96 << 20)


@needs_compiler
def test_native_probe_is_positive_and_no_median_beats_the_best_pass():
    found = measure_machine(threads=2)
    assert found.source == "measured" and found.copy_gbs and found.ridge > 0 and found.launch_us > 0
    assert 0 < found.bandwidth_gbs <= found.best["read_gbs"]
    assert 0 < found.copy_gbs <= found.best["copy_gbs"]
    assert 0 < found.peak() <= found.best["fma_gflops"]
    assert found.launch_us >= found.best["fork_join_us"] > 0
    assert found.at_best().bandwidth_gbs == found.best["read_gbs"]


def test_without_a_compiler_numpy_measures_a_flagged_lower_bound(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = measured_machine(tmp_path / "machine.json", threads=1)
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
    first = measured_machine(path, threads=1)
    stored = json.loads(path.read_text())
    assert list(stored) == [this_machine(1).fingerprint]
    assert measured_machine(path, threads=1) == first  # no second measurement
    stored[this_machine(1).fingerprint]["bandwidth_gbs"] = 123.0
    stored["another-machine"] = {"bandwidth_gbs": 1}
    path.write_text(json.dumps(stored))
    assert measured_machine(path, threads=1).bandwidth_gbs == 123.0
    assert measured_machine(path, threads=1, remeasure=True).bandwidth_gbs != 123.0
    assert "another-machine" in json.loads(path.read_text())
    path.write_text("not json")
    assert measured_machine(path, threads=1).bandwidth_gbs > 0


def test_a_cached_lower_bound_is_measured_again_once_there_is_a_compiler(tmp_path: Path, monkeypatch):
    path = tmp_path / "machine.json"
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        assert measured_machine(path, threads=1).lower_bound
    if shutil.which("g++"):
        assert not any("no working g++" in note for note in measured_machine(path, threads=1).notes)


def test_auto_follows_the_gpu_when_there_is_one(tmp_path: Path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_hardware("auto", tmp_path / "m.json", threads=1).name == "NVIDIA H200"
    fake.write_text("#!/bin/sh\necho 'driver failed' >&2\nexit 9\n")
    assert resolve_hardware("auto", tmp_path / "m.json", threads=1).kind == "cpu"
    assert resolve_hardware("cpu-generic", tmp_path / "m.json", threads=1).bandwidth_gbs == 27.0


def cpu(system: Path, number: int, *caches: tuple[int, str, str, str]) -> None:
    """A made-up /sys entry: caches as (level, type, size, CPUs that share it)."""
    for index, (level, kind, size, shared) in enumerate(caches):
        folder = system / f"cpu{number}/cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(value + "\n")


def test_the_last_level_caches_of_all_allowed_cpus_count_once_each(tmp_path: Path):
    """An EPYC of 96 cores: twelve groups of eight, 32 MiB of L3 each."""
    for number in range(96):
        group = number // 8 * 8
        third = (3, "Unified", "32768K", f"{group}-{group + 7}")
        cpu(tmp_path, number, (1, "Data", "32K", str(number)), (1, "Instruction", "64M", str(number)), third)
    assert probe_module.last_level_caches(range(96), tmp_path) == 12 * (32 << 20)
    assert probe_module.last_level_caches(range(12), tmp_path) == 2 * (32 << 20)
    assert probe_module.last_level_caches([95], tmp_path) == 32 << 20


def test_a_processor_whose_last_level_is_the_second(tmp_path: Path):
    for number in range(4):
        cpu(tmp_path, number, (1, "Data", "64K", str(number)), (2, "Unified", "2M", str(number)))
    assert probe_module.last_level_caches(range(4), tmp_path) == 8 << 20
    assert probe_module.last_level_caches([7], tmp_path) == 32 << 20, "a system that does not say"


def test_the_working_set_is_larger_than_all_caches_together(monkeypatch):
    monkeypatch.undo()  # the real one
    monkeypatch.setattr(probe_module, "_available_memory", lambda: 64 << 30)
    assert probe_module.working_set(32 << 20) == 256 << 20
    assert probe_module.working_set(12 * (32 << 20)) == 3 << 30  # each quarter, one pass: twice the caches
    monkeypatch.setattr(probe_module, "_available_memory", lambda: 4 << 30)
    assert probe_module.working_set(12 * (32 << 20)) == 1 << 30
    monkeypatch.setattr(probe_module, "_available_memory", lambda: 0)
    assert probe_module.working_set(32 << 20) == 64 << 20


def test_a_working_set_that_the_caches_hold_is_told(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe_module, "last_level_caches", lambda cpus: 64 << 20)
    assert any("64 MiB of cache" in note for note in measure_machine(threads=1).notes)
    monkeypatch.setattr(probe_module, "last_level_caches", lambda cpus: 16 << 20)
    assert not any("of cache" in note for note in measure_machine(threads=1).notes)


def test_the_read_roof_is_the_median_of_the_fastest_kind_of_read():
    figures = {
        "read1_gbs": {"best": 31.0, "median": 25.0},
        "read2_gbs": {"best": 30.0, "median": 28.0},
        "read4_gbs": {"best": 29.0, "median": 27.0},
        "copy_gbs": {"best": 20.0, "median": 19.0},
    }
    found = probe_module.best_reader(figures)
    assert found == {"read_gbs": {"best": 31.0, "median": 28.0}, "copy_gbs": {"best": 20.0, "median": 19.0}}


@needs_compiler
def test_the_native_probe_reads_in_three_ways(monkeypatch):
    seen: list[dict[str, dict[str, float]]] = []
    fold = probe_module.best_reader
    monkeypatch.setattr(probe_module, "best_reader", lambda figures: fold(seen.append(figures) or figures))
    found = probe_module._native(1, 64 << 20, 2)
    assert found is not None
    assert found["read_gbs"]["median"] == max(seen[0][f"read{k}_gbs"]["median"] for k in (1, 2, 4))
    assert found["read_gbs"]["best"] == max(seen[0][f"read{k}_gbs"]["best"] for k in (1, 2, 4))
