"""Small parts: configuration, weights, tunables, counters, profile, native builds."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slim_engine import native, ops, profiling
from slim_engine.checkpoint import digest
from slim_engine.config import drafter_config, target_config
from slim_engine.errors import CheckpointError, TunableError
from slim_engine.identity import tree_digest
from slim_engine.linear import make_linear
from slim_engine.server import main as server_main
from slim_engine.tunables import TREE, load_tunables

from tests.engines.slim.support import engine, run
from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not served"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type yarn"),
        ({"hidden_size": None}, "NoneType|unsupported"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "no key 'low_freq_factor'"),
        ({"rope_scaling": "yarn"}, "wrong kind"),
        ({"architectures": 3}, "wrong kind"),
    ],
)
def test_targets_that_cannot_be_served(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_tiny_model(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    config.update(change)
    if change.get("hidden_size", 1) is None:
        del config["hidden_size"]
        words = "no key 'hidden_size'"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        target_config(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "[]", "must hold a JSON object, not a list"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", b"\xff\xfe", "not valid JSON"),
        ("generation_config.json", "no JSON", "generation_config.json is not valid JSON"),
        ("generation_config.json", "3", "must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": {}}', "wrong kind"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not valid JSON"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("chat_template.jinja", "{% for %}", "chat template cannot be read"),
        ("model.safetensors", "short", "damaged or no safetensors file"),
    ],
)
def test_damaged_files_are_told_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "t")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert server_main(["--target", str(folder), "--port", "0", "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("slim: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "no key 'sliding_window'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window is None"),
        ({"dflash_config": []}, "wrong kind|mask_token_id"),
        ({"dflash_config": {"mask_token_id": "x"}}, "wrong kind"),
        ({"block_size": "large"}, "wrong kind"),
    ],
)
def test_drafters_that_cannot_be_served(llama: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_tiny_drafter(tmp_path / "d", llama, **change)
    with pytest.raises(CheckpointError, match=words):
        drafter_config(folder, target_config(llama))


def test_missing_and_wrong_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "t")
    with pytest.raises(CheckpointError, match="is not a folder"):
        engine(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no config.json"):
        (tmp_path / "empty").mkdir()
        engine(tmp_path / "empty")
    tensors = load_file(folder / "model.safetensors")
    for change, words in (
        ({"model.norm.weight": tensors["model.norm.weight"][:-1]}, r"has shape \(31,\)"),
        ({"model.norm.weight": tensors["model.norm.weight"].float()}, "convert the checkpoint to BF16"),
    ):
        save_file(tensors | change, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            engine(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor model.norm.weight"):
        engine(folder)


def test_digest_names_the_weights(tmp_path: Path) -> None:
    import hashlib

    folder = make_tiny_model(tmp_path / "t")
    assert digest(folder) == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest(folder) != digest(make_tiny_model(tmp_path / "u", seed=1))
    before = digest(folder)
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    assert digest(folder) != before


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_linear(compute: Any, rows: int) -> None:
    weight, x = torch.randn(24, 40).bfloat16(), torch.randn(rows, 40)
    with torch.inference_mode():
        linear = make_linear(weight, "w", compute)
        got = linear(x).double()
    want = x.double() @ weight.double().T
    exact = compute == "float32" or rows > 1
    torch.testing.assert_close(got, want, rtol=1e-5 if exact else 3e-2, atol=1e-4 if exact else 0.15)
    assert (linear.name, linear.in_features, linear.out_features) == ("w", 40, 24)
    with pytest.raises(TypeError, match="BF16"):
        make_linear(weight.float(), "w", compute)


@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm(rows: int) -> None:
    x, w = torch.randn(rows, 48) * 3, torch.rand(48)
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5).double(), want, rtol=1e-5, atol=1e-6)


def _tree(tmp_path: Path, tunables: str) -> Path:
    shutil.copy(TREE / "engine.toml", tmp_path)
    (tmp_path / "tunables.toml").write_text(tunables)
    return tmp_path


def test_tunables_default_and_override(tmp_path: Path) -> None:
    assert load_tunables(_tree(tmp_path, ""))["prefill_chunk"] == 256
    assert load_tunables(_tree(tmp_path, "verify_drafts = 3"))["verify_drafts"] == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("verify_draft = 3", "verify_draft not declared"),
        ("verify_drafts = 0", "must be int from 1 to 15"),
        ("verify_drafts = true", "must be int"),
        ("verify_drafts = 2.5", "must be int"),
        ("draft_only_verified = 1", "true or false"),
        ("pack_rows = 3", "one of"),
        ("pack_rows = ", "not valid TOML"),
    ],
)
def test_wrong_tunables(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TunableError, match=words):
        load_tunables(_tree(tmp_path, text))


def test_tree_digest_sees_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = tree_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    assert tree_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert tree_digest(tmp_path) != first


def test_profile_covers_the_round(llama: Path, drafter: Path, tmp_path: Path) -> None:
    import tomllib

    loaded = engine(llama, drafter)
    profiling.start()
    with pytest.raises(ValueError, match="already"):
        profiling.start()
    request = run(loaded, [[5, 6, 7, 8]], max_new_tokens=30, ignore_eos=True)[0]
    path = profiling.stop(tmp_path / "deep" / "trace.json")
    with pytest.raises(ValueError, match="no profile"):
        profiling.stop(path)
    events = json.loads(path.read_text())["traceEvents"]
    rounds = [e for e in events if e["name"] == "round"]
    assert len(rounds) == request.rounds
    assert sum(e["args"]["committed"] for e in rounds) == request.committed == 29
    assert [e["args"]["rows"] for e in events if e["name"] == "prefill"] == [4]
    declared = set(tomllib.loads((TREE / "engine.toml").read_text())["scopes"])
    scopes = [e for e in events if e["name"] not in ("round", "prefill")]
    assert {e["name"] for e in scopes} == declared - {"host"}
    ends = 0.0
    for event in sorted(scopes, key=lambda e: e["ts"]):  # scopes never overlap
        assert event["ts"] >= ends - 1e-3
        ends = event["ts"] + event["dur"]
    inside = sum(e["dur"] for r in rounds for e in scopes if r["ts"] <= e["ts"] <= r["ts"] + r["dur"])
    assert 0.5 * sum(r["dur"] for r in rounds) < inside <= sum(r["dur"] for r in rounds)


def test_a_round_reports_the_mean_context_of_its_requests(llama: Path, drafter: Path, tmp_path: Path) -> None:
    """Not the longest: the bound counts one context length for each request. Rounds of two prompts that are decoded one by one."""
    loaded = engine(llama)
    profiling.start()
    run(loaded, [[5, 6, 7, 8], list(range(10, 40))], max_new_tokens=12, ignore_eos=True)
    events = json.loads(profiling.stop(tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [(e["args"]["requests"], e["args"]["context_len"]) for e in events if e["name"] == "round"]
    # The first prompt decodes one token while the second is still being prefilled; then both grow by one a round.
    assert seen == [(1, 4.0), *((2, (5 + k + 30 + k) / 2) for k in range(10)), (1, 40.0)]


def test_native_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIM_NATIVE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "add.cpp"
    source.write_text('extern "C" int add(int a, int b) { return a + b + SHIFT; }')
    plain = native.load_native([source], ["-DSHIFT=0"])
    plain.add.argtypes, plain.add.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    assert plain.add(2, 3) == 5
    assert native.load_native([source], ["-DSHIFT=10"]).add(2, 3) == 15
    built = set((tmp_path / "cache").iterdir())
    assert len(built) == 2
    native.load_native([source], ["-DSHIFT=0"])
    assert set((tmp_path / "cache").iterdir()) == built
    source.write_text("this is not C++")
    with pytest.raises(native.NativeBuildError, match=r"failed on add.cpp(.|\n)*error"):
        native.load_native([source])
    assert set((tmp_path / "cache").iterdir()) == built
    with pytest.raises(native.NativeBuildError, match="does not exist"):
        native.load_native(["nowhere.cpp"])


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "a.cpp").write_text("")
    with pytest.raises(native.NativeBuildError, match="install g"):
        native.load_native([tmp_path / "a.cpp"])
