"""`kill -9` of a run's whole process group at random moments, then `specpilot resume`, until it ends by itself.

Prints, and exits 1 unless all hold: the same fates, merges and files as an undisturbed run; no finished step started
again; no process left 5 s after a kill; no worktree left at the end.

    python experiments/kill_resume/kill_resume.py --kills 10                       # made-up engine, about 3 minutes
    python experiments/kill_resume/kill_resume.py --deployment NAME --within 900   # a real deployment, long
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from specpilot.deployment import find_deployment  # noqa: E402
from specpilot.memory import MemoryStore  # noqa: E402
from tests.helpers.fake_server import Behaviour  # noqa: E402
from tests.helpers.killing import run_with_kills, state_of  # noqa: E402
from tests.specpilot.loop.setting import fake_setting, patch_between, remember  # noqa: E402


def made_up(folder: Path) -> tuple[Path, Path]:
    """A deployment with known fates, and its memory: one mechanism merges, one is lossy, one is slower."""
    stock = Behaviour(round_s=0.012)
    deployment = fake_setting(folder, stock)
    seed = folder / "seed.sqlite"
    with MemoryStore(f"sqlite:///{seed}", seed_folder=None) as store:
        remember(store, "half-the-round", patch_between(stock, replace(stock, round_s=0.006)))
        remember(store, "lossy", patch_between(stock, replace(stock, round_s=0.003, wrong_every=4)))
        remember(store, "slower", patch_between(stock, replace(stock, round_s=0.02)))
    return deployment.folder / "deployment.yaml", seed


def own_memory(folder: Path, name: str, seed: Path | None) -> dict[str, str]:
    """Environment with a memory for one run alone, grown from `seed`: what one run learns must not change what the other tries."""
    path = folder / f"{name}.sqlite"
    if seed is not None:
        with closing(sqlite3.connect(seed)) as source, closing(sqlite3.connect(path)) as copy:
            source.backup(copy)
    return {"SPECPILOT_MEMORY_URL": f"sqlite:///{path}"}


def main() -> int:
    """Runs both, compares, prints one JSON record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", help="name or path; default: the made-up engine of the tests")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--within", type=float, default=0.0, help="seconds of an undisturbed run; default: measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="passed on to specpilot optimize")
    options = parser.parse_args()
    arguments = [word for item in options.set for word in ("--set", item)]
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as name:
        folder = Path(name)
        if options.deployment:
            deployment, seed = find_deployment(options.deployment), None
        else:
            deployment, seed = made_up(folder)
        own = {name: own_memory(folder, name, seed) for name in ("calm", "hurt")}
        began = time.monotonic()
        calm = run_with_kills(deployment, folder / "calm", [], arguments=arguments, environment=own["calm"])
        whole = options.within or time.monotonic() - began
        generator = random.Random(options.seed)
        # Later lives have less left to do, so a life is killed within a share of the whole that leaves work for the rest.
        delays = [1.0 + generator.random() * 2.0 * whole / options.kills for _ in range(options.kills)]
        hurt = run_with_kills(deployment, folder / "hurt", delays, arguments=arguments, environment=own["hurt"])
        expected, found = state_of(folder / "calm"), state_of(folder / "hurt")
        left = [path.name for path in (folder / "hurt" / "worktrees").iterdir()]
        record = {
            "kills": [round(item, 2) for item in delays[: len(hurt.kills)]],
            "exit_codes": [calm.exit_code, hurt.exit_code],
            "same_state": expected == found,
            "repeated": hurt.repeated,
            "survivors": hurt.survivors,
            "worktrees_left": left,
            "undisturbed_s": round(whole, 1),
            "state": asdict(found),
        }
    print(json.dumps(record, indent=1))
    sound = record["same_state"] and not (hurt.repeated or hurt.survivors or left) and hurt.exit_code == 0
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
