"""The patch series: reviewable, reproducible, and exactly the winning tree."""

from __future__ import annotations

import subprocess

import pytest

from specpilot.errors import TamperedEvidenceError
from specpilot.export import export_run
from specpilot.export.patches import check_series
from specpilot.export.source import RunSource


@pytest.fixture
def series(shared_run, tmp_path):
    to = tmp_path / "patches"
    result = export_run(shared_run.folder, to, format="patches")
    return result, to


def test_one_patch_per_change_in_order(series):
    result, to = series
    assert (to / "series").read_text().split() == ["0001-faster-rounds.patch", "0002-r1-worker-1.patch"]
    assert sorted(path.name for path in to.iterdir()) == [
        "0001-faster-rounds.patch",
        "0002-r1-worker-1.patch",
        "cover-letter.md",
        "series",
    ]
    text = (to / "0001-faster-rounds.patch").read_text()
    assert "Subject: [PATCH 1/2] faster-rounds: Faster é rounds" in text
    assert "Effect: 1.500x [1.400, 1.600]" in text and "199 exact" in text and "Counters that grew: calls" in text
    assert "faster-rounds" in (to / "cover-letter.md").read_text() and result.mechanisms == [
        "faster-rounds",
        "r1-worker-1",
    ]


def test_plain_git_gives_the_winning_tree(shared_run, series, tmp_path):
    """By the documented command, on a clone made by hand, with the hypothesis' nasty lines inside the messages."""
    _, to = series
    clone = tmp_path / "clone"
    shared_run.workspace.export_tree(shared_run.workspace.first_commit, clone)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=clone, check=True)
    for name in (to / "series").read_text().split():
        subprocess.run([*git, "am", "-q", "--keep-cr", str(to / name)], cwd=clone, check=True)
    expected = tmp_path / "expected"
    shared_run.workspace.export_tree(shared_run.head, expected)
    for path in expected.rglob("*"):
        if path.is_file():
            assert (clone / path.relative_to(expected)).read_bytes() == path.read_bytes()
    log = subprocess.run(
        [*git, "log", "-2", "--format=%B"], cwd=clone, check=True, capture_output=True, text=True
    ).stdout
    assert "diff of hope" in log and "Faster é rounds" in log


def test_same_run_same_bytes(shared_run, series, tmp_path):
    _, to = series
    export_run(shared_run.folder, tmp_path / "again", format="patches")
    for path in to.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_changed_patch_does_not_pass_the_check(shared_run, series):
    _, to = series
    path = to / "0001-faster-rounds.patch"
    path.write_text(path.read_text().replace('"round_s": 0.003', '"round_s": 0.001'))
    with RunSource.open(shared_run.folder) as source, pytest.raises(TamperedEvidenceError):
        check_series(source, to)


def test_head_that_no_record_explains_is_refused(run, tmp_path):
    """Somebody moved the head: what was never measured must not be exported under the run's evidence."""
    worktree = run.workspace.checkout("by-hand", run.head)
    (worktree / "extra.txt").write_text("x\n")
    commit = run.workspace.commit_all("by-hand", "by hand")
    run.workspace.set_head(commit)
    with pytest.raises(TamperedEvidenceError, match="no recorded merge ended in"):
        export_run(run.folder, tmp_path / "out", format="patches")
    assert not (tmp_path / "out").exists()


def test_no_change_is_an_empty_series(tmp_path):
    from tests.helpers.fake_deployment import write_fake_deployment
    from tests.helpers.fake_server import write_fake_tree

    from .conftest import RunBuilder, fake_models

    deployment = write_fake_deployment(tmp_path / "d")
    run = RunBuilder(tmp_path / "run", deployment, write_fake_tree(tmp_path / "tree"), fake_models(deployment))
    export_run(run.folder, tmp_path / "out", format="patches")
    assert (tmp_path / "out" / "series").read_text() == ""
