"""One git command: no hooks, no configuration of user or machine, no prompts, bounded in time, output in bytes.

Whoever may run several at once serialises the writing ones itself (`specpilot.workspace`). May import errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from specpilot.errors import MissingToolError, RunFolderError, SpecPilotError, TamperedEvidenceError

GIT_TIMEOUT_S = 120.0
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.autocrlf=false",
    "core.untrackedCache=false",
    "gc.auto=0",
    "commit.gpgSign=false",
    "user.name=SpecPilot",
    "user.email=specpilot@localhost",
    "protocol.allow=never",
    "submodule.recurse=false",
)


_OURS = {
    "[core]",
    "repositoryformatversion",
    "filemode",
    "bare",
    "logallrefupdates",
    "ignorecase",
    "precomposeunicode",
    "symlinks",
}
"""What `git init` writes into a repository's config, over the systems."""


class GitError(SpecPilotError):
    """Git refused something that should have worked."""

    exit_code = 5


def run_git(
    words: Sequence[str], cwd: Path, *, stdin: str = "", repository: Path | None = None, index: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in `cwd`; its return code is the caller's business. `index`: another index file, of `repository`.

    Raises `MissingToolError` without git, `RunFolderError` if `cwd` is gone, `GitError` if it takes too long.
    """
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    location = [f"--git-dir={repository / '.git'}"] if index and repository else []
    environment = git_environment() | ({"GIT_INDEX_FILE": str(index)} if index else {})
    try:
        done = subprocess.run(
            ["git", *settings, *location, *words],
            cwd=cwd,
            input=stdin.encode("utf-8", "surrogateescape"),
            capture_output=True,
            env=environment,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        if not cwd.is_dir():
            raise RunFolderError(f"{cwd} is gone", "somebody removed it; start a new run.") from error
        raise _no_git() from error
    except subprocess.TimeoutExpired as error:
        raise GitError(
            f"git {' '.join(words[:2])} did not end within {GIT_TIMEOUT_S:.0f} s in {cwd}", "is the disk well?"
        ) from error
    # Bytes, not text mode: that would turn CRLF into LF and spoil patches.
    stdout, stderr = (data.decode("utf-8", "surrogateescape") for data in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, stdout, stderr)


def git_environment() -> dict[str, str]:
    """Environment for git: no configuration of user or machine, no prompts, English messages."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR")}
    return kept | {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",  # `refs/replace` would put other content under a known digest
        "GIT_OPTIONAL_LOCKS": "0",  # `status` must not write an index that a worker is using
        "LC_ALL": "C",
    }


def require_plain(repository: Path) -> None:
    """Raises `TamperedEvidenceError` if a repository that we made has got settings or attributes that we did not give it.

    Both can name programs (filters, external diffs) that git would run for us, and that change what it reads and writes.
    """
    folder = repository / ".git"
    strange = "info/attributes" if (folder / "info/attributes").exists() else ""
    for line in (folder / "config").read_text("utf-8", "replace").splitlines() if (folder / "config").is_file() else []:
        words = line.partition("=")[0].strip().lower()
        if words and words not in _OURS:
            strange = strange or f"{words!r} in config"
    if strange:
        raise TamperedEvidenceError(
            f"{folder} holds {strange}, which SpecPilot did not write", "remove it if you know where it comes from."
        )


def need_git() -> None:
    """Raises `MissingToolError` if there is no git."""
    if shutil.which("git") is None:
        raise _no_git()


def _no_git() -> MissingToolError:
    return MissingToolError("git is not installed, or not on PATH", "install git 2.30 or newer (apt install git).")
