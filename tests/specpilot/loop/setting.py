"""A whole deployment around the made-up engine: real journal, git, processes, sockets, memory; only the model is made up."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict
from pathlib import Path

from specpilot.deployment import Deployment, load_deployment
from specpilot.memory import Hardware, Mechanism, MemoryStore, Preconditions
from tests.helpers.fake_deployment import WEIGHTS, write_fake_deployment
from tests.helpers.fake_server import Behaviour, write_fake_tree

YAML = """
name: fake
target: {{path: target, architecture: LlamaForCausalLM}}
drafter: {{method: dflash, path: drafter}}
hardware: cpu-generic
regime: {{concurrency: 1, input_tokens: 200, output_tokens: 24}}
workload: {{tuning: tuning.jsonl, hidden: hidden.jsonl}}
engine: {{tree: {tree}}}
gate: {{cheats: none, hidden_prompts: 2, hidden_concurrencies: [1], natural_stop_prompts: 2, hidden_tokens: 32, natural_tokens: 64}}
measurement: {{max_pairs: 20, min_pairs: 4}}
budget: {{rounds: 1, wall_clock_minutes: 10}}
agents: {{search: {{enabled: false}}}}
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

DRAFTER_CONFIG = CONFIG | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]},
}


def fake_setting(folder: Path, stock: Behaviour) -> Deployment:
    """Deployment folder with an engine tree in which `stock` is the engine as found."""
    tree = write_fake_tree(folder / "tree", stock)
    write_behaviour(tree, stock)
    deployment = write_fake_deployment(folder / "deployment")
    for name, config in (("target", CONFIG), ("drafter", DRAFTER_CONFIG)):
        folder = deployment.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(WEIGHTS)
    (deployment.folder / "deployment.yaml").write_text(YAML.format(tree=tree))
    return load_deployment(deployment.folder / "deployment.yaml")


def text_of(behaviour: Behaviour) -> str:
    """`behaviour.json` with one field per line, so that patches of different fields merge."""
    return json.dumps(asdict(behaviour), indent=1, sort_keys=True) + "\n"


def write_behaviour(tree: Path, behaviour: Behaviour) -> None:
    """The tree's behaviour file."""
    (tree / "behaviour.json").write_text(text_of(behaviour))


def patch_between(before: Behaviour, after: Behaviour) -> str:
    """A patch that turns one engine into the other."""
    lines = difflib.unified_diff(
        text_of(before).splitlines(keepends=True),
        text_of(after).splitlines(keepends=True),
        "a/behaviour.json",
        "b/behaviour.json",
        n=1,
    )
    return "diff --git a/behaviour.json b/behaviour.json\n" + "".join(lines)


def remember(store: MemoryStore, name: str, patch: str, *, counters: list[str] | None = None) -> None:
    """Puts a mechanism into memory, as an earlier run would have."""
    store.add(
        Mechanism(
            name=name,
            component="target.mlp",
            title=name,
            hypothesis=f"{name} makes rounds shorter.",
            predicted_gain=1.3,
            preconditions=Preconditions(hardware=Hardware(kind="cpu")),
            counters=counters or [],
            patch=patch,
        ),
        origin="test",
    )
