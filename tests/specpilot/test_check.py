"""`deployments validate`: each thing that would stop a run is one message that names key and file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from pathlib import Path

import pytest
import yaml

from specpilot.check import LEAST_MINUTES, check, most_new_tokens, weights_dtype
from specpilot.deployment import Deployment, load_deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import DigestError, MissingModelError, ModelError, UsageError
from specpilot.loop import budget

ROOT = Path(__file__).parents[2]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 1024}


def safetensors(path: Path, **tensors: tuple[str, int]) -> str:
    """A file with the named tensors, each (type, bytes); its SHA-256. The format's own description, not its library."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (kind, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    digest = safetensors(tmp_path / "target/model.safetensors", w=("BF16", 64), scale=("F32", 4))
    (tmp_path / "target/config.json").write_text(json.dumps(CONFIG))
    for name in ("tuning", "hidden"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": "{k}", "text": "{name} {k}"}}\n' for k in range(8)))
    data = {
        "name": "local",
        "target": {"path": "target", "architecture": "LlamaForCausalLM", "sha256": digest},
        "drafter": {"method": "ngram"},
        "workload": {"tuning": "tuning.jsonl", "hidden": "hidden.jsonl"},
    }
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(data))
    return tmp_path


def load(folder: Path, *overrides: str) -> Deployment:
    return load_deployment(folder / "deployment.yaml", overrides)


def test_too_little_time_is_told_before_it_is_spent(folder: Path) -> None:
    assert (budget.CLOSING_RESERVE_S + budget.EXPECTED_ASSESS_S) / 60 == LEAST_MINUTES
    with pytest.raises(UsageError, match=r"budget.wall_clock_minutes: 3 is too little.*take about 3\.75"):
        check(load(folder, "budget.wall_clock_minutes=3"))
    check(load(folder, "budget.wall_clock_minutes=3.75"))
    check(load(folder, "budget.wall_clock_minutes=null"))


@pytest.mark.parametrize("key", ["usd", "tokens"])
@pytest.mark.parametrize("limit", ["0", "5"])
def test_a_limit_that_nothing_would_hold_is_refused(folder: Path, key: str, limit: str) -> None:
    with pytest.raises(UsageError, match=f"budget.{key}: nothing would hold this limit"):
        check(load(folder, f"budget.{key}={limit}"))
    check(load(folder, f"budget.{key}=null"))


def test_a_sound_deployment_passes(folder: Path) -> None:
    check(load(folder))
    check(load(folder, f"engine.threads={len(os.sched_getaffinity(0))}"))
    check(load(folder, "regime.input_tokens=768"))  # with 256 natural tokens: 1024, the model's last position


def test_weights_in_shards_are_weights(folder: Path) -> None:
    target = folder / "target"
    (target / "model.safetensors").unlink()
    lines = ""
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        lines += f"{safetensors(target / name, **{name[:11]: ('BF16', 64)})}  {name}\n"
    digest = hashlib.sha256(lines.encode()).hexdigest()
    check(load(folder, f"target.sha256={digest}"))
    with pytest.raises(DigestError, match=digest):
        check(load(folder))
    for path in target.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(MissingModelError, match="model.safetensors"):
        check(load(folder))


@pytest.mark.parametrize(
    ("override", "error", "code", "told"),
    [
        (f"target.sha256={'ab' * 32}", DigestError, 4, "target.sha256: weights in .*target: SHA-256 is .* pins abab"),
        ("target.architecture=Qwen3ForCausalLM", ModelError, 4, "is LlamaForCausalLM, the deployment says Qwen3"),
        ("target.dtype=float16", ModelError, 4, "target.dtype: the deployment says float16, .* are bfloat16"),
        ("engine.threads=1024", UsageError, 2, "engine.threads: 1024 threads on [0-9]+ cores"),
        ("regime.input_tokens=769", UsageError, 2, r"input_tokens 769 \+ gate.natural_tokens 256 = 1025 .*1024"),
        ("regime.output_tokens=1000", UsageError, 2, r"input_tokens 512 \+ regime.output_tokens 1000 = 1512"),
        ("measurement.output_tokens_timed=900", UsageError, 2, "measurement.output_tokens_timed 900"),
        ("gate.hidden_tokens=700", UsageError, 2, "gate.hidden_tokens 700"),
    ],
)
def test_what_would_stop_a_run(
    folder: Path, override: str, error: type[ModelError | UsageError], code: int, told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        check(load(folder, override))
    assert caught.value.exit_code == code and caught.value.hint and "\n" not in caught.value.message


def test_the_engines_own_limit_counts_too(folder: Path) -> None:
    (folder / "target/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 8192}))
    check(load(folder, "regime.input_tokens=1792"))
    with pytest.raises(UsageError, match="engine slim allows 2048"):
        check(load(folder, "regime.input_tokens=1793"))


def test_the_slim_engine_declares_the_limit_that_it_has() -> None:
    text = (ROOT / "engines/slim/slim_engine/server.py").read_text()
    default = re.search(r'"--max-len", [^)]*?default=(\d+)', text)
    assert default is not None and int(default.group(1)) == load_engine_spec(ROOT / "engines/slim").max_len


def test_a_target_that_is_not_here_yet_is_not_asked_for(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
    bundled = ROOT / "deployments/cpu_c1_smollm2-135m_dflash/deployment.yaml"
    check(load_deployment(bundled, ["target.sha256=" + "ab" * 32]))
    with pytest.raises(ModelError, match="drafter.dtype"):
        check(load_deployment(bundled, ["drafter.dtype=float16"]))
    with pytest.raises(DigestError, match="drafter.sha256"):
        check(load_deployment(bundled, ["drafter.sha256=" + "ab" * 32]))


def test_a_fetched_target_with_another_digest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file was fetched before and gave other weights: the pin is wrong, and that is known without fetching."""
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path))
    bundled = ROOT / "deployments/cpu_c1_smollm2-135m_dflash/deployment.yaml"
    source = load_deployment(bundled).target.source
    assert source is not None
    made = tmp_path / "models/smollm2-135m-instruct.q4-1-7ef915c9bf9d"
    made.mkdir(parents=True)
    stamp = {"wheel": source.wheel, "member": source.member, "sha256": "cd" * 32}
    (made / ".specpilot.json").write_text(json.dumps(stamp))
    with pytest.raises(DigestError, match=f"{made}: SHA-256 is cdcd.* pins abab"):
        check(load_deployment(bundled, ["target.sha256=" + "ab" * 32]))
    (made / ".specpilot.json").write_text(json.dumps(stamp | {"wheel": "another==1"}))
    check(load_deployment(bundled, ["target.sha256=" + "ab" * 32]))


def test_the_type_of_most_bytes(tmp_path: Path) -> None:
    assert weights_dtype(tmp_path) is None
    safetensors(tmp_path / "a.safetensors", w=("F16", 100), b=("F32", 40))
    assert weights_dtype(tmp_path) == "float16"
    safetensors(tmp_path / "b.safetensors", w=("F32", 80))
    assert weights_dtype(tmp_path) == "float32"
    safetensors(tmp_path / "c.safetensors", w=("F8_E4M3", 900))
    assert weights_dtype(tmp_path) == "F8_E4M3"
    (tmp_path / "d.safetensors").write_bytes(b"no header at all")
    assert weights_dtype(tmp_path) is None


def test_answers_that_may_stop_count_only_where_they_are_asked_for(folder: Path) -> None:
    assert most_new_tokens(load(folder)) == (256, "gate.natural_tokens")
    assert most_new_tokens(load(folder, "gate.natural_stop_prompts=0")) == (128, "regime.output_tokens")
