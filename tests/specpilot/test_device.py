"""`hardware: auto` follows the engine, not the cards of the machine: an engine of the CPU is held to this CPU's roofs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specpilot import cores
from specpilot.check import check
from specpilot.costmodel import CostModelError
from specpilot.costmodel import probe as probe_module
from specpilot.costmodel.hardware import sheet_of
from specpilot.deployment import Deployment, find_deployment, load_deployment
from specpilot.engine_tree import EngineSpec, load_engine_spec
from specpilot.errors import UsageError
from specpilot.loop.context import RunContext
from specpilot.loop.machine import engine_threads, machine_facts

ROOT = Path(__file__).parents[2]
BUNDLED = sorted(path.parent.name for path in (ROOT / "deployments").glob("*/deployment.yaml"))
CARDS = ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
SLIM = load_engine_spec(ROOT / "engines/slim")


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PATH that holds nothing but an nvidia-smi which reports this card: without g++ the CPU is measured in no time."""
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho '{request.param}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent))
    monkeypatch.setattr(probe_module, "working_set", lambda cache_bytes: 64 << 20)
    return str(request.param)


def context(deployment: Deployment, spec: EngineSpec) -> RunContext:
    return cast(RunContext, SimpleNamespace(deployment=deployment, spec=spec))


@pytest.mark.parametrize("name", BUNDLED)
def test_a_run_of_the_bundled_engine_stands_on_the_cpu_beside_any_card(
    card: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
    deployment = load_deployment(find_deployment(name))
    assert deployment.hardware == "auto" and SLIM.device == "cpu"
    check(deployment)
    facts: dict[str, Any] = machine_facts(context(deployment, SLIM))
    assert facts["hardware"]["kind"] == "cpu" and facts["hardware"]["source"] == "measured"


def test_the_roofs_are_measured_with_the_threads_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 64 cores with a quota of two, an engine of all cores and an engine of one."""
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe_module, "working_set", lambda cache_bytes: 64 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    for override, threads in (("engine.threads=null", 2), ("engine.threads=1", 1)):
        deployment = load_deployment(find_deployment(BUNDLED[0]), [override])
        made = context(deployment, SLIM)
        assert machine_facts(made)["hardware"]["threads"] == engine_threads(made) == threads


def test_an_engine_that_does_not_say_gets_the_card(card: str, tmp_path: Path) -> None:
    for device in (None, "gpu"):
        if card == "NVIDIA H200":
            found = sheet_of("auto", prefer=device)
            assert found is not None and (found.name, found.bandwidth_gbs) == ("NVIDIA H200", 4800.0)
        else:
            with pytest.raises(CostModelError, match="no datasheet fits the GPU 'NVIDIA GeForce RTX 4090'"):
                sheet_of("auto", prefer=device)


def test_validate_says_that_a_card_has_no_sheet(card: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    manifest = (ROOT / "engines/slim/engine.toml").read_text()
    assert manifest.count('device = "cpu"') == 1
    (tree / "engine.toml").write_text(manifest.replace('device = "cpu"', 'device = "gpu"'))
    chosen = load_deployment(find_deployment(BUNDLED[0]), [f"engine.tree={tree}"])
    if card == "NVIDIA H200":
        check(chosen)
        assert machine_facts(context(chosen, load_engine_spec(tree)))["hardware"]["name"] == "NVIDIA H200"
    else:
        with pytest.raises(CostModelError, match="no datasheet fits"):
            check(chosen)


def test_an_engine_of_the_gpu_without_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CostModelError, match="nvidia-smi reports none"):
        sheet_of("auto", prefer="gpu")
    assert sheet_of("auto") is None and sheet_of("cpu", prefer="gpu") is None
    named = sheet_of("h200", prefer="cpu")  # a named sheet is what was asked for
    assert named is not None and named.kind == "gpu"


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "engines/slim/engine.toml").read_text().replace('device = "cpu"', 'device = "tpu"')
    (tmp_path / "engine.toml").write_text(text)
    with pytest.raises(UsageError, match=r"device: .*'cpu' or 'gpu'"):
        load_engine_spec(tmp_path)
