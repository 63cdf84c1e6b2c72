"""A whole checkpoint folder, packed and unpacked.

`pack` writes a folder in which every `NAME.safetensors` has become `NAME.w12.safetensors` (so that no other program takes
it for weights it can read), everything else lies as it did, and `w12.json` says what is there, with SHA-256 sums.
`unpack` writes the original folder again, file for file the same bytes. Links to files become files; empty folders, and a
downloader's .git and .cache, are left behind; a link to a folder is refused.

Both write to a hidden folder beside the destination and rename it when it is complete: the destination is whole or
absent, whatever happens. A second run on the same destination is refused while the first works; what a killed run left is
removed by the next.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import BadCheckpoint, BadRequest, MachineProblem
from ..format import VERSION
from . import policy
from .blob import Stored
from .packed_file import PackedFile
from .packing import pack_file
from .safetensors_file import SafetensorsFile, parse, whole_numbers

MANIFEST = "w12.json"
SUFFIX = ".w12.safetensors"
_SKIPPED = (".git", ".cache")  # a downloader's bookkeeping, not part of a checkpoint

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What `pack` did. `files` maps each original file to its tensors; sizes are in bytes."""

    files: dict[str, dict[str, Stored]]
    original_bytes: int
    packed_bytes: int
    weights_sha256: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tensors = [
            {
                "file": file, "name": name, "dtype": kept.dtype, "shape": list(kept.shape), "packed": kept.packed,
                "reason": kept.reason, "row_block": kept.row_block, "escapes": kept.escapes,
                "escape_rate": kept.escapes / max(1, kept.weights), "bits_per_weight": kept.bits_per_weight,
            }
            for file, stored in self.files.items() for name, kept in stored.items()
        ]  # fmt: skip
        return {
            "original_bytes": self.original_bytes, "packed_bytes": self.packed_bytes,
            "weights_sha256": self.weights_sha256, "tensors": tensors,
        }  # fmt: skip


def pack(
    checkpoint: Path,
    to: Path,
    *,
    row_block: policy.RowBlock = "auto",
    max_escape_rate: float = policy.MAX_ESCAPE_RATE,
    progress: Progress = lambda _: None,
) -> Report:
    """Pack a checkpoint folder into the new folder `to`.

    max_escape_rate: a matrix with more escapes per weight stays BF16. `progress` is told in words what takes long.
    Raises BadCheckpoint (missing, damaged, truncated, already packed), BadRequest (`to` exists, or lies inside the
    checkpoint, or a rate outside 0..1) or MachineProblem (disk full, not writable).
    """
    if not 0 <= max_escape_rate <= 1:
        raise BadRequest(
            f"an escape rate of {max_escape_rate:g} is not a share of the weights", "give one from 0 to 1."
        )
    weights, others = _inventory(checkpoint)
    if MANIFEST in others:
        raise BadCheckpoint(f"{checkpoint} is packed already: it holds {MANIFEST}", "unpack it first.")
    table_is_head = policy.embeds_the_head(_check_complete(checkpoint, weights), _config(checkpoint))
    with _new_folder(checkpoint, to, _least_bytes(checkpoint, weights, others)) as work:
        files: dict[str, dict[str, Stored]] = {}
        rows: list[dict[str, Any]] = []
        for name in weights:
            path, packed_name = checkpoint / name, name.removesuffix(".safetensors") + SUFFIX
            before, digest = _identity(path), sha256_of(path)
            with SafetensorsFile(path) as source:
                progress(f"packing {name}: {len(source.entries)} tensors, {source.size / 1e9:.2f} GB")
                files[name] = pack_file(source, work / packed_name, table_is_head, row_block, max_escape_rate)
            if _identity(path) != before:
                raise BadCheckpoint(f"{path} changed while it was packed", "wait until it is complete, and pack again.")
            with SafetensorsFile(work / packed_name) as made:
                size, header = made.size, made.header_sha256
            rows.append(
                {
                    **{"name": name, "packed": packed_name, "bytes": before[0], "sha256": digest},
                    **{"packed_bytes": size, "packed_header_sha256": header},
                }
            )
        copied = [_copy_with_sum(checkpoint, work, name) for name in others]
        weights_sha256 = weights_digest({row["name"]: row["sha256"] for row in rows})
        manifest = {
            "format": "w12",
            "version": VERSION,
            "weights_sha256": weights_sha256,
            "files": rows,
            "copied": copied,
        }
        _write_text(work / MANIFEST, json.dumps({**manifest, "sha256": _manifest_sum(manifest)}, indent=1))
    sizes = [sum(row[key] for row in rows) for key in ("bytes", "packed_bytes")]
    return Report(files, sizes[0], sizes[1], weights_sha256)


def unpack(folder: Path, to: Path, *, progress: Progress = lambda _: None) -> str:
    """Write the original checkpoint of a packed folder into the new folder `to`; returns its weights' digest.

    Every tensor and every file is compared with its checksum. Raises as `pack`.
    """
    manifest = read_manifest(folder)
    need = sum(row["bytes"] for row in [*manifest["files"], *manifest["copied"]])
    with _new_folder(folder, to, need) as work:
        for row in manifest["files"]:
            progress(f"unpacking {row['name']}: {row['bytes'] / 1e9:.2f} GB")
            _restore(folder / row["packed"], work / row["name"], row["sha256"])
        for row in manifest["copied"]:
            if not (folder / row["name"]).is_file():
                raise BadCheckpoint(f"{folder} lacks {row['name']}, which {MANIFEST} lists", "copy the folder again.")
            if _copy_with_sum(folder, work, row["name"])["sha256"] != row["sha256"]:
                raise BadCheckpoint(f"{folder / row['name']} does not match its checksum", "copy the folder again.")
    return str(manifest["weights_sha256"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """`w12.json` of a packed folder, checked. Raises BadCheckpoint."""
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
        raise BadCheckpoint(f"{path} is no regular file", "copy the folder again.")
    try:
        value = parse(path.read_text(encoding="utf-8"))
        expected = value.pop("sha256")
        if value["format"] != "w12":
            raise ValueError("not the manifest of a packed checkpoint")
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder} is not a packed checkpoint: it has no {MANIFEST}", "make one with `specpilot pack`."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} cannot be used ({error!r})", "pack the original checkpoint again.") from error
    if value.get("version") != VERSION:
        raise BadCheckpoint(
            f"{path} has format version {value.get('version')}, this program reads {VERSION}",
            "use the version of SpecPilot that packed it, or pack the original checkpoint again.",
        )
    if _manifest_sum(value) != expected:
        raise BadCheckpoint(f"{path} does not match its checksum", "copy the folder again, or pack the original again.")
    try:
        _check_rows(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is malformed ({error!r})", "pack the original checkpoint again.") from error
    return dict(value)


def _check_rows(manifest: dict[str, Any]) -> None:
    """Raise for a manifest that names anything outside its folder: the sum in it is no signature, anybody can make one."""
    names: list[str] = []
    for row, key in (*((row, "packed") for row in manifest["files"]), *((row, "name") for row in manifest["copied"])):
        whole_numbers([row["bytes"]])
        names.append(row["name"])
        for name in (row["name"], row[key]):
            path = PurePosixPath(name)
            os.fsencode(name)  # a lone surrogate is a ValueError
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} does not lie in the folder")
        if not all(isinstance(row[key], str) for key in ("name", "sha256")):
            raise TypeError(f"{row['name']!r} has no checksum")
    if not isinstance(manifest["weights_sha256"], str):
        raise TypeError("the digest of the weights is no text")
    if len(set(names)) < len(names):
        raise ValueError("a name appears twice")


def weights_digest(sums: dict[str, str]) -> str:
    """The digest by which engines name a checkpoint: the file's SHA-256, or of the lines `sha256  name` if several."""
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()).hexdigest()


def _restore(packed: Path, path: Path, expected: str) -> None:
    """One original file, byte for byte."""
    digest = hashlib.sha256()
    with PackedFile(packed) as source, path.open("xb") as file:
        header = source.original_header.encode()
        pieces = [len(header).to_bytes(8, "little"), header]
        for piece in (*pieces, *(p for name in source.stored for p in source.tensor_bytes(name))):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != expected:
        raise BadCheckpoint(f"{packed} does not give back the file that {MANIFEST} names", "copy the folder again.")


def _inventory(checkpoint: Path) -> tuple[list[str], list[str]]:
    """Weight files (safetensors at the top), and every other file; relative names, sorted."""
    if not checkpoint.is_dir():
        raise BadCheckpoint(
            f"{checkpoint} is not a folder", "give the folder that holds config.json and *.safetensors."
        )
    weights: list[str] = []
    others: list[str] = []
    for folder, inner, names in os.walk(checkpoint, onerror=_unreadable):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED)
        for path in (Path(folder) / name for name in inner):
            if path.is_symlink():
                raise BadCheckpoint(f"{path} is a link to a folder", "put the folder itself there, or remove the link.")
        for name in names:
            if not (Path(folder) / name).is_file():
                raise BadCheckpoint(f"{Path(folder) / name} is a broken link or no regular file", "remove or mend it.")
            relative = str((Path(folder) / name).relative_to(checkpoint))
            (weights if folder == str(checkpoint) and name.endswith(".safetensors") else others).append(relative)
    if not weights:
        raise BadCheckpoint(f"{checkpoint} holds no .safetensors file", "convert the checkpoint to safetensors first.")
    return sorted(weights), sorted(others)


def _unreadable(error: OSError) -> None:
    raise MachineProblem(f"{error.filename}: {error.strerror}", "check that folder and its permissions.") from error


def _check_complete(checkpoint: Path, weights: list[str]) -> list[str]:
    """All tensor names. Raises BadCheckpoint for a malformed file, or one that an index names and that is absent."""
    found: dict[str, str] = {}
    for name in weights:
        with SafetensorsFile(checkpoint / name) as file:
            found.update((entry.name, name) for entry in file.entries)
    for index in sorted(checkpoint.glob("*.safetensors.index.json")):
        try:
            wanted = dict(parse(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{index} is malformed ({error!r})", "fetch it again.") from error
        for tensor, file_name in wanted.items():
            if file_name not in weights:
                raise BadCheckpoint(
                    f"{checkpoint} lacks {file_name}, which {index.name} names", "fetch the checkpoint again."
                )
            if found.get(tensor) is None:
                raise BadCheckpoint(
                    f"{checkpoint / file_name} lacks tensor {tensor}, which {index.name} names", "fetch it again."
                )
    return list(found)


def _config(checkpoint: Path) -> dict[str, Any]:
    try:
        value = parse((checkpoint / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{checkpoint / 'config.json'} cannot be read ({error})", "fetch it again.") from error
    return value if isinstance(value, dict) else {}


def _least_bytes(checkpoint: Path, weights: list[str], others: list[str]) -> int:
    """A lower bound of what packing writes, so that a disk that cannot hold it is refused at once."""
    return sum((checkpoint / n).stat().st_size * 3 // 4 for n in weights) + sum(
        (checkpoint / n).stat().st_size for n in others
    )


@contextmanager
def _new_folder(source: Path, to: Path, need: int) -> Iterator[Path]:
    """A folder to fill that becomes `to` when the block ends well, and vanishes when it does not."""
    to = to.absolute()
    if to.exists() or to.is_symlink():
        raise BadRequest(f"{to} exists", "give a folder that does not exist yet as --to.")
    if source.resolve() in [to.parent.resolve(), *to.parent.resolve().parents]:
        raise BadRequest(f"{to} lies inside {source}", "give a folder outside the checkpoint as --to.")
    work = to.parent / f".{to.name}.partial"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with _alone(to, work):
            free = shutil.disk_usage(work).free
            if free < need:
                raise MachineProblem(
                    f"the disk that holds {to.parent} has {free / 1e9:.2f} GB free, at least {need / 1e9:.2f} GB are needed",
                    "free some space there, or give --to on another disk.",
                )
            yield work
            if to.exists():
                raise BadRequest(f"{to} appeared meanwhile", "give a folder that does not exist yet as --to.")
            _sync(work)
            work.rename(to)
            _sync(to.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineProblem(
                f"no space left on the disk that holds {to.parent}", "free some space there, then try again."
            ) from error
        where = error.filename or to
        raise MachineProblem(f"{where}: {error.strerror or error}", "check that folder and its permissions.") from error


@contextmanager
def _alone(to: Path, work: Path) -> Iterator[None]:
    """Creates `work`, emptied of what a killed run left, under a lock on its parent's hidden lock file."""
    lock = to.parent / f".{to.name}.lock"
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.exists() or not os.path.samestat(os.fstat(held.fileno()), lock.stat()):
                raise BlockingIOError  # the one before us has just finished and removed the file that we locked
        except BlockingIOError:
            raise BadRequest(
                f"another process is writing {to}", "wait for it, or give another folder as --to."
            ) from None
        try:
            if work.exists():
                shutil.rmtree(work)
            work.mkdir()
            yield
        finally:
            shutil.rmtree(work, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _copy_with_sum(source: Path, to: Path, name: str) -> dict[str, Any]:
    target = to / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / name, target)
    return {"name": name, "bytes": target.stat().st_size, "sha256": sha256_of(target)}


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
