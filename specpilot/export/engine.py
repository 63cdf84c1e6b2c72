"""`--format engine`: a folder that serves, measures and verifies itself, without SpecPilot installed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from specpilot import __version__
from specpilot.deployment import parse_deployment
from specpilot.errors import DigestError, MissingModelError
from specpilot.export.evidence import write_evidence, write_sums
from specpilot.export.pins import requirements
from specpilot.export.readme import readme
from specpilot.export.source import RunSource
from specpilot.models import weights_digest

FILES = Path(__file__).resolve().parent / "files"
CORES = Path(__file__).resolve().parent.parent / "cores.py"
"""How many cores there are, for the export as for the run; imports nothing of ours."""
IMPORTERS = Path(__file__).resolve().parent.parent / "engines" / "importers"
VARIANTS = {
    "final": ("engine", "final"),
    "stock": ("stock", "stock"),
    "ar": ("stock", "ar"),
    "final-ar": ("engine", "final-ar"),
    "reference": ("stock", "reference"),
}
"""Name -> (tree, the tree's own variant): as the run served them."""


def write_engine(source: RunSource, folder: Path) -> str:
    """Fill `folder`; the digest of evidence/SHA256SUMS. Raises `DigestError`, `MissingModelError`, `EnvironmentProblem`."""
    source.workspace.export_tree(source.best, folder / "engine")
    source.workspace.export_tree(source.first, folder / "stock")
    _write_tools(folder)
    drafter = _write_drafter(source, folder)
    prompts = _write_prompts(source, folder)
    _write_deployment(source, folder, prompts)
    _write_manifest(source, folder, drafter, prompts)
    text, packages = requirements([folder / "engine", folder / "stock", folder / "tools"], _python(source))
    (folder / "requirements.txt").write_text(text, encoding="utf-8")
    write_evidence(source, folder / "evidence", packages)
    (folder / "README.md").write_text(readme(source, _target_name(source)), encoding="utf-8")
    return write_sums(folder)


def _write_tools(folder: Path) -> None:
    tools = folder / "tools"
    tools.mkdir()
    for path in sorted(FILES.glob("*.sh")):
        if path.name == "python.sh":
            shutil.copyfile(path, tools / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
            (folder / path.name).chmod(0o755)
    for path in sorted(FILES.glob("*.py")):
        if path.name != "__init__.py":
            shutil.copyfile(path, tools / path.name)
    shutil.copyfile(CORES, tools / CORES.name)
    (tools / "importers").mkdir()
    for path in sorted(IMPORTERS.glob("*.py")):
        shutil.copyfile(path, tools / "importers" / path.name)


def _write_drafter(source: RunSource, folder: Path) -> str:
    """Copy the drafter's checkpoint; its method. The weights must still be those that the run used."""
    method = source.deployment.drafter.method.value
    if method != "dflash":
        return method
    used = source.step("preflight")
    origin = Path(used.get("drafter") or source.deployment.resolve(source.deployment.drafter.path or ""))
    if not (origin / "config.json").is_file():
        raise MissingModelError(f"the run's drafter is no longer in {origin}", "put it back, then export again.")
    found, pinned = weights_digest(origin), used.get("drafter_sha256") or source.deployment.drafter.sha256
    if pinned is not None and found != pinned:
        raise DigestError(
            f"the drafter in {origin} changed since the run: SHA-256 is {found}, the run used {pinned}",
            "restore the checkpoint, then export again.",
        )
    shutil.copytree(origin, folder / "drafter", ignore=shutil.ignore_patterns("__pycache__", ".git", "*.pyc"))
    return method


def _write_prompts(source: RunSource, folder: Path) -> dict[str, list[str]]:
    """Copy both prompt sets; set -> paths in the export."""
    (folder / "prompts").mkdir()
    written: dict[str, list[str]] = {}
    for which in ("tuning", "hidden"):
        files = source.deployment.prompt_files(which)
        written[which] = []
        for number, path in enumerate(files):
            name = f"prompts/{which}.jsonl" if len(files) == 1 else f"prompts/{which}-{number}.jsonl"
            try:
                shutil.copyfile(path, folder / name)
            except FileNotFoundError as error:
                raise MissingModelError(
                    f"the run's {which} prompts are no longer in {path}", "put them back."
                ) from error
            written[which].append(name)
    return written


def _write_deployment(source: RunSource, folder: Path, prompts: dict[str, list[str]]) -> None:
    """The deployment with every path inside the export, fit for a further `specpilot optimize`."""
    data = yaml.safe_load(source.deployment.to_yaml())
    data["engine"]["tree"] = "engine"
    data["engine"]["python"] = None
    data["workload"].update(prompts)
    if data["drafter"]["path"] is not None:
        data["drafter"]["path"] = "drafter"
    if data["target"]["path"] is not None:
        data["target"]["path"] = f"models/{_target_name(source)}"
    text = yaml.safe_dump(data, sort_keys=False)
    parse_deployment(text, folder)
    (folder / "deployment.yaml").write_text(text, encoding="utf-8")


def _write_manifest(source: RunSource, folder: Path, drafter: str, prompts: dict[str, list[str]]) -> None:
    deployment, commits = source.deployment, {"engine": source.best, "stock": source.first}
    target: dict[str, Any] = {
        "name": _target_name(source),
        "sha256": _target_sha256(source),
        "source": deployment.target.source.model_dump(mode="json") if deployment.target.source else None,
        "path": str(_target_path(source)) if deployment.target.source is None else None,
    }
    manifest = {
        "specpilot": __version__,
        "run": source.run_id,
        "deployment": deployment.name,
        "variants": {
            name: {"tree": tree, "commit": commits[tree], "variant": variant}
            for name, (tree, variant) in VARIANTS.items()
        },
        "target": target,
        "drafter": drafter,
        "drafter_sha256": weights_digest(folder / "drafter") if drafter == "dflash" else None,
        "prompts": prompts,
        "threads": deployment.engine.threads,
        "environment": dict(deployment.engine.environment),
        "input_tokens": deployment.regime.input_tokens,
        "output_tokens": deployment.timed_tokens(),
        "mechanisms": [step.name for step in source.merged],
    }
    (folder / "export.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _target_path(source: RunSource) -> Path:
    used = source.step("preflight").get("target_dir")
    return Path(used) if used else source.deployment.resolve(source.deployment.target.path or "")


def _target_name(source: RunSource) -> str:
    return _target_path(source).name if source.deployment.target.source is None else source.deployment.name


def _target_sha256(source: RunSource) -> str:
    known = source.step("preflight").get("target_sha256") or source.deployment.target.sha256
    return str(known) if known else weights_digest(_target_path(source))


def _python(source: RunSource) -> str:
    return str(source.step("preflight").get("python") or source.deployment.engine.python or sys.executable)
