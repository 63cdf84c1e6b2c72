"""Measure this CPU once: read and copy bandwidth, float32 multiply-add peak, cost of a fork-join.

A small C++ program (`probe_machine.cpp`) is compiled with g++ and run; it takes two to eight seconds. Without a compiler
numpy does a coarser job and the result is flagged as a lower bound. The result is kept in a JSON file, keyed by a
fingerprint of the machine, so that one home folder may serve several machines.

The median pass is the roof, what the machine sustains; the best is kept beside it (`Hardware.at_best`), because shared machines
wander: on a virtual machine the same read measured 33 to 51 GB/s within one minute. Call `measure_machine` in the same session as a timing
when the two are to be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CostModelError
from .hardware import Hardware, hardware_from_dict

SOURCE = Path(__file__).parent / "probe_machine.cpp"
VERSION = 3
REPEATS = 30
CALM = 0.9
"""Below this share of CPU time in the fastest pass, something else used the machine meanwhile."""
ATTEMPTS = 2
SYSTEM_CPUS = Path("/sys/devices/system/cpu")
UNKNOWN_CACHE = 32 << 20
"""Bytes of last-level cache where the system does not say."""
LEAST_JOIN_US = 1.0
"""Microseconds of a fork-join where it cannot be measured: about the least that spinning threads on two cores need."""
ISA_FLAGS = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni",
             "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")  # fmt: skip
_BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16"}


@dataclass(frozen=True)
class Machine:
    """Identity of a CPU machine."""

    model: str
    cores: int
    threads: int
    """Of the engine: with how many the roofs are measured."""
    isa: tuple[str, ...]
    cache_bytes: int
    """Last-level caches of the CPUs that this process may use, all together."""

    @property
    def fingerprint(self) -> str:
        """Short digest under which measurements are kept."""
        text = json.dumps([VERSION, self.model, self.cores, self.threads, list(self.isa)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def this_machine(threads: int) -> Machine:
    """Identify this machine, as an engine of `threads` threads sees it."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Machine(
        model=fields.get("model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        threads=threads,
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cache_bytes=last_level_caches(_allowed_cpus()),
    )


def _allowed_cpus() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def last_level_caches(cpus: Iterable[int], system: Path = SYSTEM_CPUS) -> int:
    """Bytes of the last-level caches of these CPUs together; 32 MiB when the system does not say.

    A server's processor has one per group of cores, and together they may hold what no single one does.
    """
    sizes: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        for index in (system / f"cpu{cpu}" / "cache").glob("index*"):
            level, size = _word(index / "level"), _cache_size(_word(index / "size"))
            if level.isdigit() and size and _word(index / "type") != "Instruction":
                sizes[int(level), _word(index / "shared_cpu_list") or str(cpu)] = size
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or UNKNOWN_CACHE


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cache_size(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    digits = text.rstrip("KM")
    return int(digits) * scale if digits.isdigit() else 0


def measured_machine(cache: Path, *, threads: int, remeasure: bool = False) -> Hardware:
    """Return this machine's figures from `cache` (a JSON file), measuring and storing them when they are not there.

    `threads`: those of the engine, which can draw no more from the machine than they do. A cached lower bound (numpy, or a busy machine) is measured again where a compiler is there. An unreadable cache file is replaced.
    """
    machine = this_machine(threads)
    known = _read_cache(cache)
    if not remeasure and machine.fingerprint in known:
        try:
            found = hardware_from_dict(known[machine.fingerprint], f"{cache} entry {machine.fingerprint}")
        except (CostModelError, TypeError):
            found = None
        if found is not None and not (found.lower_bound and shutil.which("g++")):
            return found
    measured = measure_machine(threads=threads)
    known[machine.fingerprint] = measured.as_dict()
    _write_cache(cache, known)
    return measured


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_cache(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=2)
    os.replace(name, path)


def measure_machine(*, threads: int, repeats: int | None = None) -> Hardware:
    """Measure now with so many threads, without the cache. Takes two to eight seconds; nothing else should run meanwhile.

    A disturbed measurement is repeated; the best figures of all attempts count, and a note says if none was calm.
    """
    machine = this_machine(threads)
    count = threads
    buffer = working_set(machine.cache_bytes)
    notes: list[str] = []
    if buffer < 4 * machine.cache_bytes:
        notes.append(
            f"too little free memory for a working set beyond the {machine.cache_bytes >> 20} MiB of cache: "
            "the bandwidth may be the caches', and too high; free some memory and remeasure"
        )
    figures = _native(count, buffer, repeats or REPEATS)
    lower_bound = without_compiler = figures is None
    for _ in range(ATTEMPTS - 1):
        if figures is None or not busy(figures):
            break
        figures = _better(figures, _native(count, buffer, repeats or REPEATS) or figures)
    if figures is None:
        figures = _numpy(count, buffer)
    elif busy(figures):
        lower_bound = True
        notes.append("the machine was busy while measured, so the roofs may be too low: remeasure when it is idle")
    if without_compiler:
        notes.append(
            "no working g++: measured with numpy, so these figures are lower bounds, and the dependent step of "
            f"{LEAST_JOIN_US:g} us is assumed; install g++ and remeasure"
        )
    if _BF16_UNITS & set(machine.isa):
        notes.append("this CPU has BF16 matrix units, whose peak is not measured: a BF16 kernel may exceed the peak")
    return Hardware(
        name=f"{machine.model}, {count} threads",
        kind="cpu",
        bandwidth_gbs=figures["read_gbs"]["median"],
        copy_gbs=figures["copy_gbs"]["median"],
        peak_gflops={"float32": figures["fma_gflops"]["median"]},
        launch_us=figures["fork_join_us"]["median"],
        cache_bytes=machine.cache_bytes,
        source="measured",
        threads=count,
        isa=machine.isa,
        lower_bound=lower_bound,
        notes=(*notes, f"measured {time.strftime('%Y-%m-%d %H:%M:%S')}, {buffer >> 20} MiB working set"),
        best={key: value["best"] for key, value in figures.items() if key != "read_cpu_share"},
    )


def busy(figures: dict[str, dict[str, float]]) -> bool:
    """Whether even the fastest read had to share the cores with something else."""
    return figures["read_cpu_share"]["best"] < CALM


def _better(first: dict[str, dict[str, float]], second: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Best of both attempts, figure by figure; medians and CPU share are those of the faster read."""
    faster = max(first, second, key=lambda figures: figures["read_gbs"]["best"])
    pick = {True: min, False: max}
    merged = {key: pick[key.endswith("_us")](first[key]["best"], second[key]["best"]) for key in first}
    merged["read_cpu_share"] = faster["read_cpu_share"]["best"]
    return {key: {"best": value, "median": faster[key]["median"]} for key, value in merged.items()}


def working_set(cache_bytes: int) -> int:
    """Bytes to stream: eight times the last-level caches, at least 256 MiB, at most a quarter of the memory that is available."""
    return max(min(max(8 * cache_bytes, 256 << 20), _available_memory() // 4), 64 << 20)


def _available_memory() -> int:
    """Bytes that a process may take: what the kernel calls available (file caches give way), cut to a container's limit."""
    available = 4 << 30
    for line in _word(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # fmt: skip
        most, taken = _word(Path("/sys/fs/cgroup", limit)), _word(Path("/sys/fs/cgroup", used))
        if most.isdigit() and taken.isdigit():
            available = min(available, max(int(most) - int(taken), 0))
    return available


def _native(threads: int, buffer: int, repeats: int) -> dict[str, dict[str, float]] | None:
    """Compile and run the C++ probe; None when there is no compiler that works."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="specpilot-probe-") as folder:
        binary = Path(folder) / "probe"
        build = [compiler, "-O3", "-march=native", "-fopenmp", str(SOURCE), "-o", str(binary)]
        try:
            if subprocess.run(build, capture_output=True, timeout=120, check=False).returncode:
                return None
            done = subprocess.run(
                [str(binary), str(threads), str(buffer), str(repeats)],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
            found = best_reader(json.loads(done.stdout))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return None
    return found if all(value["best"] > 0 for value in found.values()) else None


def best_reader(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """`read_gbs` in place of the reads with one, two and four streams: the median of the fastest kind, the best pass of any.

    An engine reads in the way that is fastest on its machine, so the median over all three kinds would be no roof.
    """
    rest = dict(figures)
    reads = [rest.pop(f"read{streams}_gbs") for streams in (1, 2, 4)]
    fastest = {key: max(read[key] for read in reads) for key in ("best", "median")}
    return {"read_gbs": fastest, **rest}


def _numpy(threads: int, buffer: int, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Coarse figures from numpy: sums and copies over slices in a thread pool, a matrix product.

    The fork-join is assumed, not measured: Python hands a task over in some 100 us, native threads in one, and a bound
    that is too long would call an engine faster than possible.
    """
    import numpy as np

    data, size = np.ones(buffer // 2 // 8), 1024
    target = np.empty_like(data)
    slices = [slice(i * data.size // threads, (i + 1) * data.size // threads) for i in range(threads)]
    matrix = np.ones((size, size), dtype=np.float32)

    def copy(part: slice) -> None:
        np.copyto(target[part], data[part])

    with ThreadPoolExecutor(threads) as pool:
        reads = [_seconds(lambda: list(pool.map(lambda part: data[part].sum(), slices))) for _ in range(repeats)]
        copies = [_seconds(lambda: list(pool.map(copy, slices))) for _ in range(repeats)]
    products = [_seconds(lambda: matrix @ matrix) for _ in range(repeats)]
    return {
        "read_gbs": _rates(data.nbytes / 1e9, reads),
        "copy_gbs": _rates(2 * data.nbytes / 1e9, copies),
        "fma_gflops": _rates(2 * size**3 / 1e9, products),
        "fork_join_us": {"best": LEAST_JOIN_US, "median": LEAST_JOIN_US},
    }


def _seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _rates(amount: float, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"best": amount / ordered[0], "median": amount / ordered[len(ordered) // 2]}
