"""Checkpoints that somebody made to do harm, or that a writer of ours never makes: refused by name, never a traceback.

The official reader says what is a safetensors file and what is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specpilot.kernels.w12.container import packing
from specpilot.kernels.w12.container.checkpoint import MANIFEST, pack, unpack
from specpilot.kernels.w12.container.packed_file import PackedFile
from specpilot.kernels.w12.container.safetensors_file import SafetensorsFile
from specpilot.kernels.w12.errors import BadCheckpoint, MachineProblem

ENTRY = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
HEADERS = {
    "plain": "{" + ENTRY + "}",
    "spaces before": "  {" + ENTRY + "}",
    "a key nobody knows": "{" + ENTRY[:-1] + ',"zz":3}}',
    "null metadata": '{"__metadata__":null,' + ENTRY + "}",
    "sub-byte type": "{" + ENTRY.replace("U8", "F4").replace("[1]", "[2]") + "}",
    "too deep": "[" * 100_000,
    "infinite": "{" + ENTRY.replace("[1]", "[Infinity]") + "}",
    "fraction": "{" + ENTRY.replace("[1]", "[1.5]") + "}",
    "text": "{" + ENTRY.replace("[1]", '"1"') + "}",
    "truth": "{" + ENTRY.replace("[1]", "[true]") + "}",
    "no Unicode": "{" + ENTRY.replace("a", r"\ud800", 1) + "}",
    "past 64 bits": "{" + ENTRY.replace("[0,1]", "[0,0]").replace("[1]", "[0,99999999999999999999999999]") + "}",
    "type of nothing": "{" + ENTRY.replace('"U8"', "7") + "}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_read_as_the_official_reader_reads_them(tmp_path: Path, name: str) -> None:
    header, path = HEADERS[name].encode(), tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * (name != "past 64 bits"))
    try:
        with safe_open(path, "np") as file:
            file.keys()
        official = True
    except SafetensorError:
        official = False
    if official:
        with SafetensorsFile(path) as ours:
            assert [entry.name for entry in ours.entries] == ["a"]
    else:
        with pytest.raises(BadCheckpoint, match="not a usable safetensors file"):
            SafetensorsFile(path)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    (folder / "sub").mkdir(parents=True)
    weight = torch.randn(256, 257, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"a": weight, "norm": torch.ones(3)}, folder / "model.safetensors")
    (folder / "sub/x.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_text_nested_too_deeply_is_refused(original: Path, name: str) -> None:
    (original / name).write_text("[" * 100_000)
    with pytest.raises(BadCheckpoint, match="nested too deeply"):
        pack(original, original.parent / "out")


def test_nothing_is_lost_silently(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not packed must be refused, or `unpack` would not give back the same folder."""
    (original / "gone").symlink_to("nowhere")
    with pytest.raises(BadCheckpoint, match="gone is a broken link"):
        pack(original, original.parent / "out")
    (original / "gone").unlink()
    os.mkfifo(original / "pipe")
    with pytest.raises(BadCheckpoint, match="no regular file"):
        pack(original, original.parent / "out")
    (original / "pipe").unlink()
    (original / "linked").symlink_to("sub")
    with pytest.raises(BadCheckpoint, match="linked is a link to a folder"):
        pack(original, original.parent / "out")
    (original / "linked").unlink()

    scandir = os.scandir

    def refuse(path: str | Path) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # the tests may run as root, whom no permission stops
    with pytest.raises(MachineProblem, match="sub: Permission denied"):
        pack(original, original.parent / "out")
    assert [p.name for p in original.parent.iterdir()] == ["original"]


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """With a checksum that is right, as anybody can make it."""
    value = json.loads((folder / MANIFEST).read_text())
    del value["sha256"]
    change(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    (folder / MANIFEST).write_text(json.dumps({**value, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def set_row(kind: str, key: str, to: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest[kind][0].__setitem__(key, to)


@pytest.mark.parametrize(
    "change",
    [
        *(
            set_row(kind, "name", name)
            for kind in ("files", "copied")
            for name in ("../x", "/tmp/x", "a/../../x", "", ".")
        ),
        set_row("files", "packed", "../original/model.safetensors"),
        set_row("files", "name", 7),
        set_row("files", "name", "sub/x.json"),
        set_row("files", "packed", "\ud800"),
        set_row("copied", "name", "\ud800"),
        lambda manifest: manifest["files"][0].pop("packed"),
        lambda manifest: manifest.pop("weights_sha256"),
        set_row("files", "bytes", "many"),
        set_row("files", "bytes", -1),
        set_row("copied", "sha256", None),
        lambda manifest: manifest.update(files={"a": 1}),
        lambda manifest: manifest.pop("copied"),
    ],
)
def test_a_manifest_cannot_point_elsewhere(original: Path, change: Callable[[dict[str, Any]], None]) -> None:
    pack(original, original.parent / "packed")
    rewrite_manifest(original.parent / "packed", lambda manifest: None)
    rewrite_manifest(original.parent / "packed", change)
    with pytest.raises(BadCheckpoint, match=r"w12\.json is malformed"):
        unpack(original.parent / "packed", original.parent / "deep/again")
    assert sorted(p.name for p in original.parent.iterdir()) == ["original", "packed"]


def rewrite_metadata(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same file with other metadata, and a checksum that is right."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    value = json.loads(header["__metadata__"]["w12"])
    change(value)
    text = json.dumps(value, separators=(",", ":"))
    header["__metadata__"] = {"w12": text, "w12_sha256": hashlib.sha256(text.encode()).hexdigest()}
    packed = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + length :])


@pytest.mark.parametrize(
    ("key", "to"),
    [
        ("shape", [1 << 60, 0]),
        ("shape", [1 << 70, 1]),
        ("shape", [256 * 257]),
        ("shape", "ab"),
        ("row_block", 0),
        ("row_block", 48),
        ("row_block", 64),
        ("bases", 1 << 40),
        ("bases", -1),
        ("escapes", 1 << 40),
        ("escapes", -1),
        ("dtype", "F16"),
        ("packed", False),
        ("unheard of", 1),
        ("planes_sha256", ["", "", ""]),
        ("planes_sha256", ["", ""]),
    ],
)
def test_metadata_that_no_writer_makes(original: Path, key: str, to: object) -> None:
    pack(original, original.parent / "packed")
    path = original.parent / "packed/model.w12.safetensors"
    rewrite_metadata(path, lambda value: value["tensors"]["a"].__setitem__(key, to))
    with pytest.raises(BadCheckpoint):
        unpack(original.parent / "packed", original.parent / "again")


def test_planes_for_an_engine_are_checked_too(original: Path) -> None:
    pack(original, original.parent / "packed")
    path = original.parent / "packed/model.w12.safetensors"
    with PackedFile(path) as file:
        assert file.planes("a").shape == (256, 257)
        at = next(entry.offset for entry in file.entries if entry.name == "a") + 1000
        with pytest.raises(KeyError, match="norm is not packed"):
            file.planes("norm")
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1  # a mantissa: only the sum can tell
    path.write_bytes(raw)
    with PackedFile(path) as file, pytest.raises(BadCheckpoint, match="planes do not match"):
        file.planes("a")


def test_a_header_that_no_reader_would_take_is_not_written(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_HEADER", 1000)
    with pytest.raises(BadCheckpoint, match=r"too many tensors \(2\)"):
        pack(original, original.parent / "out")
    assert not (original.parent / "out").exists()


def decoded(path: Path, name: str) -> np.ndarray:
    """A packed matrix by what `blob` and `format` say, without their code: uint16 [N, K]."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    kept = json.loads(header["__metadata__"]["w12"])["tensors"][name]
    blob = raw[8 + length + header[name]["data_offsets"][0] : 8 + length + header[name]["data_offsets"][1]]
    rows, columns = kept["shape"]
    count, at, sections = rows * columns, 0, []
    for dtype, items in (
        ("u1", count), ("u1", (count + 1) // 2), ("<i4", kept["bases"]), ("<u4", kept["escapes"]), ("<u2", kept["escapes"]),
    ):  # fmt: skip
        sections.append(np.frombuffer(blob, dtype, items, at))
        at += -(-sections[-1].nbytes // 64) * 64
    byte, pairs, base, index, word = sections
    assert at == len(blob)
    code = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)[:count].astype(np.int64)
    of_row = np.repeat(base, kept["row_block"] or rows)[:rows]
    exponent = code + np.repeat(of_row, columns).astype(np.int64) - 1
    words = (byte.astype(np.int64) >> 7 << 15) + (exponent << 7) + (byte & 0x7F)
    assert set(np.flatnonzero(code == 0)) == set(index.tolist())
    words[index] = word
    return words.astype(np.uint16).reshape(rows, columns)


@pytest.mark.parametrize("row_block", ["none", "64", "128"])
def test_an_independent_decoder_reads_the_same_bits(tmp_path: Path, row_block: str) -> None:
    random = np.random.default_rng(1)
    patterns = {
        "every": random.permutation(65536).reshape(256, 256),
        "steps": (np.arange(300)[:, None] // 7 * 0x80 + random.integers(0, 0x280, (300, 257)) & 0x7FFF),
        "low": random.integers(0, 0x500, (130, 513)) | random.integers(0, 2, (130, 513)) << 15,
        "nan": np.full((257, 257), 0xFFFF),
        "zero": np.zeros((256, 256), int),
    }
    (tmp_path / "original").mkdir()
    words = {name: p.astype(np.uint16) for name, p in patterns.items()}
    save_file(
        {name: torch.from_numpy(w.view(np.int16)).view(torch.bfloat16) for name, w in words.items()},
        tmp_path / "original/model.safetensors",
    )
    report = pack(tmp_path / "original", tmp_path / "packed", row_block=row_block, max_escape_rate=1)  # type: ignore[arg-type]
    for name, expected in words.items():
        assert report.files["model.safetensors"][name].packed
        assert np.array_equal(decoded(tmp_path / "packed/model.w12.safetensors", name), expected), name


def test_two_interrupts_leave_nothing(original: Path) -> None:
    """Ctrl-C reaches the packing process from the terminal and once more from `specpilot`."""
    script = (
        "import os, signal, sys\n"
        "from specpilot.kernels.w12.container import checkpoint\n"
        "import specpilot.kernels.w12.__main__ as program\n"
        "rmtree = checkpoint.shutil.rmtree\n"
        "def again(*a, **k):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    rmtree(*a, **k)\n"
        "checkpoint.shutil.rmtree = again\n"
        "program._tell = lambda text: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.argv = ['w12', 'pack', {str(original)!r}, '--to', {str(original.parent / 'out')!r}]\n"
        "sys.exit(program.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and "nothing is left" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [p.name for p in original.parent.iterdir()] == ["original"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "importing the program changes nothing here"
