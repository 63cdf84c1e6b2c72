"""Packed checkpoints give back the same bytes, and nothing that is damaged passes.

Originals are written by the official safetensors library; digests are taken with hashlib, so that nothing of the packer
judges itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from specpilot.cli import main
from specpilot.kernels.w12.container import packing, policy
from specpilot.kernels.w12.container.blob import Sections, pack_nibbles, unpack_nibbles
from specpilot.kernels.w12.container.checkpoint import MANIFEST, pack, read_manifest, unpack
from specpilot.kernels.w12.container.packed_file import PackedFile
from specpilot.kernels.w12.errors import BadCheckpoint, BadRequest, MachineProblem, W12Error
from specpilot.kernels.w12.format import decode, encode

HEAD, UP, PADDED, WILD = "model.embed_tokens.weight", "model.up.weight", "model.padded.weight", "model.wild.weight"


def tensors() -> dict[str, torch.Tensor]:
    """Everything that a checkpoint may hold, in awkward sizes."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(0.02).bfloat16()

    padded = matrix(320, 256)
    padded[128:] = 0  # needs bases per block
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    return {
        HEAD: matrix(300, 257),  # an odd number of weights per row
        UP: matrix(257, 257),  # an odd number of weights
        PADDED: padded,
        WILD: every,
        "model.norm.weight": torch.randn(257, generator=random).bfloat16(),
        "model.conv.weight": matrix(256, 512).view(256, 1, 512),
        "model.tiny.weight": matrix(3, 5),
        "model.float.weight": torch.randn(7, 3, generator=random),
        "model.half.weight": torch.randn(300, 300, generator=random).half(),
        "model.flags": torch.tensor([True, False, True]),
        "model.bytes": torch.arange(5, dtype=torch.uint8),
        "model.steps": torch.tensor(3, dtype=torch.int64),
        "model.empty": torch.empty(0, 4),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt", "note": 'quote " and ü'})
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/merges.txt").write_bytes(b"\x00\xff\n")
    return folder


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Path:
    pack(checkpoint, checkpoint.parent / "packed")
    return checkpoint.parent / "packed"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """A packed folder to damage."""
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


def test_unpack_gives_back_every_byte(checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    digest = unpack(packed, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(checkpoint)
    assert digest == contents(checkpoint)["model.safetensors"]
    with safe_open(tmp_path / "again/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": 'quote " and ü'}
        for name, tensor in tensors().items():
            again = file.get_tensor(name)
            assert again.dtype == tensor.dtype and again.shape == tensor.shape
            assert again.numpy().tobytes() == tensor.numpy().tobytes() if tensor.dtype != torch.bfloat16 else True
    assert list(tmp_path.iterdir()) == [tmp_path / "again"], "no lock, no unfinished folder"


def test_what_is_packed_and_why_the_rest_is_not(packed: Path) -> None:
    with PackedFile(packed / "model.w12.safetensors") as file:
        reasons = {name: kept.reason for name, kept in file.stored.items()}
        blocks = {name: kept.row_block for name, kept in file.stored.items() if kept.packed}
    assert blocks == {HEAD: None, UP: None, PADDED: 64}
    assert reasons[WILD] == "94.14 % escapes"  # 241 of 256 exponents
    assert {reasons[n] for n in ("model.norm.weight", "model.conv.weight", "model.bytes")} == {
        "not a matrix",
        "not BF16",
    }
    assert reasons["model.tiny.weight"] == "small"
    assert reasons["model.half.weight"] == "not BF16"


def test_planes_are_those_of_the_format(packed: Path) -> None:
    originals = tensors()
    with PackedFile(packed / "model.w12.safetensors") as file:
        for name, block in ((HEAD, None), (UP, None), (PADDED, 64)):
            planes, expected = file.planes(name), encode(originals[name], block)
            for field in ("bytes", "codes", "base", "escape_index"):
                assert torch.equal(getattr(planes, field), getattr(expected, field)), (name, field)
            assert torch.equal(decode(planes).view(torch.int16), originals[name].view(torch.int16))


def test_report_counts_bits_and_escapes(checkpoint: Path, tmp_path: Path) -> None:
    report = pack(checkpoint, tmp_path / "out")
    kept = report.files["model.safetensors"][HEAD]
    exponents = (tensors()[HEAD].view(torch.int16).numpy().view(np.uint16) >> 7) & 0xFF
    counts = np.bincount(exponents.ravel(), minlength=256)
    assert kept.escapes == counts.sum() - max(counts[i : i + 15].sum() for i in range(242))
    assert 12 < kept.bits_per_weight < 12.3
    assert kept.stored_bytes == Sections.of(300 * 257, 1, kept.escapes).size
    values = {row["name"]: row for row in report.as_dict()["tensors"]}
    assert values[HEAD]["escape_rate"] == kept.escapes / (300 * 257)
    assert values["model.float.weight"]["bits_per_weight"] == 32
    assert report.packed_bytes == (tmp_path / "out/model.w12.safetensors").stat().st_size
    assert report.original_bytes == (checkpoint / "model.safetensors").stat().st_size


def test_a_packed_file_is_safetensors_with_aligned_tensors(packed: Path) -> None:
    path = packed / "model.w12.safetensors"
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(tensors())
        assert torch.equal(file.get_tensor("model.float.weight"), tensors()["model.float.weight"])
        assert file.get_tensor(HEAD).dtype == torch.uint8
    with PackedFile(path) as packed_file:
        for entry in packed_file.entries:
            assert entry.offset % {"U8": 64, "BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}[entry.dtype] == 0 or (
                entry.name == "model.bytes"
            )


def test_slices_do_not_show(checkpoint: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpilot.kernels.w12.container.blob.CHUNK_WEIGHTS", 1)  # slices of 128 rows
    pack(checkpoint, tmp_path / "sliced")
    assert contents(tmp_path / "sliced") == contents(packed)
    unpack(packed, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(checkpoint)


def test_shards_and_an_untied_head(tmp_path: Path) -> None:
    folder, random = tmp_path / "sharded", torch.Generator().manual_seed(1)
    folder.mkdir()
    parts = [
        {HEAD: torch.randn(260, 260, generator=random).bfloat16()},
        {"lm_head.weight": torch.randn(260, 260, generator=random).bfloat16(), "norm": torch.ones(3)},
    ]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    index = {"weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"tie_word_embeddings": false}')
    report = pack(folder, tmp_path / "packed")
    assert report.files[names[0]][HEAD].reason == "looked up by row"
    assert report.files[names[1]]["lm_head.weight"].packed
    digest = unpack(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    lines = "".join(f"{contents(folder)[name]}  {name}\n" for name in names)
    assert digest == hashlib.sha256(lines.encode()).hexdigest() == report.weights_sha256

    (folder / names[1]).unlink()
    with pytest.raises(BadCheckpoint, match="lacks model-00002-of-00002.safetensors"):
        pack(folder, tmp_path / "other")
    save_file({"norm": torch.ones(3)}, folder / names[1])
    with pytest.raises(BadCheckpoint, match=r"lacks tensor lm_head\.weight"):
        pack(folder, tmp_path / "other")
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="malformed"):
        pack(folder, tmp_path / "other")


def test_a_file_of_another_writer_comes_back_byte_for_byte(tmp_path: Path) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    data = weight.view(torch.int16).numpy().tobytes()
    header = (
        f'{{ "b":{{"shape":[3],"data_offsets":[{len(data)},{len(data) + 3}],"dtype":"I8"}},\n "a" : {{"dtype":"BF16",'
    )
    header += f'"shape":[256, 256],"data_offsets":[0,{len(data)}]}} }}   '
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + data + b"\x01\x02\x03")
    assert pack(folder, tmp_path / "packed").files["x.safetensors"]["a"].packed
    unpack(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_harmless(copy: Path, checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["model.w12.safetensors", MANIFEST, "tokenizer/merges.txt"]))
    path = copy / name
    whole = path.read_bytes()
    at = data.draw(st.one_of(st.integers(0, min(len(whole), 8000) - 1), st.integers(0, len(whole) - 1)))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :])
    try:
        unpack(copy, copy.parent / "again")
        assert contents(copy.parent / "again") == contents(checkpoint)  # padding
    except W12Error as error:
        assert error.hint and not (copy.parent / "again").exists()
    finally:
        path.write_bytes(whole)
        shutil.rmtree(copy.parent / "again", ignore_errors=True)


@pytest.mark.parametrize("name", ["model.w12.safetensors", MANIFEST, "tokenizer/merges.txt"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files_are_refused(copy: Path, name: str, keep: float) -> None:
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(BadCheckpoint):
        unpack(copy, copy.parent / "again")
    assert sorted(p.name for p in copy.parent.iterdir()) == ["copy"]


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, 300_000])
def test_a_truncated_original_is_refused(checkpoint: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "short/model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match="not a usable safetensors file"):
        pack(tmp_path / "short", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_version_is_refused(copy: Path) -> None:
    path = copy / "model.w12.safetensors"
    whole = path.read_bytes()
    changed = whole.replace(b'{\\"version\\":1,', b'{\\"version\\":9,')
    assert changed != whole
    path.write_bytes(changed)
    with pytest.raises(BadCheckpoint, match="version 9, this program reads 1"):
        unpack(copy, copy.parent / "again")
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(BadCheckpoint, match="version 2, this program reads 1"):
        read_manifest(copy)


def test_missing_files_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match="config.json"):
        unpack(copy, tmp_path / "again")
    (copy / "model.w12.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="model.w12.safetensors"):
        unpack(copy, tmp_path / "again")
    (copy / MANIFEST).unlink()
    with pytest.raises(BadCheckpoint, match="not a packed checkpoint"):
        unpack(copy, tmp_path / "again")


def test_bad_requests(checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(BadRequest, match="exists"):
        pack(checkpoint, tmp_path / "there")
    with pytest.raises(BadRequest, match="inside"):
        pack(checkpoint, checkpoint / "out")
    with pytest.raises(BadRequest, match="escape rate"):
        pack(checkpoint, tmp_path / "out", max_escape_rate=float("nan"))
    with pytest.raises(BadCheckpoint, match="packed already"):
        pack(packed, tmp_path / "out")
    with pytest.raises(BadCheckpoint, match="not a folder"):
        pack(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(BadCheckpoint, match="holds no"):
        pack(tmp_path / "there", tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(MachineProblem):
        pack(checkpoint, tmp_path / "file/out")


def test_escapes_may_be_allowed(checkpoint: Path, tmp_path: Path) -> None:
    report = pack(checkpoint, tmp_path / "out", max_escape_rate=1, row_block="128")
    wild = report.files["model.safetensors"][WILD]
    assert wild.packed and wild.row_block == 128 and wild.escapes > 50_000
    unpack(tmp_path / "out", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(checkpoint)


def test_an_interrupted_run_leaves_nothing_and_a_killed_one_does_not_matter(checkpoint: Path, tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/model.w12.safetensors").write_text("half")
    (tmp_path / ".out.lock").touch()
    pack(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_writers_do_not_meet(checkpoint: Path, tmp_path: Path) -> None:
    with (tmp_path / ".out.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadRequest, match="another process"):
            pack(checkpoint, tmp_path / "out")


def test_policy_counts_blocks_of_any_number() -> None:
    counts = torch.zeros(3, 256, dtype=torch.int64)
    counts[0, 0] = counts[1, 100] = counts[2, 200] = 64
    assert policy.choose(counts, "none").escapes == 128
    assert policy.choose(counts, "128").base.numel() == 2 and policy.choose(counts, "128").escapes == 64
    assert policy.choose(counts).row_block == 64 and policy.choose(counts).escapes == 0
    assert policy.choose(counts[:1]).row_block is None, "blocks that save nothing are not taken"
    counts = torch.zeros(2, 256, dtype=torch.int64)
    counts[:, 100] = 10_000
    counts[:, 10] = 15
    counts[0, 99], counts[0, 90], counts[1, 114] = 9_000, 8, 8  # no window holds 90, 99 and 114
    one, blocks = policy.choose(counts, "none").escapes, policy.choose(counts, "64").escapes
    assert (blocks, one) == (30, 38)
    total = int(counts.sum())
    assert policy.choose(counts, "auto", (one + 1) / total).row_block is None
    assert policy.choose(counts, "auto", blocks / total).row_block == 64, "only so does it stay below the limit"


def test_embeddings_are_packed_only_where_they_are_the_head() -> None:
    def kept(name: str, tied: bool) -> str:
        return policy.reason_to_keep(name, "BF16", (1000, 1000), tied)

    assert kept(HEAD, True) == "" and kept(HEAD, False) == "looked up by row"
    assert kept("candidate_selector.successor_codebook", True) == "looked up by row"
    assert policy.embeds_the_head([HEAD], {}) and not policy.embeds_the_head([HEAD, "lm_head.weight"], {})
    assert policy.embeds_the_head(["lm_head.weight"], {"text_config": {"tie_word_embeddings": True}})


@given(st.lists(st.integers(0, 15), max_size=9))
def test_nibbles(values: list[int]) -> None:
    packed = pack_nibbles(torch.tensor(values, dtype=torch.uint8))
    assert packed.tolist() == [a | b << 4 for a, b in zip(values[::2], [*values[1::2], 0], strict=False)]
    assert unpack_nibbles(packed, len(values)).tolist() == values


def test_the_reserved_header_is_always_long_enough(checkpoint: Path, tmp_path: Path) -> None:
    for i, block in enumerate(("auto", "none", "64", "128")):
        pack(checkpoint, tmp_path / str(i), row_block=block, max_escape_rate=i / 3)  # type: ignore[arg-type]
    assert packing._WIDEST > 2**63


def test_commands(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def specpilot(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return (end.value.code or 0, *capfd.readouterr())  # type: ignore[return-value]

    code, out, _ = specpilot("pack", checkpoint, "--to", tmp_path / "packed", "--report", tmp_path / "report.json")
    assert code == 0 and "not a matrix" in out and "w12" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {t["name"] for t in report["tensors"]} == set(tensors())
    code, out, _ = specpilot("unpack", tmp_path / "packed", "--to", tmp_path / "again")
    assert code == 0 and report["weights_sha256"] in out
    assert contents(tmp_path / "again") == contents(checkpoint)
    code, _, err = specpilot("pack", checkpoint, "--to", tmp_path / "packed")
    assert code == 2 and "exists" in err and "what to do" in err
    code, _, err = specpilot("unpack", checkpoint, "--to", tmp_path / "other")
    assert code == 4 and "not a packed checkpoint" in err
    assert specpilot("pack", checkpoint, "--to", tmp_path / "o", "--row-block", "5")[0] == 2
    assert specpilot("pack", checkpoint, "--to", tmp_path / "o", "--report", tmp_path / "report.json")[0] == 2
    assert specpilot("pack", checkpoint, "--to", tmp_path / "o", "--report", tmp_path / "no/report.json")[0] == 2
    assert not (tmp_path / "o").exists(), "told before the work"


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    save_file({"a": torch.zeros(100_000)}, tmp_path / "original/model.safetensors")  # 400 kB, none of it packable
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=360k tmpfs {tmp_path}/disk"
    try:
        subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs user namespaces to mount a small disk")
    run = f"{mount} && {sys.executable} -m specpilot.kernels.w12 pack {tmp_path}/original --to {tmp_path}/disk/out"
    script = f'{run}; code=$?; test -z "$(ls -A {tmp_path}/disk)" && exit $code'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "no space left" in done.stderr, done.stderr


def test_a_disk_that_cannot_hold_it_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "original/model.safetensors")
    try:
        with (tmp_path / "original/huge.bin").open("wb") as file:
            file.truncate(8 << 40)  # sparse: no disk is written
    except OSError:
        pytest.skip("needs a file system with large sparse files")
    with pytest.raises(MachineProblem, match=r"GB free, at least 8796\.09 GB"):
        pack(tmp_path / "original", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["original"]
