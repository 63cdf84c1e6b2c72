"""Where things are in an exported engine, and how its variants are started. Standard library only; `cores.py` beside it is SpecPilot's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from cores import usable_cores  # type: ignore[import-not-found]

HOME = Path(__file__).resolve().parent.parent
"""The export's folder."""
INVALID, ENVIRONMENT, MODEL, DIFFERS, TAMPERED = 2, 3, 4, 7, 8
"""Exit codes: wrong use, machine, checkpoint, tokens differ from the reference's, tampered evidence."""
HOST = "127.0.0.1"


def fail(code: int, message: str, hint: str = "") -> NoReturn:
    """One message on standard error, then the exit code."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  what to do: {hint}", file=sys.stderr)
    raise SystemExit(code)


def manifest() -> dict[str, Any]:
    """`export.json`: commits, checkpoints and settings of this engine."""
    try:
        data = json.loads((HOME / "export.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(TAMPERED, f"export.json cannot be read: {error}", "take a fresh copy of the export.")
    return dict(data)


def target_dir(info: dict[str, Any]) -> Path:
    """Folder of the target's checkpoint: $TARGET_DIR, else models/<name>."""
    given = os.environ.get("TARGET_DIR")
    return Path(given).expanduser().absolute() if given else HOME / "models" / str(info["target"]["name"])


def need_target(info: dict[str, Any]) -> Path:
    """The checkpoint's folder; ends the program when there is none."""
    folder = target_dir(info)
    if not (folder / "config.json").is_file():
        fail(MODEL, f"there is no checkpoint in {folder}", "run ./download_models.sh first, or set TARGET_DIR.")
    return folder


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights: of the file if it is one, else of the lines `sha256  name` of the sorted files."""
    sums = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in sums.items()).encode()).hexdigest()


def check_weights(info: dict[str, Any]) -> None:
    """Target and drafter must be the very weights that this engine was found for; ends the program otherwise."""
    folders = [("target", need_target(info), info["target"]["sha256"])]
    if info["drafter"] == "dflash":
        folders.append(("drafter", HOME / "drafter", info.get("drafter_sha256")))
    for what, folder, pinned in folders:
        if pinned is None or folder in _CHECKED:
            continue
        found = weights_digest(folder)
        if found != pinned:
            fail(
                MODEL,
                f"the {what}'s weights in {folder} have SHA-256 {found}, this engine was found for {pinned}",
                "run ./download_models.sh, or take a fresh copy of the export."
                if what == "target"
                else "take a fresh copy.",
            )
        _CHECKED.add(folder)


_CHECKED: set[Path] = set()
"""Folders whose weights this process has read already."""


def need_packages() -> None:
    """The packages that the engine imports (the first part of requirements.txt) must be in this interpreter."""
    missing = []
    for line in (HOME / "requirements.txt").read_text(encoding="utf-8").split("# What these need")[0].splitlines():
        name = line.partition("==")[0].strip()
        if name and not name.startswith("#"):
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                missing.append(name)
    if missing:
        hint = "run ./setup_env.sh and unset ENGINE_PYTHON, or install requirements.txt into that interpreter."
        fail(ENVIRONMENT, f"{sys.executable} lacks {', '.join(missing)}", hint)


def threads(info: dict[str, Any]) -> str:
    """CPU threads of the engine: $THREADS, else the run's setting, else all cores."""
    given = os.environ.get("THREADS", "").strip()
    if given and not (given.isdecimal() and 0 < int(given) <= 4096):
        fail(ENVIRONMENT, f"THREADS={given!r} is not a number of threads", "set it to 1 or more, or unset it.")
    return given or str(info["threads"] or usable_cores())


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def launch(info: dict[str, Any], variant: str, port: int, host: str = HOST) -> tuple[list[str], Path, dict[str, str]]:
    """(command, working directory, environment) that starts `variant` (ends the program when it is unknown)."""
    if variant not in info["variants"]:
        fail(INVALID, f"unknown variant {variant!r}", f"one of: {', '.join(info['variants'])}.")
    need_packages()
    where = info["variants"][variant]
    tree = HOME / where["tree"]
    try:
        spec = tomllib.loads((tree / "engine.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        fail(TAMPERED, f"{where['tree']}/engine.toml cannot be read: {error}", "take a fresh copy of the export.")
    commit = str(where["commit"])
    cache = Path(os.environ.get("ENGINE_CACHE") or HOME / ".cache").absolute() / commit[:12]
    cache.mkdir(parents=True, exist_ok=True)
    drafter = info["drafter"]
    values = {
        "python": sys.executable,
        "target": str(need_target(info)),
        "drafter": str(HOME / "drafter") if drafter == "dflash" else str(drafter),
        "host": host,
        "port": str(port),
        "threads": threads(info),
        "variant": variant,
        "commit": commit,
        "cache": str(cache),
    }
    words = [_fill(word, values) for word in [*spec["launch"]["command"], *spec["variants"][where["variant"]]]]
    environment = {**os.environ, "SPECPILOT_COMMIT": commit, "SPECPILOT_VARIANT": variant}
    for source in (spec["launch"].get("env", {}), info["environment"]):
        environment |= {name: _fill(str(text), values) for name, text in source.items()}
    return words, tree / spec["launch"].get("cwd", "."), environment


def readiness(variant: str, info: dict[str, Any]) -> tuple[str, float]:
    """(path that answers 200 when the server is ready, seconds to wait at most)."""
    tree = HOME / info["variants"][variant]["tree"]
    section = tomllib.loads((tree / "engine.toml").read_text(encoding="utf-8")).get("readiness", {})
    return str(section.get("path", "/health")), float(section.get("timeout_s", 180))


def _fill(word: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), word)
