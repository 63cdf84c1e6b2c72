"""A real engine on a tiny random model, with everything that a self-test needs. Costs one engine start of a few seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from specpilot.deployment import Deployment, parse_deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.evaluation.prompts import PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.gate.calibrate import calibrate
from specpilot.gate.records import TimeFloor
from specpilot.gate.selftest import SelfTestContext
from specpilot.models import ensure_models
from specpilot.workspace import Workspace
from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model

WORDS = "the sum of two numbers is then added to a list which holds every prime below that limit and".split()


def make_target(folder: Path, scale: float = 0.35) -> Path:
    """A random target whose logits lie close together, as a real model's best few do: gaps of a nat or two.

    A small `scale` makes layers whisper: the tied head then repeats the last token, and prompt look-up is always right.
    """
    make_tiny_model(folder, scale=scale)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = (tensors["model.norm.weight"].float() * 0.12).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_deployment(folder: Path, drafter: str = "dflash", temperature: float = 0.0, scale: float = 0.35) -> Deployment:
    """A deployment of the tiny model in `folder`."""
    make_target(folder / "target", scale)
    if drafter == "dflash":
        make_tiny_drafter(folder / "drafter", folder / "target")
    source = random.Random(5)
    for which in ("tuning", "hidden"):
        rows = [
            {"id": f"{which}{i}", "source": "words", "text": " ".join(source.choices(WORDS, k=6))} for i in range(30)
        ]
        (folder / f"{which}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "name": "tiny",
        "target": {"path": "target", "architecture": "LlamaForCausalLM"},
        "drafter": {"method": drafter, **({"path": "drafter"} if drafter == "dflash" else {})},
        "regime": {"input_tokens": 128, "output_tokens": 32, "temperature": temperature},
        "workload": {"tuning": "tuning.jsonl", "hidden": "hidden.jsonl"},
        "engine": {"tree": "slim", "threads": 1},
    }
    return parse_deployment(yaml.safe_dump(data), folder)


@contextmanager
def tiny_context(
    folder: Path, drafter: str = "dflash", temperature: float = 0.0, floor: TimeFloor | None = None, scale: float = 0.35
) -> Iterator[SelfTestContext]:
    """A context with a started, calibrated reference."""
    deployment = make_deployment(folder, drafter, temperature, scale)
    models = ensure_models(deployment)
    workspace = Workspace.create(folder / "run", deployment.engine_tree())
    tree = workspace.checkout("reference", workspace.first_commit)
    spec = load_engine_spec(tree)
    pool = PromptPool(deployment, models.target_dir, "secret")
    server = EngineServer(
        tree=tree,
        spec=spec,
        variant="reference",
        commit=workspace.first_commit,
        models=models,
        deployment=deployment,
        log_dir=folder / "logs",
    )
    with server:
        calibration = calibrate(server, pool.take("tuning", 6), deployment.gate, max_new_tokens=32)
        yield SelfTestContext(
            deployment=deployment,
            workspace=workspace,
            spec=spec,
            models=models,
            pool=pool,
            reference=server,
            calibration=calibration,
            log_dir=folder / "logs",
            floor=floor,
            aa_pairs=0,
        )
