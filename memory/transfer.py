"""Moving a memory between machines: one JSON file with a checksum over its content."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .errors import InvalidMechanismError, SchemaTooNewError, StoreUnavailableError, TamperedError
from .records import StoredMechanism, as_json, sha256_json

FORMAT = "specpilot-memory"
VERSION = 1


def write(path: Path, items: list[StoredMechanism]) -> None:
    """Write `items` to `path`, replacing it in one step. Raises StoreUnavailableError (for example disk full)."""
    body = [as_json(item) for item in items]
    document = {"format": FORMAT, "version": VERSION, "sha256": sha256_json(body), "mechanisms": body}
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StoreUnavailableError(
            f"cannot write {path}: {error.strerror or error}", "choose a writable folder with free space"
        ) from error


def read(path: Path) -> list[StoredMechanism]:
    """The mechanisms in a file that `write` made.

    Raises TamperedError when the content does not match its checksum, InvalidMechanismError when there is none or it is
    another kind of file, SchemaTooNewError when a newer SpecPilot wrote it.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InvalidMechanismError(
            f"{path} is no file that can be imported: {error.strerror}",
            "give a file written by 'specpilot memory export'",
        ) from error
    except OSError as error:
        raise StoreUnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        if FORMAT.encode() in data:
            raise TamperedError(f"{path} is damaged: {error}", "export it again") from error
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidMechanismError(
            f"{path} is not a memory export", "give a file written by 'specpilot memory export'"
        )
    if document.get("version") != VERSION:
        raise SchemaTooNewError(
            f"{path} has format version {document.get('version')}; this SpecPilot reads {VERSION}", "upgrade SpecPilot"
        )
    body = document.get("mechanisms")
    if sha256_json(body) != document.get("sha256"):
        raise TamperedError(
            f"{path} was changed after it was exported: its checksum does not match", "import an untouched copy"
        )
    try:
        return [StoredMechanism.model_validate(item) for item in body or []]
    except (ValidationError, TypeError) as error:
        raise InvalidMechanismError(f"{path} holds something that is not a mechanism: {error}") from error
