"""evidence/: why the exported engine may be believed, as plain JSON beside the report, and checksums over everything."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from specpilot.evidence import check_file
from specpilot.export.source import RunSource

SUMS = "SHA256SUMS"
_PRIVATE = {"secret", "memory_url", "options"}
"""Of the run's meta data: what seeds the prompts' codes, and what may hold a password."""


def write_evidence(source: RunSource, folder: Path, packages: dict[str, str]) -> None:
    """Fill `folder`: journal.json, calibration.json, selftest.json, baselines.json, final.json, gaps.json,
    comparisons.json, verdicts.json, environment.json and, if there is one, report.html."""
    folder.mkdir()
    _json(folder / "journal.json", journal_extract(source))
    _json(folder / "calibration.json", source.step("calibrate"))
    _json(folder / "selftest.json", source.step("selftest"))
    _json(folder / "baselines.json", source.step("baselines"))
    _json(folder / "final.json", final_figures(source))
    _json(
        folder / "gaps.json", {key: value for key, value in source.results.items() if _has(value, "rows", "bound_ms")}
    )
    _json(folder / "comparisons.json", _collect(source, "comparison", "ratio", "pairs"))
    _json(folder / "verdicts.json", _collect(source, "verdict", "passed", "checks"))
    _json(folder / "environment.json", {"machine": source.step("machine"), "packages": packages})
    report = source.run_dir / "report.html"
    check_file(source.journal, source.run_dir, report)
    if report.is_file():
        shutil.copyfile(report, folder / "report.html")


def final_figures(source: RunSource) -> dict[str, Any]:
    """The closing session for the exported commit: ar, stock, final, final-ar; empty when there was none."""
    return source.step(f"final/{source.best[:12]}") or source.step("final")


def journal_extract(source: RunSource) -> dict[str, Any]:
    """Steps with times and results, attempts with their histories, events; without the run's secrets."""
    run = {key: value for key, value in (source.meta.get("run") or {}).items() if key not in _PRIVATE}
    return {
        "run": run,
        "deployment": source.meta["deployment"],
        "stop_reason": source.stop_reason,
        "seal": source.journal.seal_head,
        "first_commit": source.first,
        "best_commit": source.best,
        "merged": [{"name": s.name, "before": s.before, "after": s.after, **s.result} for s in source.merged],
        "steps": [
            {
                "key": row.key,
                "finished": row.finished,
                "starts": row.starts,
                "started": _when(row.started_at),
                "ended": _when(row.finished_at),
                "result": source.results.get(row.key),
            }
            for row in source.journal.steps()
        ],
        "attempts": [
            {
                "id": row.id,
                "round": row.round,
                "worker": row.worker,
                "component": row.component,
                "state": row.state.value,
                "reason": row.reason.value if row.reason else None,
                "detail": row.detail,
                "data": row.data,
                "history": [
                    [state.value, reason.value if reason else None, _when(at)]
                    for state, reason, at in source.journal.attempt_history(row.id)
                ],
            }
            for row in source.journal.attempts()
        ],
        "events": [
            {"at": _when(event.at), "kind": event.kind, "data": event.data} for event in source.journal.events()
        ],
    }


def write_sums(root: Path) -> str:
    """evidence/SHA256SUMS over every other file under `root`, in the format of `sha256sum`; its own digest."""
    path = root / "evidence" / SUMS
    files = sorted(item.relative_to(root).as_posix() for item in root.rglob("*") if item.is_file() and item != path)
    lines = [f"{_sha256(root / name)}  {name}\n" for name in files]
    path.write_text("".join(lines), encoding="utf-8")
    return _sha256(path)


def _collect(source: RunSource, field: str, *keys: str) -> dict[str, Any]:
    """Step key -> the record of that kind which the step holds, itself or under `field`."""
    found = {}
    for key, value in source.results.items():
        if _has(value, *keys):
            found[key] = value
        elif isinstance(value, dict) and _has(value.get(field), *keys):
            found[key] = value[field]
    return found


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def _when(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
