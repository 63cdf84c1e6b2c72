"""What a worker may not do to the run-owned repository: leave its tree, or have git see other objects and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot.agents import DoesNotApplyError, PatchEdit
from specpilot.errors import TamperedEvidenceError, UsageError
from specpilot.workspace import UnsafeChange, Workspace
from tests.specpilot.workspace.conftest import git


@pytest.mark.parametrize("target", ["../../outside", "/etc/passwd", ".git/config", "src/../../x"])
def test_patches_cannot_write_outside(run: Workspace, target: str) -> None:
    tree = run.worktree("w", run.first_commit)
    patch = (
        f"diff --git a/{target} b/{target}\nnew file mode 100644\n--- /dev/null\n+++ b/{target}\n@@ -0,0 +1 @@\n+evil\n"
    )
    with pytest.raises(DoesNotApplyError):
        PatchEdit(patch).apply(tree)
    assert not git(tree, "status", "--porcelain").strip()


# -- refused changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../x", "../.git/config", "src/../../x"])
def test_links_that_leave_the_tree_are_refused(run: Workspace, target: str) -> None:
    path = run.worktree("w", run.first_commit)
    (path / "src/link").symlink_to(target)
    with pytest.raises(UnsafeChange, match="src/link is a symbolic link"):
        run.commit_all("w", "evil")
    assert run.head("w") == run.first_commit
    git(path, "-c", "user.name=x", "-c", "user.email=x@x", "add", "-A")
    git(path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "by the worker itself")
    assert "src/link" in run.unsafe_changes(run.first_commit, run.head("w"))[0]
    assert run.merge(run.first_commit, run.head("w"), run.first_commit, "merge").commit is None


def test_links_inside_the_tree_are_fine(run: Workspace) -> None:
    path = run.worktree("w", run.first_commit)
    (path / "src/link").symlink_to("../tunables.toml")
    assert run.unsafe_changes(run.first_commit, run.commit_all("w", "link")) == []


def test_submodules_are_refused(run: Workspace) -> None:
    path = run.worktree("w", run.first_commit)
    git(path, "update-index", "--add", "--cacheinfo", f"160000,{run.first_commit},sub")
    (path / "sub").mkdir()
    git(path / "sub", "init", "-q")
    git(path / "sub", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "--allow-empty", "-m", "x")
    with pytest.raises(UnsafeChange, match="sub is a submodule"):
        run.commit_all("w", "evil")


def test_a_source_tree_with_a_link_out_is_refused(tmp_path: Path, tree: Path) -> None:
    (tree / "src/out").symlink_to("/etc")
    with pytest.raises(UsageError, match="leaves the engine tree"):
        Workspace.create(tmp_path / "r", tree)


# -- tampering


def test_serving_restores_a_file_that_the_index_hides(run: Workspace) -> None:
    tree = run.checkout("serve", run.first_commit)
    was = (tree / "src/a.py").read_text()
    for flag in ("--skip-worktree", "--assume-unchanged"):
        (tree / "src/a.py").write_text("evil\n")
        git(tree, "update-index", flag, "src/a.py")
        run.checkout("serve", run.first_commit)
        assert (tree / "src/a.py").read_text() == was
    assert not git(tree, "status", "--porcelain").strip()


def test_replaced_objects_are_not_believed(run: Workspace, tmp_path: Path) -> None:
    blob = git(run.repo, "rev-parse", "HEAD:src/a.py").strip()
    (tmp_path / "evil").write_text("evil\n")
    git(run.repo, "replace", blob, git(run.repo, "hash-object", "-w", str(tmp_path / "evil")).strip())
    run.export_tree(run.first_commit, tmp_path / "out")
    assert (tmp_path / "out/src/a.py").read_text().startswith("line 0")


@pytest.mark.parametrize("key", ["filter.x.smudge", "include.path", "core.fsmonitor", "diff.x.textconv"])
def test_a_repository_with_strange_settings_is_not_used(run: Workspace, tmp_path: Path, key: str) -> None:
    git(run.repo, "config", key, f"touch {tmp_path / 'ran'}; cat")
    for act in (lambda: Workspace.open(run.run_dir), lambda: run.export_tree(run.first_commit, tmp_path / "out")):
        with pytest.raises(TamperedEvidenceError, match="did not write"):
            act()
    assert not (tmp_path / "ran").exists()


def test_a_repository_with_strange_attributes_is_not_used(run: Workspace) -> None:
    (run.repo / ".git/info/attributes").write_text("*.py filter=x\n")
    with pytest.raises(TamperedEvidenceError, match="info/attributes"):
        run.diff(run.first_commit, run.first_commit)


def test_a_worktree_that_points_at_another_repository_is_refused(run: Workspace, tmp_path: Path) -> None:
    """Its config would name programs that git runs for us, outside every sandbox."""
    tree = run.worktree("w", run.first_commit)
    evil = tmp_path / "evil"
    git(tmp_path, "init", "-q", str(evil))
    git(evil, "config", "filter.x.clean", f"touch {tmp_path / 'ran'}; cat")
    (tree / ".gitattributes").write_text("* filter=x\n")
    (tree / ".git").write_text(f"gitdir: {evil / '.git'}\n")
    with pytest.raises(UnsafeChange, match="points at") as caught:
        run.commit_all("w", "Take over")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "ran").exists()
