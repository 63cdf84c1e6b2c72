"""The run-owned repository: parallel writers, merges, crashes, full disks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specpilot.agents import PatchEdit
from specpilot.errors import MissingToolError, RunFolderError, UsageError
from specpilot.git import GitError, git_environment
from specpilot.workspace import BEST, Workspace
from tests.specpilot.workspace.conftest import git


def edit(run: Workspace, name: str, path: str, old: str, new: str) -> str:
    """One change on a fresh worktree at the first commit; returns the commit."""
    file = run.worktree(name, run.first_commit) / path
    file.write_text(file.read_text().replace(old, new))
    return run.commit_all(name, f"Change {path}")


def dirty(run: Workspace, name: str) -> bool:
    return bool(git(run.worktrees / name, "status", "--porcelain").strip())


def changed(run: Workspace, base: str, commit: str) -> list[str]:
    return git(run.repo, "diff", "--name-only", "--no-renames", base, commit).split()


def test_the_first_commit_holds_the_tree_and_nothing_else(run: Workspace, tree: Path) -> None:
    names = git(run.repo, "ls-tree", "-r", "--name-only", run.first_commit).split()
    assert names == [".gitignore", "engine.toml", "ignored.bin", "src/a.py", "src/dos.txt", "tunables.toml"]
    assert git(run.repo, "log", "--format=%an").split() == ["SpecPilot"]
    assert run.best() == run.first_commit == Workspace.open(run.run_dir).first_commit
    assert run.read(run.first_commit, "tunables.toml") == "rows = 4\n"


def test_extra_files_are_part_of_the_first_commit(tmp_path: Path, tree: Path) -> None:
    run = Workspace.create(tmp_path / "r2", tree, {"tunables.toml": "rows = 8\n"})
    assert run.read(run.first_commit, "tunables.toml") == "rows = 8\n"
    assert (tree / "tunables.toml").read_text() == "rows = 4\n", "the source is not touched"
    with pytest.raises(UsageError):
        Workspace.create(tmp_path / "r3", tree, {"../escape": "x"})


def test_settings_and_hooks_of_the_user_have_no_effect(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(
        f"[core]\n hooksPath = {hooks}\n autocrlf = true\n[user]\n name = Somebody\n[commit]\n gpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    run = Workspace.create(tmp_path / "run", tree)
    monkeypatch.delenv("GIT_DIR")
    assert git(run.repo, "log", "--format=%an <%ae>").strip() == "SpecPilot <specpilot@localhost>"
    commit = edit(run, "w", "src/a.py", "line 3\n", "three\n")
    assert commit != run.first_commit


def test_create_twice_is_refused_and_a_half_made_one_is_made_again(run: Workspace, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        Workspace.create(run.run_dir, tree)
    half = tmp_path / "crashed/repo.part"
    half.mkdir(parents=True)
    (half / "rubbish").write_text("x")
    made = Workspace.create(tmp_path / "crashed", tree)
    assert "rubbish" not in git(made.repo, "ls-tree", "--name-only", made.first_commit)


def test_worktrees_start_from_the_commit_given_not_from_a_sibling(run: Workspace) -> None:
    first = edit(run, "one", "src/a.py", "line 3\n", "three\n")
    path = run.worktree("two", run.first_commit)
    assert "line 3\n" in (path / "src/a.py").read_text()
    assert git(path, "rev-parse", "--abbrev-ref", "HEAD").strip() == "specpilot/two"
    (path / "new.txt").write_text("kept")
    assert run.worktree("two", first) == path and (path / "new.txt").exists(), "one that exists is left alone"
    assert dirty(run, "two") and not dirty(run, "one")
    assert run.head("one") == first


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-f", "a b", "x\n"])
def test_names_that_are_no_worktree_names(run: Workspace, name: str) -> None:
    with pytest.raises(UsageError):
        run.worktree(name, run.first_commit)


def test_eight_threads_commit_at_once_and_nothing_is_lost(run: Workspace) -> None:
    def work(index: int) -> list[str]:
        commits = []
        for turn in range(3):
            path = run.worktree(f"w{index}", run.first_commit)
            (path / f"src/new{index}.py").write_text(f"turn = {turn}\n")
            commits.append(run.commit_all(f"w{index}", f"turn {turn}"))
        return commits

    with ThreadPoolExecutor(8) as pool:
        all_commits = list(pool.map(work, range(8)))
    for index, commits in enumerate(all_commits):
        assert run.read(commits[-1], f"src/new{index}.py") == "turn = 2\n"
        assert changed(run, run.first_commit, commits[-1]) == [f"src/new{index}.py"]
        assert git(run.repo, "rev-list", "--count", f"{run.first_commit}..{commits[-1]}").strip() == "3"
    git(run.repo, "fsck", "--strict")


def test_two_workspaces_of_one_run_take_turns(run: Workspace) -> None:
    other = Workspace.open(run.run_dir, recover=False)  # as another process would
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(edit, w, f"{n}{i}", "src/a.py", "line 1\n", f"{n}{i}\n")
            for i in range(4)
            for n, w in (("a", run), ("b", other))
        ]
        assert len({job.result() for job in jobs}) == 8


def test_locks_of_a_killed_git_are_removed_at_open(run: Workspace) -> None:
    run.worktree("w", run.first_commit)
    locks = [
        run.repo / ".git/index.lock",
        run.repo / ".git/worktrees/w/index.lock",
        run.repo / ".git/refs/heads/specpilot/best.lock",
    ]
    for lock in locks:
        lock.touch()
    with pytest.raises(GitError):
        (run.worktrees / "w/src/a.py").write_text("x")
        run.commit_all("w", "blocked")
    assert Workspace.open(run.run_dir, recover=False) and locks[0].exists(), "an outsider does not clean"
    again = Workspace.open(run.run_dir)
    assert not any(lock.exists() for lock in locks)
    assert again.commit_all("w", "free") != run.first_commit


def test_a_worktree_folder_that_vanished_or_is_half_made_is_made_again(run: Workspace) -> None:
    commit = edit(run, "w", "src/a.py", "line 3\n", "three\n")
    subprocess.run(["rm", "-rf", str(run.worktrees / "w")], check=True)
    assert run.head(run.worktree("w", run.first_commit).name) == commit, "its branch goes on"
    (run.worktrees / "half").mkdir()
    (run.worktrees / "half/left.txt").write_text("x")
    path = run.worktree("half", run.first_commit)
    assert (path / "src/a.py").exists() and not (path / "left.txt").exists()
    assert any(run.saved.glob("half-*.folder/left.txt")), "what stood there is kept"


@pytest.mark.parametrize("folder_left", [True, False])
def test_a_worktree_whose_making_was_killed_is_made_again(run: Workspace, folder_left: bool) -> None:
    path = run.worktree("w", run.first_commit)
    (run.repo / ".git/worktrees/w/locked").write_text("initializing")  # what git leaves there when it is killed
    (path / "src/a.py").unlink()
    if not folder_left:
        shutil.rmtree(path)
    again = Workspace.open(run.run_dir)
    assert again.worktree("w", run.first_commit) == path and (path / "src/a.py").is_file()
    assert again.commit_all("w", "nothing changed") == run.first_commit
    (run.repo / ".git/worktrees/w/locked").write_text("initializing")
    assert (again.checkout("w", run.first_commit) / "src/a.py").is_file()
    again.remove("w")


def test_diff_round_trips_binary_crlf_modes_and_deletions(run: Workspace) -> None:
    path = run.worktree("w", run.first_commit)
    (path / "src/blob.bin").write_bytes(bytes(range(256)) * 20)
    (path / "src/dos.txt").write_bytes(b"one\r\nTWO\r\n")
    (path / "src/a.py").unlink()
    (path / "run.sh").write_text("#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    (path / "src/latin.txt").write_bytes(b"caf\xe9\n")
    commit = run.commit_all("w", "many things")
    same = run.merge(run.first_commit, commit, run.first_commit, "again").commit
    assert same is not None and run.diff(commit, same) == ""
    assert changed(run, run.first_commit, same) == [
        "run.sh",
        "src/a.py",
        "src/blob.bin",
        "src/dos.txt",
        "src/latin.txt",
    ]


def test_commit_all_without_changes_returns_the_head(run: Workspace) -> None:
    run.worktree("w", run.first_commit)
    assert run.commit_all("w", "nothing") == run.first_commit


def test_commits_of_a_worker_that_left_its_branch_are_kept(run: Workspace) -> None:
    path = run.worktree("w", run.first_commit)
    git(path, "checkout", "-q", "--detach")
    (path / "src/a.py").write_text("x\n")
    commit = run.commit_all("w", "detached")
    assert git(run.repo, "rev-parse", "specpilot/w").strip() == commit


def test_checkout_is_exact(run: Workspace) -> None:
    commit = edit(run, "w", "src/a.py", "line 3\n", "three\n")
    path = run.tree_at(commit)
    assert run.tree_at(commit) == path
    (path / "src/a.py").write_text("tampered")
    (path / "ignored.bin").write_bytes(b"tampered")
    (path / "evil.pth").write_text("import evil")
    (path / "src/__pycache__").mkdir()
    (path / "src/__pycache__/a.pyc").write_bytes(b"stale")
    assert run.tree_at(commit) == path
    assert "three\n" in (path / "src/a.py").read_text() and b"tampered" not in (path / "ignored.bin").read_bytes()
    assert not (path / "evil.pth").exists() and not (path / "src/__pycache__").exists()
    assert "evil.pth" in next(run.saved.glob("at-*.patch")).read_text()


# -- merging --------------------------------------------------------------------------------------------------


def test_changes_of_two_workers_are_merged(run: Workspace) -> None:
    one = edit(run, "one", "src/a.py", "line 3\n", "three\n")
    two = edit(run, "two", "src/a.py", "line 25\n", "twenty-five\n")
    merged = run.merge(one, two, run.first_commit, "merge")
    assert merged.commit is not None and merged.conflict == ""
    text = run.read(merged.commit, "src/a.py")
    assert "three\n" in text and "twenty-five\n" in text
    assert git(run.repo, "rev-parse", f"{merged.commit}^").strip() == one
    run.set_head(merged.commit)
    assert run.best() == merged.commit and git(run.repo, "rev-parse", BEST).strip() == merged.commit


def test_three_way_merge_finds_shifted_places(run: Workspace) -> None:
    top = run.worktree("one", run.first_commit) / "src/a.py"
    top.write_text("".join(f"new {i}\n" for i in range(40)) + top.read_text())
    one = run.commit_all("one", "longer")
    two = edit(run, "two", "src/a.py", "line 25\n", "twenty-five\n")
    merged = run.merge(one, two, run.first_commit, "merge")
    assert merged.commit is not None and run.read(merged.commit, "src/a.py").count("new") == 40


def test_a_conflict_is_a_result_and_leaves_a_clean_tree(run: Workspace) -> None:
    one = edit(run, "one", "src/a.py", "line 3\n", "three\n")
    two = edit(run, "two", "src/a.py", "line 3\n", "drei\n")
    merged = run.merge(one, two, run.first_commit, "merge")
    assert merged.commit is None and "src/a.py" in merged.conflict
    assert not dirty(run, "merge") and run.head("merge") == one
    assert "<<<<" not in (run.worktrees / "merge/src/a.py").read_text()
    third = edit(run, "three", "src/a.py", "line 20\n", "twenty\n")
    assert run.merge(one, third, run.first_commit, "merge").commit is not None, "the name can be used again"


def test_merging_what_is_there_already_changes_nothing(run: Workspace) -> None:
    one = edit(run, "one", "src/a.py", "line 3\n", "three\n")
    assert run.merge(one, one, run.first_commit, "merge").commit == one
    assert run.merge(one, run.first_commit, run.first_commit, "merge").commit == one


# -- leaving --------------------------------------------------------------------------------------------------


def test_a_dirty_worktree_is_saved_before_it_goes(run: Workspace) -> None:
    path = run.worktree("w", run.first_commit)
    (path / "src/a.py").write_text("unsaved work\n")
    (path / "src/new.py").write_text("more\n")
    run.remove("w")
    assert not path.exists()
    patch = next(run.saved.glob("w-*.patch")).read_text()
    PatchEdit(patch).apply(run.worktree("again", run.first_commit))
    assert (run.worktrees / "again/src/a.py").read_text() == "unsaved work\n"
    run.remove("w")  # gone already: no error


def test_prune_unknown(run: Workspace) -> None:
    for name in ("keep", "drop1", "drop2"):
        run.worktree(name, run.first_commit)
    (run.worktrees / "drop1/src/a.py").write_text("dirty")
    (run.worktrees / "stray").mkdir()
    assert run.prune_unknown({"keep"}) == ["drop1", "drop2", "stray"]
    assert [p.name for p in run.worktrees.iterdir()] == ["keep"]
    assert len(list(run.saved.glob("drop1-*.patch"))) == 1
    assert git(run.repo, "worktree", "list").count("\n") == 2
    assert run.prune_unknown({"keep"}) == []


def test_export_tree(run: Workspace, tmp_path: Path) -> None:
    commit = edit(run, "w", "src/a.py", "line 3\n", "three\n")
    run.export_tree(commit, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        ".gitignore",
        "engine.toml",
        "ignored.bin",
        "src",
        "tunables.toml",
    ]
    assert "three\n" in (tmp_path / "out/src/a.py").read_text()
    assert not dirty(run, "w") and git(run.repo, "status", "--porcelain") == ""


# -- wrong inputs -----------------------------------------------------------------------------------------------


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tree: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match="git is not installed") as caught:
        Workspace.create(tmp_path / "r", tree)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "r").exists()


def test_no_repository_and_a_damaged_one(run: Workspace, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no repository"):
        Workspace.open(tmp_path)
    (run.repo / ".git/HEAD").unlink()
    with pytest.raises(RunFolderError, match="damaged"):
        Workspace.open(run.run_dir)


def test_unknown_revisions_are_named(run: Workspace) -> None:
    for wrong in ("deadbeef", "--output=/tmp/x", "specpilot/none"):
        with pytest.raises(GitError):
            run.resolve(wrong)
    with pytest.raises(GitError):
        run.read(run.first_commit, "nothing.py")
    with pytest.raises(RunFolderError, match="no worktree 'zz'"):
        run.commit_all("zz", "x")


def test_git_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.setenv("GIT_INDEX_FILE", "/x")
    assert not {"OPENAI_API_KEY", "GIT_INDEX_FILE"} & git_environment().keys()
    assert os.environ["OPENAI_API_KEY"] == "x"


# -- a full disk --------------------------------------------------------------------------------------------------

FULL = """
    import os, sys
    from pathlib import Path
    from specpilot.errors import DiskFullError
    from specpilot.journal import Journal
    from specpilot.workspace import Workspace
    disk, tree = Path(sys.argv[1]), Path(sys.argv[2])
    run = Workspace.create(disk / "run", tree)
    journal = Journal.create(disk / "run/journal.db", {})
    work = run.worktree("w", run.first_commit)
    journal.step("before", lambda: 1)
    try:
        (work / "filler").write_bytes(os.urandom(10_000_000))
    except OSError:
        pass
    attempts = {
        "commit": lambda: run.commit_all("w", "x"),
        "worktree": lambda: run.worktree("v", run.first_commit),
        "event": lambda: [journal.event("x", {"text": "y" * 4000}) for _ in range(200)],
        "create": lambda: Workspace.create(disk / "other", tree),
        "journal": lambda: Journal.create(disk / "third/journal.db", {}),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            print(name, "did not fail")
        except DiskFullError as error:
            print(name, error.exit_code)
    (work / "filler").unlink()
    assert journal.result("before") == 1 and journal.event("after")
    assert run.commit_all("w", "x") == run.first_commit
    print("and went on")
"""


def test_a_full_disk_is_named_and_work_goes_on_after_it(tmp_path: Path, tree: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    inner = f"mount -t tmpfs -o size=3m tmpfs {disk} && exec {sys.executable} - {disk} {tree}"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, f"mount -t tmpfs tmpfs {disk}"], check=False).returncode
    ):
        pytest.skip("cannot make a small disk here")
    done = subprocess.run([*mount, inner], input=textwrap.dedent(FULL), capture_output=True, text=True, check=False)
    expected = ["commit 3", "worktree 3", "event 3", "create 3", "journal 3", "and went on"]
    assert done.stdout.splitlines() == expected, done.stderr
