"""What a machine can do: measured once (`probe.py`) or read from a datasheet in `sheets/`.

A `Hardware` is a pair of roofs (memory bandwidth, peak operations per second) and a floor (cost of one dependent
step: a kernel launch, or a fork-join of the thread team). Figures are decimal: 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from .errors import CostModelError

SHEETS = Path(__file__).parent / "sheets"


@dataclass(frozen=True)
class Hardware:
    """Roofs and floor of one machine. `source` says whether they were `measured` or come from a `datasheet`."""

    name: str
    kind: str
    """`cpu` or `gpu`."""
    bandwidth_gbs: float
    """Read-only streaming bandwidth, as weight streaming sees it, in GB/s."""
    peak_gflops: dict[str, float]
    """Peak multiply-add throughput per compute type, in GFLOP/s (two operations per multiply-add)."""
    launch_us: float
    """Microseconds of one dependent step."""
    cache_bytes: int
    source: str
    copy_gbs: float | None = None
    threads: int | None = None
    isa: tuple[str, ...] = ()
    lower_bound: bool = False
    """True when the figures are only lower bounds of what the machine can do (no compiler, or it was busy)."""
    notes: tuple[str, ...] = ()
    best: dict[str, float] = field(default_factory=dict)
    """Fastest passes of the probe (`read_gbs`, `copy_gbs`, `fma_gflops`, `fork_join_us`). The roofs above are its medians:
    what the machine sustains, since a serving engine cannot live on a burst of a shared host."""

    def at_best(self) -> Hardware:
        """The same machine at its fastest passes: for limits that no honest engine may ever be held below."""
        if not self.best:
            return self
        return replace(
            self,
            bandwidth_gbs=max(self.bandwidth_gbs, self.best.get("read_gbs", 0.0)),
            peak_gflops=self.peak_gflops | {"float32": max(self.peak(), self.best.get("fma_gflops", 0.0))},
            launch_us=min(self.launch_us, self.best.get("fork_join_us", self.launch_us)),
        )

    def until(self, later: Hardware) -> Hardware:
        """Roofs of the time between two measurements of one machine: their means; `best` is the better of both.

        What is compared with a measurement should be measured around it: a virtual machine is not the same one an hour later.
        """
        both = self.best.keys() & later.best.keys()
        return replace(
            later,
            bandwidth_gbs=(self.bandwidth_gbs + later.bandwidth_gbs) / 2,
            peak_gflops={k: (v + later.peak_gflops.get(k, v)) / 2 for k, v in self.peak_gflops.items()},
            launch_us=(self.launch_us + later.launch_us) / 2,
            lower_bound=self.lower_bound or later.lower_bound,
            notes=tuple(dict.fromkeys((*self.notes, *later.notes))),
            best={k: (min if k.endswith("_us") else max)(self.best[k], later.best[k]) for k in sorted(both)},
        )

    def peak(self, compute: str | None = None) -> float:
        """GFLOP/s for a compute type; by default bfloat16 on a GPU and float32 on a CPU."""
        wanted = compute or self.compute
        if wanted not in self.peak_gflops:
            known = ", ".join(sorted(self.peak_gflops))
            raise CostModelError(f"{self.name} has no peak for {wanted!r}; known: {known}")
        return self.peak_gflops[wanted]

    @property
    def compute(self) -> str:
        """The type in which this kind of machine computes matrix products by default."""
        return "bfloat16" if self.kind == "gpu" and "bfloat16" in self.peak_gflops else "float32"

    @property
    def ridge(self) -> float:
        """Arithmetic intensity (operations per byte) at which the two roofs meet."""
        return self.peak() / self.bandwidth_gbs

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-serialisable form."""
        return {**asdict(self), "isa": list(self.isa), "notes": list(self.notes)}


def hardware_from_dict(value: dict[str, Any], where: str) -> Hardware:
    """Build a `Hardware` from its JSON or YAML form; says what is missing or not positive, and where."""
    value = dict(value)
    value.pop("match", None)
    for key in ("isa", "notes"):
        value[key] = tuple(value.get(key) or ())
    try:
        value["peak_gflops"] = {str(k): float(v) for k, v in dict(value["peak_gflops"]).items()}
        for key in ("bandwidth_gbs", "launch_us"):
            value[key] = float(value[key])
        value["cache_bytes"] = int(float(value["cache_bytes"]))
        found = Hardware(**value)
    except (KeyError, TypeError, ValueError) as error:
        raise CostModelError(f"{where}: not a hardware sheet ({type(error).__name__}: {error})") from error
    if min(found.bandwidth_gbs, found.launch_us, *found.peak_gflops.values()) <= 0:
        raise CostModelError(f"{where}: bandwidth, peaks and launch overhead must be positive")
    return found


def sheet_names() -> list[str]:
    """Names of the datasheets that ship with SpecPilot."""
    return sorted(path.stem for path in SHEETS.glob("*.yaml"))


def load_sheet(name: str) -> Hardware:
    """Load a datasheet by name (`h100-sxm`), or from a path to a YAML file of the same form."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHEETS / f"{name}.yaml"
    if not path.is_file():
        raise CostModelError(
            f"no hardware sheet {name!r}; known: auto, {', '.join(sheet_names())}, or a path to a .yaml"
        )
    return hardware_from_dict(_read(path), str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise CostModelError(f"{path} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise CostModelError(f"{path} must hold a mapping")
    return value


def gpu_name() -> str | None:
    """Name of the first GPU that `nvidia-smi` reports, or None when there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or lines[0].lower().startswith("no devices"):  # said with exit 0 by some drivers
        return None
    return lines[0].strip()


def sheet_for_gpu(name: str) -> Hardware:
    """Return the sheet whose `match` pattern fits a GPU name as nvidia-smi prints it."""
    for sheet in sheet_names():
        pattern = _read(SHEETS / f"{sheet}.yaml").get("match")
        if pattern and re.search(str(pattern), name, re.IGNORECASE):
            return load_sheet(sheet)
    raise CostModelError(
        f"no datasheet fits the GPU {name!r}; known: {', '.join(sheet_names())}. "
        f"Write a YAML of the same form and give its path as `hardware`"
    )


def sheet_of(name: str, *, prefer: str | None = None) -> Hardware | None:
    """The datasheet that a deployment's `hardware` field means; None where it means this CPU, which is measured.

    `prefer`: what the engine runs on, `cpu` or `gpu`, where it says so. `auto` is this CPU for an engine of the CPU, whatever
    cards the machine holds, and else the datasheet of the first GPU, or without one this CPU. `cpu` always means this CPU.
    Raises `CostModelError` for a name without a sheet, a GPU without one, and an engine of the GPU where none is found.
    """
    if name == "cpu" or (name == "auto" and prefer == "cpu"):
        return None
    if name != "auto":
        return load_sheet(name)
    found = gpu_name()
    if found is None and prefer == "gpu":
        raise CostModelError(
            "the engine runs on a GPU and nvidia-smi reports none here: mend the driver, or name a sheet as `hardware`"
        )
    return sheet_for_gpu(found) if found else None


def resolve_hardware(
    name: str, cache: Path, *, threads: int, prefer: str | None = None, remeasure: bool = False
) -> Hardware:
    """Return the machine for a deployment's `hardware` field, as `sheet_of` reads it.

    This CPU is measured once with the engine's `threads`, and kept in the JSON file `cache`.
    """
    from .probe import measured_machine

    return sheet_of(name, prefer=prefer) or measured_machine(cache, threads=threads, remeasure=remeasure)
