"""The CPU kernel against float64 and against its own order written in torch; the same bits whatever rides along."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpilot.kernels.w12 import compiling
from specpilot.kernels.w12.compiling import cache_folder, compiled, loaded
from specpilot.kernels.w12.cpu import build
from specpilot.kernels.w12.cpu.linear import CpuLinear, _runs
from specpilot.kernels.w12.errors import MachineProblem
from specpilot.kernels.w12.format import Planes, decode, encode

try:
    build.library()
except MachineProblem as reason:  # another processor, or no compiler
    pytest.skip(reason.message, allow_module_level=True)

SHAPES = [(1, 1), (16, 4), (17, 5), (100, 65), (576, 48), (33, 7), (48, 1026)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 49]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Trained weights in kind: one scale, a few exact zeros (escapes)."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=random).mul_(0.02)
    return found.masked_fill_(torch.rand(rows, columns, generator=random) < 0.01, 0).bfloat16()


def activations(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def in_order(x: torch.Tensor, planes: Planes) -> torch.Tensor:
    """The kernel's own order: float32 sums over k = 0, 1, .., each product and sum rounded once (fused).

    A float64 product of a float32 and a bfloat16 is exact, and rounding the float64 sum to float32 equals the fused
    operation except where the float64 sum itself is rounded onto a tie of float32 (about one step in 2^29).
    """
    columns = decode(planes).double()
    total = torch.zeros(x.shape[0], columns.shape[0], dtype=torch.float32)
    for k in range(columns.shape[1]):
        total = (total.double() + x[:, k : k + 1].double() * columns[:, k]).float()
    return total


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [None, 64])
def test_values_and_order(shape: tuple[int, int], block: int | None) -> None:
    w = weight(*shape)
    planes = encode(w, block)
    tight, plain = CpuLinear.from_planes(planes), CpuLinear.from_bf16(w)
    for rows in ROWS:
        x = activations(rows, shape[1])
        y = tight(x)
        exact = x.double() @ decode(planes).double().t()
        bound = (
            shape[1] * 2**-24 * (x.double().abs() @ w.double().abs().t())
        )  # of any float32 summation, to first order
        assert ((y.double() - exact).abs() <= bound + 1e-30).all()
        assert torch.equal(bits(y), bits(plain(x))), "BF16 weights give the same bits"
        alone = torch.cat([tight(x[i : i + 1]) for i in range(rows)])
        assert torch.equal(bits(y), bits(alone)), "a row's bits do not depend on its neighbours"
    assert torch.equal(tight(x[:3]), in_order(x[:3], planes))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_show(threads: int) -> None:
    w, x = weight(200, 40), activations(7, 40)
    layer = CpuLinear.from_planes(encode(w))
    expected, before = layer(x), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(bits(layer(x)), bits(expected))
    finally:
        torch.set_num_threads(before)


def test_a_product_runs_on_the_threads_of_its_moment() -> None:
    """Not on those of the moment when the library was loaded. The team is watched through an OpenMP runtime of our own."""
    asked: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(body: Callable[[int], None], data: int, threads: int, _: int) -> None:
        asked.append(threads)
        body(data)

    number, size = (ctypes.CFUNCTYPE(ctypes.c_int)(lambda value=value: value) for value in (0, 1))
    w, x = weight(64, 12), activations(2, 12)
    layer, lib, before = CpuLinear.from_planes(encode(w)), build.library(), torch.get_num_threads()
    expected = layer(x)
    lib.w12_team(*(ctypes.cast(function, ctypes.c_void_p) for function in (parallel, number, size)))
    try:
        for threads in (2, 1, 3):  # one needs no team
            torch.set_num_threads(threads)
            assert torch.equal(layer(x), expected)
    finally:
        torch.set_num_threads(before)
        lib.w12_team(*build.openmp_entry_points())
    assert asked == [2, 3]


def test_every_weight_is_exact() -> None:
    """A unit vector picks one column of weights: every finite pattern must come out as it went in."""
    words = np.arange(65536, dtype=np.uint16).view(np.int16)
    w = torch.from_numpy(words.copy()).view(torch.bfloat16).view(1024, 64)
    finite = torch.where(w.isfinite(), w, torch.zeros((), dtype=torch.bfloat16))
    for layer in (CpuLinear.from_planes(encode(finite, 16)), CpuLinear.from_planes(encode(finite))):
        for rows in (1, 64):  # decoded in registers, and widened first
            y = torch.cat([layer(x) for x in torch.eye(64).split(rows)])
            assert torch.equal(y, finite.float().t())


def test_infinities_and_nans_pass_through() -> None:
    w = torch.zeros(20, 8, dtype=torch.bfloat16)
    w[3, 2], w[5, 1], w[6, 0] = torch.inf, -torch.inf, torch.nan
    y = CpuLinear.from_planes(encode(w))(torch.ones(1, 8))[0]
    assert y[3] == torch.inf and y[5] == -torch.inf and y[6].isnan() and (y[7:] == 0).all()


def test_adversarial_weights_cost_no_more_than_bf16() -> None:
    every = torch.from_numpy(np.arange(1 << 14, dtype=np.int16)).view(torch.bfloat16).view(64, 256)
    for w in (torch.zeros(64, 256, dtype=torch.bfloat16), torch.ones(64, 256, dtype=torch.bfloat16), every):
        layer, plain = CpuLinear.from_planes(encode(w)), CpuLinear.from_bf16(w)
        assert layer.nbytes <= plain.nbytes == 2 * w.numel()
        x = activations(4, 256)
        assert torch.equal(bits(layer(x)), bits(plain(x)))
    assert CpuLinear.from_planes(encode(torch.zeros(64, 256, dtype=torch.bfloat16))).nbytes == 1.5 * 64 * 256


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=4))
def test_runs_spell_the_units(rows: list[list[int]]) -> None:
    runs, first = _runs(np.array(rows, np.uint8))
    for p, row in enumerate(rows):
        spelled = [kind for tight, plain in runs[first[p] : first[p + 1]] for kind in [0] * tight + [1] * plain]
        assert spelled == row


def test_bad_input_is_named() -> None:
    layer = CpuLinear.from_bf16(weight(4, 6))
    with pytest.raises(ValueError, match=r"\[rows, 6\]"):
        layer(torch.zeros(2, 5))
    assert layer(torch.zeros(0, 6)).shape == (0, 4)
    with pytest.raises(TypeError, match="float32"):
        CpuLinear.from_bf16(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="at least one weight"):
        CpuLinear.from_bf16(torch.zeros(0, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="multiple of 16"):
        CpuLinear.from_planes(encode(weight(8, 8), 4))


def test_the_avx512_kernel_compiles() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = Path(build.SOURCES) / "w12.cpp"
    words = [compiler, "-O1", "-march=skylake-avx512", "-std=c++17", "-c", str(source), "-o", os.devnull]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    try:
        with pytest.raises(MachineProblem, match=r"no C\+\+ compiler"):
            build.library()
    finally:
        build.library.cache_clear()


def test_a_source_is_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, source = shutil.which("g++"), tmp_path / "seven.cpp"
    if compiler is None:
        pytest.skip("needs g++")
    monkeypatch.setenv("SPECPILOT_CACHE", str(tmp_path / "cache"))
    source.write_text('extern "C" int seven() { return 7; }')

    def make(*flags: str, made_for: str = "") -> Path:
        return compiled("seven", [compiler, "-shared", "-fPIC", *flags], [source], [source], made_for=made_for)

    first = make()
    assert first.parent == tmp_path / "cache" / "w12" and ctypes.CDLL(str(first)).seven() == 7
    written = first.stat().st_mtime_ns
    assert make() == first and first.stat().st_mtime_ns == written
    assert len({first, make("-O1"), make(made_for="another processor")}) == 3
    source.write_text("not C++")
    with pytest.raises(MachineProblem, match="could not compile seven"):
        make()
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".log"] * 3 + [".so"] * 3, "nothing half done"
    monkeypatch.setenv("SPECPILOT_CACHE", str(source))
    with pytest.raises(MachineProblem, match="cannot be kept") as caught:
        make()
    assert "SPECPILOT_CACHE" in caught.value.hint


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096], ids=["empty", "zeros"])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damage: bytes) -> None:
    compiler, source = shutil.which("g++"), tmp_path / "seven.cpp"
    if compiler is None:
        pytest.skip("needs g++")
    source.write_text('extern "C" int seven() { return 7; }')

    def make() -> Path:
        return compiled("seven", [compiler, "-shared", "-fPIC"], [source], [source], folder=tmp_path / "kept")

    kept = make()
    kept.write_bytes(damage)
    assert loaded(make).seven() == 7 and kept.read_bytes()[:4] == b"\x7fELF"

    def never() -> Path:
        (tmp_path / "kept/never.so").write_bytes(b"\0" * 64)
        return tmp_path / "kept/never.so"

    with pytest.raises(MachineProblem, match="cannot be loaded"):
        loaded(never)


def test_a_library_that_was_cut_off_is_compiled_again(tmp_path: Path) -> None:
    """The loader may die of one that is not empty: each is opened in a process of its own."""
    compiler, source = shutil.which("g++"), tmp_path / "seven.cpp"
    if compiler is None:
        pytest.skip("needs g++")
    source.write_text('static int table[4096] = {7}; extern "C" int seven() { return table[0]; }')
    child = (
        "import sys; from pathlib import Path; from specpilot.kernels.w12.compiling import compiled, loaded\n"
        f"source, command = Path({str(source)!r}), [{compiler!r}, '-shared', '-fPIC']\n"
        f"print(loaded(lambda: compiled('seven', command, [source], [source], folder=source.parent / 'kept')).seven())"
    )

    def seven() -> Path:
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
        return next((tmp_path / "kept").glob("*.so"))

    kept = seven()
    good, node = kept.read_bytes(), kept.stat().st_ino
    assert seven().stat().st_ino == node, "a whole one is kept"
    for length in (1, 64, 1000, 4096, len(good) // 2, len(good) - 1000, len(good) - 1):
        kept.write_bytes(good[:length])
        assert compiling.whole(seven()), f"cut off at {length} of {len(good)} bytes"
    kept.write_bytes(good[:4096] + bytes(len(good) - 4096))  # blocks that never reached the disk
    assert compiling.whole(seven())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (b"no program", "cannot be run"),
        (b"#!/bin/sh\nprintf '\\377' >&2\n[ $1 = --version ]\n", "could not compile x:\n\ufffd"),
        (b"#!/bin/sh\n[ $1 = --version ] || exec sleep 60\n", "still at work after"),
    ],
    ids=["format", "bytes", "hangs"],
)
def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: bytes, words: str) -> None:
    monkeypatch.setattr(compiling, "LONGEST_S", 1)
    compiler = tmp_path / "cc"
    compiler.write_bytes(script)
    compiler.chmod(0o755)
    with pytest.raises(MachineProblem, match=words):
        compiled("x", [str(compiler)], [compiler], [compiler], folder=tmp_path / "kept")


def test_the_cache_folder_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPECPILOT_CACHE", "~/x")
    assert cache_folder() == tmp_path / "x/w12"
