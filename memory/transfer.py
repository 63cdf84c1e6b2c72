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

    Raises TamperedError when the content does not match its checksum, InvalidMechanismError when it is another
    kind of file, SchemaTooNewError when a newer SpecPilot wrote it.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreUnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TamperedError(f"{path} is damaged: {error}", "export it again") from error
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
