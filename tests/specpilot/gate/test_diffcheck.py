"""The static stage on real git repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specpilot.contracts import Reason
from specpilot.gate.diffcheck import check_diff, suspicions
from specpilot.gate.errors import EvidenceError
from specpilot.gate.records import GatePolicy


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    (tmp_path / "engine.toml").write_text("name = 'e'\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def editable(path: str) -> bool:
    return path.startswith("src/") or path == "engine.toml"


def verdict(repository: Path, policy: GatePolicy | None = None) -> tuple[bool, Reason | None, str]:
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "add", "-A", "-f")
    git(repository, "commit", "-q", "--allow-empty", "-m", "change")
    report = check_diff(repository, base, git(repository, "rev-parse", "HEAD"), editable, policy)
    return report.passed, report.reason, report.detail


def test_edit_add_delete_inside_pass(repository: Path) -> None:
    (repository / "src" / "a.py").unlink()
    (repository / "src" / "b c.py").write_text("y = 2\n")
    assert verdict(repository) == (True, None, "")


def test_nothing_changed(repository: Path) -> None:
    assert verdict(repository)[1] is Reason.empty_diff


@pytest.mark.parametrize(
    "path", ["tests.py", "engine.toml", ".gitattributes", "src/.gitattributes", "src/.gitmodules", "src.py/x"]
)
def test_outside_or_fixed_paths(repository: Path, path: str) -> None:
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_text("evil\n")
    passed, reason, detail = verdict(repository)
    assert (passed, reason) == (False, Reason.outside_editable)
    assert path in detail


def test_rename_out_of_the_editable_paths_counts_both_ends(repository: Path) -> None:
    (repository / "src" / "a.py").rename(repository / "a.py")
    assert verdict(repository)[1] is Reason.outside_editable


def test_links_may_stay_inside_only(repository: Path) -> None:
    (repository / "src" / "b.py").symlink_to("a.py")
    (repository / "src" / "up").symlink_to("..")
    assert verdict(repository)[0]
    # `up/..` is the tree's parent: a link may not climb behind a name, which may be a link itself.
    for target in ("/etc/passwd", "../../elsewhere", "../..", "up/..", "up/../..", "../.git/config"):
        link = repository / "src" / "out"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        passed, reason, detail = verdict(repository)
        assert (passed, reason) == (False, Reason.outside_editable), target
        assert "links out of the tree" in detail


def test_blobs_have_a_largest_size(repository: Path) -> None:
    policy = GatePolicy(max_binary_bytes=100, max_text_bytes=1000)
    (repository / "src" / "kernel.bin").write_bytes(b"\0" * 100)
    (repository / "src" / "table.py").write_text("#" * 1000)
    assert verdict(repository, policy)[0]
    (repository / "src" / "kernel.bin").write_bytes(b"\0" * 101)
    assert "kernel.bin (101 bytes)" in verdict(repository, policy)[2]
    (repository / "src" / "kernel.bin").write_bytes(b"\0")
    (repository / "src" / "table.py").write_text("#" * 1001)
    assert "table.py (1001 bytes)" in verdict(repository, policy)[2]


def test_text_attribute_does_not_hide_a_binary(repository: Path) -> None:
    # A diff driver declared by the candidate is a refused path anyway; a blob with NUL bytes is binary to git.
    (repository / "src" / ".gitattributes").write_text("* text diff\n")
    assert verdict(repository)[1] is Reason.outside_editable


def test_suspicions_are_reported_and_not_judged(repository: Path) -> None:
    (repository / "src" / "a.py").write_text("import socket\nx = 1\ntry:\n    pass\nexcept Exception:\n    pass\n")
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "-a", "-m", "x")
    report = check_diff(repository, base, "HEAD", editable)
    assert report.passed
    assert [line.split(": ")[1] for line in report.suspicions] == ["talks to a network", "swallows errors broadly"]
    assert suspicions("+++ b/f.py\n-import socket\n import socket\n+y = 1\n") == []


@pytest.mark.parametrize(
    "name", ["src/__pycache__/a.cpython-311.pyc", "src/a.pyc", "src/B.PYO", "src/__PyCache__/data.txt"]
)
def test_compiled_python_hides_what_runs(repository: Path, name: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_bytes(b"\x00compiled")
    passed, reason, detail = verdict(repository)
    assert (passed, reason) == (False, Reason.outside_editable) and name in detail and "compiled Python" in detail
    (repository / name).unlink()
    assert verdict(repository)[0], "taking it away is welcome"


def test_binaries_are_named_to_the_reader(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    (repository / "src" / "kernel.so").write_bytes(b"\x7fELF\x00")
    git(repository, "add", "-A", "-f")
    git(repository, "commit", "-q", "-m", "change")
    report = check_diff(repository, base, git(repository, "rev-parse", "HEAD"), editable)
    assert report.passed and report.suspicions == ["src/kernel.so: cannot be read: binary"]


@pytest.mark.parametrize("line", ["\x0cimport socket", "x = 1\x0b;import socket", "++ __import__('socket')"])
def test_no_added_line_is_hidden_from_the_reader(repository: Path, line: str) -> None:
    base = git(repository, "rev-parse", "HEAD")
    (repository / "src" / "a.py").write_text(f"{line}\nos.environ\n")
    git(repository, "commit", "-q", "-a", "-m", "change")
    found = check_diff(repository, base, git(repository, "rev-parse", "HEAD"), editable).suspicions
    assert any("talks to a network" in told for told in found)
    assert all(told.startswith("src/a.py: ") for told in found) and any(
        "reads the environment" in told for told in found
    )


def test_unknown_commit_is_our_fault(repository: Path) -> None:
    with pytest.raises(EvidenceError, match="git diff failed"):
        check_diff(repository, "0" * 40, "HEAD", editable)
