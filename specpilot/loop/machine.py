"""Machine: what this run stands on, measured once and kept with every result."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import fields
from typing import Any

from specpilot.cores import usable_cores
from specpilot.costmodel.hardware import Hardware, hardware_from_dict, resolve_hardware
from specpilot.costmodel.probe import measure_machine
from specpilot.loop.context import RunContext
from specpilot.paths import machine_file


def machine_facts(context: RunContext) -> dict[str, Any]:
    """Measured roofs and software versions, JSON-ready."""
    deployment, device = context.deployment, context.spec.device
    hardware = resolve_hardware(deployment.hardware, machine_file(), threads=engine_threads(context), prefer=device)
    return {"hardware": hardware.as_dict(), "software": _software()}


def hardware_of(context: RunContext) -> Hardware:
    """The roofs recorded when the run began."""
    facts: dict[str, Any] = context.journal.step("machine", lambda: machine_facts(context))
    names = {item.name for item in fields(Hardware)}  # a run begun by another version may hold figures that are no more
    kept = {key: value for key, value in facts["hardware"].items() if key in names}
    return hardware_from_dict(kept, "journal")


def measure_again(context: RunContext) -> Hardware:
    """The roofs now, in two to eight seconds; a datasheet's, and those of a machine named by sheet, do not change."""
    known = hardware_of(context)
    if known.source != "measured":
        return known
    return measure_machine(threads=known.threads or engine_threads(context))


def environment_of(context: RunContext) -> dict[str, Any]:
    """Fingerprint of machine and software that goes with every effect in memory."""
    facts: dict[str, Any] = context.journal.step("machine", lambda: machine_facts(context))
    hardware = facts["hardware"]
    return {
        "machine": hardware["name"],
        "isa": list(hardware["isa"]),
        "threads": hardware["threads"],
        "bandwidth_gbs": hardware["bandwidth_gbs"],
        **facts["software"],
    }


def engine_threads(context: RunContext) -> int:
    """CPU threads of the engine: as set, else the cores this process may use."""
    return context.deployment.engine.threads or usable_cores()


def _software() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in ("torch", "numpy", "specpilot"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler:
        finished = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False)
        found["compiler"] = (finished.stdout.splitlines() or ["unknown"])[0]
    return found
