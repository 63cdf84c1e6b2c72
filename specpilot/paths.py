"""Where SpecPilot keeps what it makes: one home folder, nothing anywhere else.

The functions only compute paths, but for `register_run`; whoever writes creates the folder. May import errors only.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from specpilot.errors import RunFolderError, UsageError

JOURNAL_NAME = "journal.db"
"""Name of the journal inside a run folder; a folder without it is not a run."""


def home() -> Path:
    """`$SPECPILOT_HOME`, or `~/.specpilot`. Always absolute. Raises `UsageError` for a relative value."""
    value = os.environ.get("SPECPILOT_HOME", "")
    if not value:
        return Path.home() / ".specpilot"
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise UsageError(
            f"SPECPILOT_HOME={value!r} is not an absolute path",
            "set it to an absolute path, or unset it to use ~/.specpilot.",
        )
    return path


def runs_dir() -> Path:
    """Folder that holds one folder per run."""
    return home() / "runs"


def models_dir() -> Path:
    """Folder of fetched and converted checkpoints; safe to delete, they are fetched again."""
    return home() / "models"


def logs_dir() -> Path:
    """Folder of tracebacks of unexpected errors."""
    return home() / "logs"


def machine_file() -> Path:
    """Measured bandwidth and peaks of this machine (JSON)."""
    return home() / "machine.json"


def memory_url() -> str:
    """SQLAlchemy URL of the memory: `$SPECPILOT_MEMORY_URL`, or an SQLite file in the home folder."""
    return os.environ.get("SPECPILOT_MEMORY_URL") or f"sqlite:///{home() / 'memory.db'}"


def run_index() -> Path:
    """File that names the runs kept elsewhere (`optimize --run-dir`): one JSON string, an absolute path, a line."""
    return home() / "runs-elsewhere.jsonl"


def register_run(folder: Path) -> None:
    """Note a run folder that does not lie in `runs_dir()`, so that `runs` and `latest` know it. Appends at most one line."""
    folder = folder.resolve()
    if folder.parent == runs_dir().resolve() or folder in _elsewhere():
        return
    run_index().parent.mkdir(parents=True, exist_ok=True)
    with run_index().open("a", encoding="utf-8") as file:
        file.write(json.dumps(str(folder)) + "\n")


def _elsewhere() -> list[Path]:
    """What the index names, in order, each once; lines that cannot be read are passed over."""
    try:
        lines = run_index().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: dict[Path, None] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, str) and Path(value).is_absolute():
                found[Path(value)] = None
    return list(found)


def all_runs() -> list[Path]:
    """Run folders under `runs_dir()` and those registered elsewhere that are still there, the one begun first first."""
    root = runs_dir()
    folders = [*(root.iterdir() if root.is_dir() else ()), *_elsewhere()]
    found = [folder for folder in folders if _holds_run(folder)]
    return sorted(found, key=lambda folder: (_begun(folder), folder.name))


def _begun(folder: Path) -> float:
    """When a run began: its `deployment.yaml` is written then and never again, while the journal changes with every look at it."""
    for name in ("deployment.yaml", JOURNAL_NAME):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / JOURNAL_NAME).is_file()
    except OSError:  # a disk that is gone, a folder of somebody else's
        return False


def find_run(name: str) -> Path:
    """The run folder that a user means: a path, a run id, the start of exactly one id, or `latest`.

    Raises `RunFolderError` when there is none, or more than one.
    """
    if not name.strip():
        raise RunFolderError(
            "the name of the run is empty", "give a run id, a folder, or `latest`; `specpilot runs` lists them."
        )
    direct = Path(name).expanduser()
    if (direct / JOURNAL_NAME).is_file():
        return direct.resolve()
    runs = all_runs()
    if name == "latest":
        if runs:
            return runs[-1]
        raise RunFolderError(f"there is no run under {runs_dir()}", "start one: specpilot optimize --deployment NAME")
    matches = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.name for run in matches[:8])
        raise RunFolderError(f"{name!r} names {len(matches)} runs: {names}", "give more of the run id.")
    if direct.is_dir():
        raise RunFolderError(
            f"{direct} is not a run folder: it has no {JOURNAL_NAME}",
            "give the folder that `specpilot optimize` printed; `specpilot runs` lists them.",
        )
    raise RunFolderError(f"no run named {name!r} under {runs_dir()}", "`specpilot runs` lists them.")
