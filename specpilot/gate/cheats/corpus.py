"""Reading, choosing and planting the corpus. Writes only into the worktree it is given; runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import Field

from specpilot.contracts import Claim, Reason, Record
from specpilot.errors import UsageError

CORPUS = Path(__file__).parent / "files"
MODULE = "slim_engine/turbo.py"
HOOKED = "slim_engine/server.py"
HOOK = "from slim_engine import turbo  # noqa: F401\n\n\n"
MAIN = re.compile(r"^if __name__ == ", re.MULTILINE)


class Stage(StrEnum):
    """Dearest evidence a cheat needs before it can be caught."""

    diff = "diff"
    """Its diff alone; nothing is started."""
    start = "start"
    """Its process, before the first request."""
    timed = "timed"
    """Timed answers at concurrency 1."""
    hidden = "hidden"
    """Hidden answers at a higher concurrency."""
    natural = "natural"
    """Answers that may stop by themselves."""
    replay = "replay"
    """A repeated prompt."""
    sampled = "sampled"
    """Answers at temperature above 0."""


class Edit(Record):
    """One further change of the tree: `content` replaces the file, or every match of `pattern` (lines) is replaced by `by`."""

    path: str
    content: str | None = None
    pattern: str | None = None
    by: str = ""


class Cheat(Record):
    """One planted cheat."""

    id: str
    rows: list[str]
    """Rows of the list of known cheats that it stands for."""
    does: str
    """What it does, in one sentence."""
    expects: list[Reason]
    """Any of these reasons is right."""
    stage: Stage
    needs: list[str] = Field(default_factory=list)
    """`speculation`: only with a drafter; `acceptance`: only if the base accepts drafts; `sampling`: only at temperature above 0; `floor`: only with a time floor."""
    quick: bool = False
    """Part of the quick selection."""
    claim: Claim
    module: str = ""
    """Code of the planted module; empty if the edits are all."""
    edits: list[Edit] = Field(default_factory=list)


def load_cheats(folder: Path = CORPUS) -> list[Cheat]:
    """The whole corpus, by file name. Raises UsageError for a file whose name is not its id."""
    cheats = []
    for path in sorted(folder.glob("*.yaml")):
        cheat = Cheat.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        if cheat.id != path.stem:
            raise UsageError(f"{path}: id is {cheat.id!r}", "name the file after its id.")
        cheats.append(cheat)
    return cheats


def select(
    cheats: Sequence[Cheat],
    which: str | Iterable[str] = "quick",
    *,
    speculation: bool = True,
    acceptance: bool = True,
    sampling: bool = False,
    floor: bool = False,
) -> list[Cheat]:
    """Cheats of a selection that can show themselves under this deployment.

    `which`: `all`, `quick`, `none`, or ids (taken as they are). Raises UsageError for an unknown id.
    """
    if isinstance(which, str) and which not in ("all", "quick", "none"):
        which = [which]
    if not isinstance(which, str):
        known = {cheat.id: cheat for cheat in cheats}
        unknown = [name for name in which if name not in known]
        if unknown:
            raise UsageError(f"no planted cheat {', '.join(unknown)}", f"known: {', '.join(known)}.")
        return [known[name] for name in which]
    present = {"speculation": speculation, "acceptance": acceptance, "sampling": sampling, "floor": floor}
    able = [cheat for cheat in cheats if all(present[need] for need in cheat.needs)]
    if which == "none":
        return []
    # A deployment that samples has few exact tests of single tokens: its own cheats are always in.
    return able if which == "all" else [cheat for cheat in able if cheat.quick or "sampling" in cheat.needs]


def plant(cheat: Cheat, tree: Path) -> None:
    """Write a cheat into a worktree of the stock tree: its module, the import that arms it, and its edits.

    Raises UsageError when the tree does not have the places it needs.
    """
    if cheat.module:
        server = tree / HOOKED
        text = server.read_text(encoding="utf-8")
        found = MAIN.search(text)
        if found is None:
            raise UsageError(
                f"{server} has no `if __name__ ==` line to arm a cheat before", "see specpilot/gate/cheats."
            )
        server.write_text(text[: found.start()] + HOOK + text[found.start() :], encoding="utf-8")
        (tree / MODULE).write_text(cheat.module, encoding="utf-8")
    for edit in cheat.edits:
        _edit(edit, tree)


def _edit(edit: Edit, tree: Path) -> None:
    path = tree / edit.path
    if edit.content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edit.content, encoding="utf-8")
        return
    text, count = re.subn(edit.pattern or "", edit.by, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count == 0:
        raise UsageError(
            f"{path} has no line like {edit.pattern!r}", "the planted cheat no longer fits the engine tree."
        )
    path.write_text(text, encoding="utf-8")
