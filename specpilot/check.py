"""Does a deployment hold together? Everything that can be known without running an engine, before anything is spent.

Reads files only (a checkpoint's header and digest, never its tensors) and asks nvidia-smi for a GPU's name; fetches nothing, so that of a target which is not
here yet only the file's own words are checked. May import costmodel, cores, deployment, drafters, engine_tree, errors,
evaluation.prompts, loop.budget and models.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from specpilot.cores import usable_cores
from specpilot.deployment import Deployment
from specpilot.drafters import check_drafter
from specpilot.engine_tree import EngineSpec, load_engine_spec
from specpilot.errors import MissingModelError, ModelError, UsageError
from specpilot.loop.budget import LEAST_MINUTES
from specpilot.models import check_architecture, compare_digest, known_target, stamped_digest, weights_digest

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Names in a safetensors header -> names in a deployment."""
LONGEST_HEADER = 1 << 27
"""Bytes; a longer header is no safetensors file."""


def check(deployment: Deployment) -> None:
    """Raise `UsageError`, `ModelError` or `CostModelError` for the first thing that would stop a run.

    Budget, engine tree, tunables, threads, hardware sheet, prompt files, checkpoints (digest, architecture, type), lengths,
    drafter.
    """
    _check_budget(deployment)
    spec = load_engine_spec(deployment.engine_tree())
    spec.tunables_text(deployment.engine.tunables)
    _check_threads(deployment)
    from specpilot.costmodel.hardware import sheet_of

    sheet_of(deployment.hardware, prefer=spec.device)
    _check_files(deployment)
    target = known_target(deployment)
    if target is not None:
        compare_digest(stamped_digest(target), deployment.target.sha256, f"target.sha256: weights in {target}")
        check_architecture(target, deployment.target.architecture)
        _check_dtype("target.dtype", target, deployment.target.dtype)
    _check_lengths(deployment, spec, target)
    if deployment.drafter.path is not None:
        drafter = deployment.resolve(deployment.drafter.path)
        check_drafter(drafter, target)
        if deployment.drafter.sha256 is not None:
            compare_digest(weights_digest(drafter), deployment.drafter.sha256, f"drafter.sha256: weights in {drafter}")
        _check_dtype("drafter.dtype", drafter, deployment.drafter.dtype)


def most_new_tokens(deployment: Deployment) -> tuple[int, str]:
    """Tokens of the longest answer that a run asks for, and the key that sets it."""
    gate = deployment.gate
    asked = {
        "regime.output_tokens": deployment.regime.output_tokens,
        "measurement.output_tokens_timed": deployment.timed_tokens(),
        "gate.hidden_tokens": gate.hidden_tokens,
        "gate.natural_tokens": gate.natural_tokens if gate.natural_stop_prompts else 0,
    }
    key = max(asked, key=lambda name: asked[name])
    return asked[key], key


def weights_dtype(folder: Path) -> str | None:
    """Type in which most bytes of a checkpoint's weights are stored; None if the headers cannot be read."""
    sizes: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length < LONGEST_HEADER:
                    return None
                header: dict[str, Any] = json.loads(file.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    start, end = tensor["data_offsets"]
                    sizes[str(tensor["dtype"])] += end - start
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
    if not sizes:
        return None
    most = sizes.most_common(1)[0][0]
    return DTYPES.get(most, most)


def _check_budget(deployment: Deployment) -> None:
    minutes = deployment.budget.wall_clock_minutes
    if minutes is not None and minutes < LEAST_MINUTES:
        raise UsageError(
            f"deployment {deployment.name}: budget.wall_clock_minutes: {minutes:g} is too little: one candidate and the "
            f"closing session take about {LEAST_MINUTES:g}, and the gate's own test comes before them",
            f"give at least {LEAST_MINUTES:g}, or null for no limit.",
        )
    for key in ("usd", "tokens"):
        if getattr(deployment.budget, key) is not None:
            raise UsageError(
                f"deployment {deployment.name}: budget.{key}: nothing would hold this limit: no worker of this version calls a "
                "model, and what an outsider spends on an attempt is not counted",
                "set it to null, and limit an outsider's model calls where they are made.",
            )


def _check_threads(deployment: Deployment) -> None:
    wanted = deployment.engine.threads
    cores = usable_cores()
    if wanted is not None and wanted > cores:
        raise UsageError(
            f"deployment {deployment.name}: engine.threads: {wanted} threads on {cores} cores that this process may use",
            f"set at most {cores}, or null for all of them.",
        )


def _check_files(deployment: Deployment) -> None:
    missing = deployment.missing_files()
    prompts = [path for path in missing if path.suffix == ".jsonl"]
    if prompts:
        raise UsageError(
            f"deployment {deployment.name}: no file {', '.join(map(str, prompts))}",
            "correct workload, or write the prompts.",
        )
    from specpilot.evaluation.prompts import check_prompt_files

    check_prompt_files(deployment)
    if missing:
        raise MissingModelError(
            f"deployment {deployment.name}: no file {', '.join(map(str, missing))}",
            "give folders with config.json and safetensors weights as target.path and drafter.path.",
        )


def _check_dtype(key: str, folder: Path, declared: str) -> None:
    found = weights_dtype(folder)
    if found is not None and found != declared:
        raise ModelError(
            f"{key}: the deployment says {declared}, the weights in {folder} are {found}",
            f"set {key} to {found}, or give the checkpoint that was meant.",
        )


def _check_lengths(deployment: Deployment, spec: EngineSpec, target: Path | None) -> None:
    """The longest request of the run must fit into what the server, and the model, can hold."""
    limits: dict[str, int] = {}
    if spec.max_len is not None:
        limits[f"engine {spec.name}"] = spec.max_len
    config = {} if target is None else json.loads((target / "config.json").read_text(encoding="utf-8"))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int):
        limits["the target's max_position_embeddings"] = positions
    if not limits:
        return
    what = min(limits, key=lambda name: limits[name])
    new, key = most_new_tokens(deployment)
    prompt = deployment.regime.input_tokens
    if prompt + new > limits[what]:
        raise UsageError(
            f"deployment {deployment.name}: regime.input_tokens {prompt} + {key} {new} = {prompt + new} tokens, "
            f"{what} allows {limits[what]}",
            f"lower one of them, to {limits[what]} together.",
        )
