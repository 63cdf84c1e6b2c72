"""The git repository that a run owns: the engine tree, its worktrees, diffs and merges.

The user's checkout and git configuration are never touched: the tree is copied, hooks and configuration of
the user and the machine are off. All git writes are serialised, between threads by a lock and between
processes by a file lock, because parallel workers that meet on `index.lock` lose work. A dirty worktree is
never removed before its patch is saved. May import contracts, engine_tree and errors.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import psutil

from specpilot.contracts import Record
from specpilot.engine_tree import load_engine_spec
from specpilot.errors import (
    DiskFullError,
    RunFolderError,
    SpecPilotError,
    UsageError,
    disk_full_named,
    nothing_free,
)
from specpilot.git import GitError, need_git, require_plain, run_git

BRANCH_PREFIX = "specpilot/"
BEST = BRANCH_PREFIX + "best"
_SKIPPED = {"__pycache__", ".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


class UnsafeChange(SpecPilotError):
    """A change holds a submodule, or a symbolic link that leaves the tree, or the worktree belongs to another repository."""

    exit_code = 2


class MergeResult(Record):
    """Outcome of `Workspace.merge`: the new commit, or None and what conflicted."""

    commit: str | None
    conflict: str = ""


class Workspace:
    """The repository `run_dir/repo`, its worktrees `run_dir/worktrees/<name>`, saved patches `run_dir/saved/`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        self.repo = self.run_dir / "repo"
        self.worktrees = self.run_dir / "worktrees"
        self.saved = self.run_dir / "saved"
        self._thread_lock = threading.RLock()
        self._depth = 0
        self.first_commit = ""

    # -- life ---------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, run_dir: Path, tree_source: Path, extra: Mapping[str, str] | None = None) -> Workspace:
        """Copy an engine tree into a new repository and commit it.

        `extra` maps paths in the tree to text written over the copy first (starting tunables). A repository
        that a crash left half made is made again. Raises `UsageError` for a bad tree, `RunFolderError` if there
        is a finished one already.
        """
        need_git()
        load_engine_spec(tree_source)
        _refuse_escaping_links(tree_source)
        workspace = cls(run_dir)
        if workspace.repo.exists():
            raise RunFolderError(f"{workspace.repo} exists already", "open it, or use another run folder.")
        scratch = workspace.run_dir / "repo.part"
        with disk_full_named(workspace.repo), workspace._writing():
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(tree_source, scratch, symlinks=True, ignore=_skip)
            for name, text in (extra or {}).items():
                path = scratch / _inside(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            workspace._git("init", "-q", "--initial-branch", "specpilot/first", cwd=scratch)
            (scratch / ".git/info/exclude").write_text("__pycache__/\n*.pyc\n", encoding="utf-8")
            workspace._git("add", "-A", "-f", cwd=scratch)
            workspace._git("commit", "-q", "--allow-empty", "-m", "Engine tree as the run found it", cwd=scratch)
            commit = workspace._git("rev-parse", "HEAD", cwd=scratch).strip()
            workspace._git("update-ref", "refs/specpilot/first", commit, cwd=scratch)
            workspace._git("branch", "-f", BEST, commit, cwd=scratch)
            scratch.rename(workspace.repo)
        workspace.first_commit = commit
        workspace.worktrees.mkdir(exist_ok=True)
        return workspace

    @classmethod
    def open(cls, run_dir: Path, *, recover: bool = True) -> Workspace:
        """The repository of an existing run. `recover` removes locks that a killed git left.

        Raises `RunFolderError` if there is none or it cannot be read.
        """
        need_git()
        workspace = cls(run_dir)
        if not (workspace.repo / ".git").is_dir():
            raise RunFolderError(f"{run_dir} has no repository", "the run ended before it began; start a new one.")
        if recover:
            workspace._remove_stale_locks()
        try:
            workspace.first_commit = workspace._git("rev-parse", "refs/specpilot/first").strip()
        except GitError as error:
            raise RunFolderError(f"{workspace.repo} is damaged: {error.message}", "start a new run.") from error
        return workspace

    # -- worktrees ----------------------------------------------------------------------------------------

    def worktree(self, name: str, commit: str) -> Path:
        """A worktree on branch `specpilot/<name>`, started at `commit`. One that exists is returned as it is."""
        path = self._path(name)
        with self._writing():
            if self._complete(path):
                return path
            self._discard(path)
            branch = BRANCH_PREFIX + name
            if self._has_branch(branch):  # its folder is gone, its commits are not: go on from them
                self._git("worktree", "add", "-q", "-f", "-f", str(path), branch)
            else:
                self._git("worktree", "add", "-q", "-f", "-f", "-b", branch, str(path), commit)
        return path

    def checkout(self, name: str, commit: str) -> Path:
        """A worktree with exactly the files of `commit`, nothing else, for serving. Local changes are saved first."""
        path = self._path(name)
        with self._writing():
            if not self._complete(path):
                self._discard(path)
                self._git("worktree", "add", "-q", "-f", "-f", "--detach", str(path), commit)
            else:
                self._save_if_dirty(name)
                # Every file is written anew: an index can say of a changed file that git should not look at it.
                (_state(self._existing(name)) / "index").unlink(missing_ok=True)
                self._git("checkout", "-q", "--detach", "--force", commit, cwd=path)
                self._git("clean", "-ffdxq", cwd=path)
        return path

    def tree_at(self, commit: str) -> Path:
        """A folder with exactly the files of `commit`, shared by all who serve that commit."""
        full = self.resolve(commit)
        return self.checkout(f"at-{full[:16]}", full)

    def head(self, name: str) -> str:
        """Commit that a worktree stands on."""
        return self._git("rev-parse", "HEAD", cwd=self._existing(name)).strip()

    def commit_all(self, name: str, message: str) -> str:
        """Commit everything in a worktree; returns its head (the old one if nothing changed).

        Raises `UnsafeChange` for submodules and links that leave the tree; nothing is committed then.
        """
        path = self._existing(name)
        with self._writing():
            self._git("add", "-A", cwd=path)
            unsafe = self._unsafe(self._git("diff", "--cached", "--raw", "-z", "--no-renames", "HEAD", cwd=path))
            if unsafe:
                self._git("reset", "-q", cwd=path)
                raise UnsafeChange(f"worktree {name}: {'; '.join(unsafe)}", "use plain files inside the tree.")
            if self._git("status", "--porcelain", cwd=path).strip():
                self._git("commit", "-q", "-m", message, cwd=path)
            commit = self._git("rev-parse", "HEAD", cwd=path).strip()
            # Whatever the worker did to HEAD, the branch keeps its commit from being lost.
            self._git("update-ref", f"refs/heads/{BRANCH_PREFIX}{name}", commit)
        return commit

    def remove(self, name: str) -> None:
        """Remove a worktree; a dirty one's patch is saved to `saved/` first. Its branch stays."""
        path = self._path(name)
        with self._writing():
            if path.exists():
                if (path / ".git").is_file() and self._registered(path):
                    self._save_if_dirty(name)
                    self._git("worktree", "remove", "--force", "--force", str(path))
                else:
                    self._discard(path)
            self._git("worktree", "prune")

    def prune_unknown(self, known: set[str]) -> list[str]:
        """Remove every worktree whose name is not in `known` (dirty ones are saved); returns the names.

        Raises `DiskFullError` at the end for those whose work there is no room to save; the others are gone then.
        """
        names = (
            sorted(path.name for path in self.worktrees.iterdir() if path.is_dir()) if self.worktrees.is_dir() else []
        )
        gone = [name for name in names if name not in known]
        full: DiskFullError | None = None
        for name in gone:
            try:
                self.remove(name)
            except DiskFullError as error:
                full = error
        with self._writing():
            self._git("worktree", "prune")
        if full is not None:
            raise full
        return gone

    # -- commits ------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> str:
        """Full id of a commit. Raises `GitError` if there is none."""
        return self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()

    def best(self) -> str:
        """Commit of the branch `specpilot/best`."""
        return self.resolve(f"refs/heads/{BEST}")

    def set_head(self, commit: str) -> None:
        """Move the branch `specpilot/best`."""
        with self._writing():
            self._git("update-ref", f"refs/heads/{BEST}", self.resolve(commit))

    def diff(self, base: str, commit: str) -> str:
        """The change from `base` to `commit` as a patch that `git apply` takes."""
        return self._git(*_DIFF, self.resolve(base), self.resolve(commit))

    def unsafe_changes(self, base: str, commit: str) -> list[str]:
        """Submodules and links that leave the tree among the changes, in words; empty if there is none."""
        return self._unsafe(
            self._git("diff", "--raw", "-z", "--no-renames", "--no-abbrev", self.resolve(base), self.resolve(commit))
        )

    def read(self, commit: str, path: str) -> str:
        """Text of one file at a commit. Raises `GitError` if it is not there."""
        return self._git("show", "--no-textconv", f"{self.resolve(commit)}:{_inside(path)}")

    def export_tree(self, commit: str, destination: Path) -> None:
        """Write the files of a commit to a new folder."""
        with disk_full_named(destination):
            destination.mkdir(parents=True, exist_ok=False)
            index = destination / ".git-index"
            self._git(f"--work-tree={destination}", "read-tree", self.resolve(commit), index=index)
            self._git(f"--work-tree={destination}", "checkout-index", "-a", "-f", index=index)
            index.unlink(missing_ok=True)

    def merge(self, onto: str, commit: str, base: str, name: str) -> MergeResult:
        """Apply the change `base..commit` on top of `onto`, three-way, in a worktree `name`.

        A conflict is a result, not an error; the worktree then stands clean at `onto`.
        """
        if unsafe := self.unsafe_changes(base, commit):
            return MergeResult(commit=None, conflict="; ".join(unsafe))
        path = self.checkout(name, onto)
        patch = self.diff(base, commit)
        with self._writing():
            failure = self._apply(path, patch) if patch.strip() else ""
        if failure:
            if nothing_free(self.run_dir):  # no verdict on the change
                raise self._full()
            return MergeResult(commit=None, conflict=failure)
        subject = self._git("log", "-1", "--format=%s", self.resolve(commit)).strip()
        return MergeResult(commit=self.commit_all(name, f"Merge: {subject}"))

    # -- plumbing -----------------------------------------------------------------------------------------

    def _apply(self, path: Path, patch_text: str) -> str:
        """Empty if the patch went into a clean worktree, else git's words; it is then as it was."""
        before = self._git("write-tree", cwd=path).strip()
        done = self._run(["apply", "--3way", "--index", "--whitespace=nowarn", "-"], path, patch_text)
        if done.returncode == 0:
            return ""
        conflicted = self._git("diff", "--name-only", "--diff-filter=U", cwd=path).split()
        self._git("read-tree", "--reset", "-u", before, cwd=path)
        words = done.stderr.strip()[-2000:] or "git apply failed"
        return (f"conflict in {', '.join(conflicted)}: " if conflicted else "") + words

    def _unsafe(self, raw: str) -> list[str]:
        """Read `git diff --raw -z`; each entry is `:oldmode newmode oldid newid status` and a path."""
        fields = raw.split("\0")
        found = []
        for head, path in zip(fields[::2], fields[1::2], strict=False):
            mode, blob = head.split()[1], head.split()[3]
            if mode == "160000":
                found.append(f"{path} is a submodule")
            elif mode == "120000" and escapes(path, self._git("cat-file", "blob", blob)):
                found.append(f"{path} is a symbolic link that leaves the tree")
        return found

    def _path(self, name: str) -> Path:
        if not name or name.startswith((".", "-")) or not all(c.isalnum() or c in "._-" for c in name):
            raise UsageError(f"{name!r} cannot name a worktree", "use letters, digits, dot, dash and underscore.")
        return self.worktrees / name

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        pointer = path / ".git"
        if not pointer.is_file():
            raise RunFolderError(f"there is no worktree {name!r} in {self.worktrees}", "`specpilot attempt list RUN`.")
        # Whoever works there can make it point at a repository of their own, with filters that git would run for us.
        where = _state(path)
        if pointer.is_symlink() or where.parent != self.repo / ".git/worktrees" or not where.is_dir():
            raise UnsafeChange(f"worktree {name}: its .git points at {where}", "leave git's own files alone.")
        return path

    def _registered(self, path: Path) -> bool:
        return f"worktree {path}" in self._git("worktree", "list", "--porcelain").splitlines()

    def _complete(self, path: Path) -> bool:
        """True if a worktree stands there, whole. Git marks one that it is still making as locked, so one whose
        making was killed stays locked; taken for whole, its missing files would be committed as deleted."""
        if not (path / ".git").is_file() or not self._registered(path):
            return False
        state = _state(path)
        if (state / "index").is_file() and not (state / "locked").exists():
            return True
        self._git("worktree", "remove", "--force", "--force", str(path))
        return False

    def _has_branch(self, branch: str) -> bool:
        return self._run(["rev-parse", "-q", "--verify", f"refs/heads/{branch}"], self.repo).returncode == 0

    def _discard(self, path: Path) -> None:
        """Make room for a worktree: what stands there is none of ours (a crash left it half made), so it is moved."""
        self._git("worktree", "prune")
        if path.exists():
            self.saved.mkdir(exist_ok=True)
            path.rename(self.saved / f"{path.name}-{time.time_ns()}.folder")
            self._git("worktree", "prune")

    def _save_if_dirty(self, name: str) -> None:
        path = self._path(name)
        if not self._git("status", "--porcelain", cwd=path).strip():
            return
        if nothing_free(self.run_dir):  # what git adds before it fails would take the room that others just made
            raise self._full()
        self._git("add", "-A", cwd=path)
        patch = self._git(*_DIFF, "--cached", "HEAD", cwd=path)
        with disk_full_named(self.saved):
            self.saved.mkdir(exist_ok=True)
            target = self.saved / f"{name}-{time.time_ns()}.patch"
            try:
                target.write_bytes(patch.encode("utf-8", "surrogateescape"))
            except OSError:
                target.unlink(missing_ok=True)  # half a patch saves nothing
                raise

    def _remove_stale_locks(self) -> None:
        """Remove `*.lock` that a killed git left, unless a git process works below the run folder."""
        with self._writing():
            locks = list((self.repo / ".git").rglob("*.lock"))
            if locks and not self._git_at_work():
                for lock in locks:
                    lock.unlink(missing_ok=True)

    def _git_at_work(self) -> bool:
        for process in psutil.process_iter(["name", "cwd"]):
            cwd = process.info["cwd"]
            if process.info["name"] == "git" and cwd and Path(cwd).is_relative_to(self.run_dir):
                return True
        return False

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, over threads and processes. Re-entrant."""
        with self._thread_lock:
            if self._depth:
                yield
                return
            with disk_full_named(self.run_dir):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                file = (self.run_dir / "git.lock").open("w")
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1

    def _git(self, *words: str, cwd: Path | None = None, index: Path | None = None) -> str:
        done = self._run(words, cwd or self.repo, index=index)
        if done.returncode:
            said = done.stderr.strip()[-1000:]
            if "No space left" in said or "Disk quota" in said or nothing_free(self.run_dir):
                raise self._full()
            raise GitError(f"git {' '.join(words[:3])} failed in {cwd or self.repo}: {said}", "")
        return done.stdout

    def _full(self) -> DiskFullError:
        return DiskFullError(
            f"no space left on the disk that holds {self.run_dir}", "free some space, then `specpilot resume`."
        )

    def _run(
        self, words: Sequence[str], cwd: Path, stdin: str = "", index: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        require_plain(self.repo)
        return run_git(words, cwd, stdin=stdin, repository=self.repo, index=index)


_DIFF = ("diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames")


def _state(worktree: Path) -> Path:
    """Where git keeps the index and head of a worktree, as its `.git` file says."""
    return Path((worktree / ".git").read_text("utf-8", "replace").removeprefix("gitdir:").strip())


def _skip(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name in _SKIPPED or name.endswith(".pyc")}


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise UsageError(f"{name!r} is not a path inside the engine tree", "")
    return str(path)


def escapes(link: str, target: str) -> bool:
    """True if a link at `link` (relative to the tree) that holds `target` leads out of the tree.

    `..` counts only at the front: behind a name it could climb out of a folder that is itself a link.
    """
    parts = PurePosixPath(target).parts
    climbs = len(parts) - len([*itertools.dropwhile(lambda part: part == "..", parts)])
    if target.startswith("/") or ".." in parts[climbs:]:
        return True
    resolved = os.path.normpath(os.path.join(os.path.dirname(link), target))
    return resolved == ".." or resolved.startswith("../") or resolved.split("/")[0] == ".git"


def _refuse_escaping_links(tree: Path) -> None:
    for folder, names, files in os.walk(tree):
        names[:] = [name for name in names if name not in _SKIPPED]
        for name in names + files:
            path = Path(folder, name)
            if path.is_symlink() and escapes(str(path.relative_to(tree)), os.readlink(path)):
                raise UsageError(
                    f"{path} is a symbolic link that leaves the engine tree", "copy its target into the tree."
                )
