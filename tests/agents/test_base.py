"""Edits change exactly what they say, or nothing."""

from __future__ import annotations

import pytest

from specpilot.agents import DoesNotApplyError, FileEdit, PatchEdit

from .conftest import MODULE, git


def test_patch_changes_the_worktree(tree, patch):
    edit = PatchEdit(patch({"line_3 = 3\n": "line_3 = 33\n"}))
    assert edit.applies(tree) and (tree / "module.py").read_text() == MODULE
    assert edit.apply(tree) == ["module.py"]
    assert "line_3 = 33\n" in (tree / "module.py").read_text()


def test_patch_with_new_and_deleted_files(tree):
    (tree / "new file.py").write_text("x = 1\n")
    (tree / "module.py").unlink()
    git(tree, "add", "-A")
    diff = git(tree, "diff", "--cached")
    git(tree, "reset", "-q", "--hard")
    assert PatchEdit(diff).apply(tree) == ["module.py", "new file.py"]
    assert not (tree / "module.py").exists()


def test_patch_is_merged_where_the_tree_has_moved_on(tree, patch):
    edit = PatchEdit(patch({"line_20 = 20\n": "line_20 = 2020\n"}))
    text = MODULE.replace("line_18 = 18\n", "line_18 = 1818\n")
    (tree / "module.py").write_text(text)
    git(tree, "commit", "-qam", "moved")
    assert not edit.applies(tree)
    assert edit.apply(tree) == ["module.py"]
    assert (tree / "module.py").read_text() == text.replace("line_20 = 20\n", "line_20 = 2020\n")


def test_conflict_is_reported_in_gits_words_and_leaves_the_tree_clean(tree, patch):
    edit = PatchEdit(patch({"line_20 = 20\n": "line_20 = 2020\n"}))
    (tree / "module.py").write_text(MODULE.replace("line_20 = 20\n", "line_20 = 7\n"))
    git(tree, "commit", "-qam", "moved")
    with pytest.raises(DoesNotApplyError, match="patch failed: module.py"):
        edit.apply(tree)
    assert git(tree, "status", "--porcelain") == ""
    assert "line_20 = 7\n" in (tree / "module.py").read_text()


def test_conflict_in_a_dirty_tree_keeps_the_dirt(tree, patch):
    edit = PatchEdit(patch({"line_20 = 20\n": "line_20 = 2020\n"}))
    dirty = MODULE.replace("line_20 = 20\n", "line_20 = 7\n")
    (tree / "module.py").write_text(dirty)
    with pytest.raises(DoesNotApplyError):
        edit.apply(tree)
    assert (tree / "module.py").read_text() == dirty


@pytest.mark.parametrize(
    "text", ["", "garbage\n", "diff --git a/../evil b/../evil\n--- a/../evil\n+++ b/../evil\n@@ -0,0 +1 @@\n+x\n"]
)
def test_bad_patch(tree, text):
    with pytest.raises(DoesNotApplyError):
        PatchEdit(text).apply(tree)
    assert not (tree.parent / "evil").exists()


def test_file_edit_writes_and_deletes(tree):
    assert FileEdit({"a/b.py": "é\n", "module.py": None}).apply(tree) == ["a/b.py", "module.py"]
    assert (tree / "a" / "b.py").read_text(encoding="utf-8") == "é\n"
    assert not (tree / "module.py").exists()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".git/config", "link/x"])
def test_file_edit_stays_inside(tree, name):
    (tree / "link").symlink_to(tree.parent)
    with pytest.raises(DoesNotApplyError):
        FileEdit({"ok.py": "1", name: "x"}).apply(tree)
    assert not (tree / "ok.py").exists()
