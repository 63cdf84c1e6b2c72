"""The way in for a person or any other agent: `specpilot attempt open` prints a brief, `submit` reads a claim.

Text in, text out. The loop makes the worktree, checks the diff and does everything after.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specpilot.memory import Preconditions
from specpilot.memory.records import NAME

from .base import AgentError, ClaimDraft, ComponentGap

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no commit message can hold, and what a terminal obeys."""

CLAIM_KEYS = ("component", "hypothesis", "predicted_gain", "counters", "forbidden_counters")
DEEPEST = 8
"""Levels of a claim file; its own deepest value, a precondition's list, is at the fourth."""
MECHANISM_KEYS = ("name", "title", "requires", "preconditions", "notes")


@dataclass(frozen=True)
class MechanismDraft:
    """How the submitter wants the change to be remembered if it is accepted."""

    name: str
    title: str
    requires: tuple[str, ...] = ()
    preconditions: Preconditions | None = None
    notes: str = ""


@dataclass(frozen=True)
class Submission:
    """A parsed claim file."""

    claim: ClaimDraft
    remember: MechanismDraft | None = None


def render_brief(
    *,
    attempt_id: str,
    run: str,
    worktree: Path,
    task: str,
    component: str,
    gaps: Iterable[ComponentGap],
    round_ms: float,
    editable: Iterable[str],
    excluded: Iterable[str] = (),
    merged: Iterable[str] = (),
    failed: Iterable[str] = (),
    known_counters: Iterable[str] = (),
) -> str:
    """The brief of one attempt as plain text. `failed`: what was tried before and how it ended, one line each."""
    lines = [
        f"Attempt {attempt_id} of run {run}",
        f"Component: {component}",
        f"Task: {task}",
        f"Your worktree: {worktree}",
        "",
        f"Where the time goes (milliseconds per decode round; the round takes {round_ms:.2f}):",
        f"  {'component':<18}{'measured':>10}{'bound':>10}{'wasted':>10}  {'gain if closed':>14}  limit",
    ]
    lines += [
        f"  {gap.component:<18}{gap.measured_ms:>10.2f}{gap.bound_ms:>10.2f}{gap.recoverable_ms:>10.2f}"
        f"  {gap.expected_gain:>13.2f}x  {gap.limit}"
        for gap in gaps
    ]
    lines += ["", "In the engine already: " + (", ".join(merged) or "nothing beyond stock")]
    tried = list(failed)
    if tried:
        lines += ["Tried before, and how it ended:", *(f"  {line}" for line in tried)]
    lines += [
        "",
        "Rules",
        f"  Edit only: {', '.join(editable)}" + (f"; never: {', '.join(excluded)}" if list(excluded) else ""),
        "  The engine must emit exactly what the target model would: every token you emit is forced through the",
        "  unchanged reference, on prompts you have not seen and on the timed ones.",
        "  What you call faster must run: name counters that grow when your code runs, and fall back loudly, never silently.",
        f"  Counters that exist: {', '.join(known_counters) or 'see engine.toml'}. You may add some.",
        "  Timing is done by the evaluator, interleaved with the base on the same prompts. Nothing else counts.",
        "",
        "To submit: write a claim file and run",
        f"  specpilot attempt submit {run} {attempt_id} --claim claim.yaml",
        "Claim file:",
        *(f"  {line}" for line in claim_template(component).splitlines()),
    ]
    return "\n".join(lines) + "\n"


def claim_template(component: str) -> str:
    """A claim file to fill in; it parses as it is."""
    return (
        f'component: "{component}"\n'  # quoted: `*` alone is YAML for an alias
        "hypothesis: Why this is faster, in one or two sentences.\n"
        "predicted_gain: 1.10        # decode tokens/s, candidate over base; may be left out\n"
        "counters: []                # counters that must grow during the timed run\n"
        "forbidden_counters: []      # counters that must not grow, such as a fallback's\n"
        "remember:                   # optional: how memory keeps it if it is accepted\n"
        "  name: short-name\n"
        "  title: One line\n"
        "  requires: []              # mechanisms the patch builds on\n"
        "  notes: ''\n"
    )


def parse_claim(source: Path | str) -> Submission:
    """Read a claim file (a Path) or its text. Raises AgentError naming the key that is wrong and the nearest known one."""
    where = str(source) if isinstance(source, Path) else "claim"
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        _require_plain(text, where)
        body = yaml.safe_load(text)
        json.dumps(body, default=str, ensure_ascii=False).encode()  # half a character, written as an escape
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # text, dates and depths that cannot be read
        raise AgentError(f"cannot read {where}: {error}") from error
    body = _mapping(body, where, (*CLAIM_KEYS, "remember"))
    claim = ClaimDraft(
        component=_text(body, "component", where),
        hypothesis=_text(body, "hypothesis", where),
        predicted_gain=_gain(body.get("predicted_gain"), where),
        counters=_names(body, "counters", where),
        forbidden_counters=_names(body, "forbidden_counters", where),
    )
    both = set(claim.counters) & set(claim.forbidden_counters)
    if both:
        raise AgentError(f"{where}: {', '.join(sorted(both))} cannot both grow and not grow")
    return Submission(claim, _remember(body.get("remember"), where))


def _require_plain(text: str, where: str) -> None:
    """Refuses what a claim has no use for, before it is built: ten lines of aliases fill any memory, a page of brackets any hour."""
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise AgentError(
                f"cannot read {where}: it holds aliases (*name)", "write the values out, a lone '*' in quotes"
            )
        if depth > DEEPEST:
            raise AgentError(f"cannot read {where}: values inside values, more than {DEEPEST} deep", "see the brief")


def _remember(value: Any, where: str) -> MechanismDraft | None:
    if value is None:
        return None
    where = f"{where}: remember"
    body = _mapping(value, where, MECHANISM_KEYS)
    name = _text(body, "name", where)
    if not NAME.fullmatch(name):
        raise AgentError(
            f"{where}.name: {name!r} is not a name", "lower-case letters, digits, '-', '_', '.', at most 64"
        )
    preconditions = None
    if body.get("preconditions") is not None:
        try:
            preconditions = Preconditions.model_validate(body["preconditions"])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise AgentError(f"{where}.preconditions.{key}: {first['msg']}", "see docs/memory.md") from error
    requires = _names(body, "requires", where)
    if name in requires:
        raise AgentError(f"{where}: {name} cannot require itself")
    notes = body.get("notes") or ""
    return MechanismDraft(
        name=name,
        title=_text(body, "title", where),
        requires=requires,
        preconditions=preconditions,
        notes=str(notes),
    )


def _mapping(value: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise AgentError(
            f"{where}: expected 'key: value' lines, found {type(value).__name__}", f"keys: {', '.join(known)}"
        )
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise AgentError(
                f"{where}: unknown key {key!r}", f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            )
    return value


def _text(body: dict[str, Any], key: str, where: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value.strip() or _UNPRINTABLE.search(value):
        raise AgentError(f"{where}: {key} must be a line of text, not {value!r}")
    return value.strip()


def _names(body: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = body.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(item, str) and item and not _UNPRINTABLE.search(item) for item in value
    ):
        raise AgentError(f"{where}: {key} must be a list of names, not {value!r}")
    return tuple(value)


def _gain(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise AgentError(f"{where}: predicted_gain must be a ratio such as 1.10, not {str(value)[:40]}")
    return float(value)
