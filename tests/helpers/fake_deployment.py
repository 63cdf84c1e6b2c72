"""A whole small deployment on disk for the made-up engine: prompts, a byte tokenizer, a stand-in checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specpilot.deployment import Deployment, parse_deployment

WEIGHTS = b"made-up weights"
SHA = hashlib.sha256(WEIGHTS).hexdigest()

YAML = """
name: fake
target: {path: target, architecture: LlamaForCausalLM}
drafter: {method: dflash, path: target}
regime: {concurrency: 1, input_tokens: 200, output_tokens: 24}
workload: {tuning: tuning.jsonl, hidden: hidden.jsonl}
measurement: {max_pairs: 12, min_pairs: 4}
"""


def byte_tokenizer(path: Path) -> Path:
    """A tokenizer.json in which every byte is a token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: k for k, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


def write_fake_deployment(folder: Path, yaml: str = YAML, tuning: int = 12, hidden: int = 8) -> Deployment:
    """Writes `folder`/{tuning,hidden}.jsonl, target/ and deployment.yaml; a quarter of the prompts is `maths`."""
    target = folder / "target"
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(WEIGHTS)
    (target / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    byte_tokenizer(target / "tokenizer.json")
    for name, count in (("tuning", tuning), ("hidden", hidden)):
        rows = [
            {
                "id": f"{name}{k}",
                "source": "code" if k % 4 else "maths",
                "text": f"<|im_start|>user\n{name} question number {k}<|im_end|>\n<|im_start|>assistant\n",
            }
            for k in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "deployment.yaml").write_text(yaml)
    return parse_deployment(yaml, folder)
