"""Every mechanism that ships applies to the engine that ships, after what it requires, and stays inside the editable paths."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from specpilot.agents import PatchEdit
from specpilot.engine_tree import load_engine_spec
from specpilot.memory import Mechanism
from specpilot.memory.seeding import SEED_FOLDER, read_seeds

SLIM = Path(__file__).parents[2] / "engines" / "slim"
SEEDS = {seed.mechanism.name: seed for seed in read_seeds(SEED_FOLDER)}


def in_order(mechanism: Mechanism, seen: tuple[str, ...] = ()) -> list[Mechanism]:
    """What `mechanism` requires, then itself."""
    assert mechanism.name not in seen, f"circular requirements: {seen}"
    found: list[Mechanism] = []
    for need in mechanism.requires:
        found += [m for m in in_order(SEEDS[need].mechanism, (*seen, mechanism.name)) if m not in found]
    return [*found, mechanism]


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_patch_applies_after_its_requirements(name, tmp_path):
    tree = tmp_path / "slim"
    shutil.copytree(SLIM, tree, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=tree, check=True)
    spec = load_engine_spec(SLIM)
    for mechanism in in_order(SEEDS[name].mechanism):
        subprocess.run([*git, "add", "-A"], cwd=tree, check=True)
        subprocess.run([*git, "commit", "-qm", "next"], cwd=tree, check=True)
        changed = PatchEdit(mechanism.patch).apply(tree)
        assert changed and all(spec.editable(path) for path in changed), changed


def test_evidence_is_consistent():
    from datetime import UTC, datetime

    from specpilot.memory.cli import check_evidence
    from specpilot.memory.records import StoredMechanism

    for seed in SEEDS.values():
        stored = StoredMechanism(
            mechanism=seed.mechanism,
            version=1,
            status="stale",
            origin="seed",
            created=datetime.now(UTC),
            effects=seed.effects,
        )
        assert check_evidence(stored) == []
