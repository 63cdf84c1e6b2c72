"""The journal's seal: every edit by hand is named, a killed writer leaves nothing that looks like one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from specpilot.cli import main
from specpilot.cli.maintenance import leftovers
from specpilot.contracts import AttemptState, Reason
from specpilot.errors import RunFolderError, TamperedEvidenceError
from specpilot.evidence import check_file, check_run, seal_file
from specpilot.journal import Journal
from specpilot.workspace import Workspace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small ended run: meta, a step begun and one finished, an accepted and a rejected attempt, events."""
    journal = Journal.create(tmp_path / "run/journal.db", {"run": {"run_id": "r"}, "rate": 0.1 + 0.2})
    journal.step("calibrate", lambda: {"epsilon": 0.02, "words": "naïve \u2028"})
    with pytest.raises(ZeroDivisionError):
        journal.step("r1/observe", lambda: 1 / 0)
    for name in ("good", "bad"):
        journal.create_attempt(name, round=1, worker="recall", data={"assessment": {"ratio": 1.5}})
        journal.move_attempt(name, AttemptState.working)
    journal.move_attempt("bad", AttemptState.rejected, reason=Reason.token_mismatch, detail="position 7")
    journal.event("note", {"text": "x"})
    journal.event("note", {"text": "y"})
    journal.set_meta("elapsed_s", 3)
    journal.record_process(1, 1, 2.0, "server")
    journal.close()
    return journal.path


def edit(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(statement, values).rowcount > 0
    db.close()


def test_an_untouched_journal_opens_and_goes_on(path: Path) -> None:
    journal = Journal.open(path)
    before = journal.seal_head
    journal.event("more")
    assert journal.seal_head != before
    journal.close()
    assert Journal.open(path).result("calibrate")["epsilon"] == 0.02


def test_the_chain_is_what_the_documentation_says(path: Path) -> None:
    """Recomputed here with nothing but hashlib and sqlite3."""
    db = sqlite3.connect(path)
    chain = hashlib.sha256(b"specpilot journal").hexdigest()
    for kind, key, row_sha256, stored in db.execute("SELECT kind, row_key, row_sha256, chain FROM seals"):
        chain = hashlib.sha256("\n".join([chain, kind, key, row_sha256]).encode()).hexdigest()
        assert stored == chain
    row = db.execute("SELECT * FROM attempts WHERE id = 'bad'").fetchone()
    wanted = hashlib.sha256(json.dumps(["attempts", *row], ensure_ascii=False).encode()).hexdigest()
    newest = "SELECT row_sha256 FROM seals WHERE kind = 'attempts' AND row_key = 'bad' ORDER BY position DESC"
    assert db.execute(newest).fetchone()[0] == wanted
    db.close()
    assert Journal.open(path).seal_head == chain


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE steps SET result = replace(result, '0.02', '9.9') WHERE key = 'calibrate'", "'calibrate' in steps"),
        ("UPDATE steps SET state = 'finished', result = '1' WHERE key = 'r1/observe'", "'r1/observe' in steps"),
        ("DELETE FROM steps WHERE key = 'calibrate'", "'calibrate' is missing from steps"),
        ("UPDATE attempts SET data = replace(data, '1.5', '9.5') WHERE id = 'good'", "'good' in attempts"),
        ("UPDATE attempts SET state = 'merged', reason = NULL WHERE id = 'bad'", "'bad' in attempts"),
        ("DELETE FROM attempts WHERE id = 'bad'", "'bad' is missing from attempts"),
        ("UPDATE attempt_history SET reason = 'no-gain' WHERE reason IS NOT NULL", "attempt_history"),
        ("UPDATE meta SET value = '1' WHERE key = 'elapsed_s'", "'elapsed_s' in meta"),
        ("UPDATE meta SET value = CAST(value AS BLOB)", "in meta"),
        ("INSERT INTO meta VALUES ('stop_reason', '\"rounds-done\"')", "meta holds 'stop_reason'"),
        ("UPDATE events SET data = '{}' WHERE position = 1", "1 in events"),
        ("INSERT INTO events VALUES (NULL, 1.0, 'merge', '{}')", "events holds 3"),
        ("DELETE FROM seals WHERE position = (SELECT max(position) FROM seals)", "'elapsed_s' in meta|meta holds"),
        ("DELETE FROM seals WHERE position = 3", "line 3"),
        ("UPDATE seals SET row_sha256 = 'a' WHERE position = 4", "line 4"),
        ("UPDATE seals SET chain = 'a' WHERE position = 5", "line 5"),
        ("DELETE FROM seals", "meta holds"),
    ],
)
def test_every_edit_is_named_with_exit_code_8(path: Path, statement: str, named: str) -> None:
    edit(path, statement)
    with pytest.raises(TamperedEvidenceError, match=named) as caught:
        Journal.open(path)
    assert caught.value.exit_code == 8 and str(path) in caught.value.message and "restore" in caught.value.hint


def test_what_is_no_evidence_is_not_sealed(path: Path) -> None:
    edit(path, "UPDATE processes SET ended_at = 1.0")
    assert Journal.open(path).live_processes() == []


def test_a_journal_without_seals_gets_one_message(path: Path) -> None:
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE seals; PRAGMA user_version = 1;")
    db.close()
    with pytest.raises(RunFolderError, match="earlier SpecPilot .*did not seal") as caught:
        Journal.open(path)
    assert caught.value.exit_code == 5


WRITER = """
    import sys
    from pathlib import Path
    from specpilot.journal import Journal
    journal = Journal.open(Path(sys.argv[1]))
    print("open", flush=True)
    for index in range(100_000):
        journal.event("work", {"index": index, "text": "x" * 500})
        journal.step(f"s{index}", lambda: index)
"""


@pytest.mark.parametrize("wait_s", [0.01, 0.05, 0.11])
def test_a_writer_killed_at_any_moment_is_no_forger(path: Path, wait_s: float) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "open\n"
    time.sleep(wait_s)
    watcher = Journal.open(path)  # a busy journal is checked as one state of the file
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    watcher.close()
    journal = Journal.open(path)
    journal.event("after the kill")
    journal.close()
    assert Journal.open(path).events()[-1].kind == "after the kill"


@pytest.mark.parametrize("words", [["status"], ["report"], ["export", "--to", "out"], ["resume"], ["attempt", "list"]])
def test_every_command_on_a_run_says_so(
    path: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parents[1])
    edit(path, "UPDATE steps SET result = replace(result, '0.02', '9.9') WHERE key = 'calibrate'")
    before = path.read_bytes()
    count = 2 if words[0] == "attempt" else 1
    with pytest.raises(SystemExit) as caught:
        main([*words[:count], str(path.parent), *words[count:]])
    err = capsys.readouterr().err
    assert caught.value.code == 8 and err.count("error:") == 1 and "'calibrate' in steps" in err
    assert path.read_bytes() == before and not (path.parents[1] / "out").exists()


def test_gc_leaves_a_changed_run_alone(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path))
    path.parent.rename(tmp_path / "kept")
    (tmp_path / "runs").mkdir()
    folder = (tmp_path / "kept").rename(tmp_path / "runs/run")
    edit(folder / "journal.db", "DELETE FROM events")
    os.utime(folder, (0, 0))
    assert list(leftovers(0.0)) == []


# -- files and repository beside the journal ----------------------------------------------------------------


def test_sealed_files(path: Path) -> None:
    folder = path.parent
    journal = Journal.open(path)
    report, trials = folder / "report.html", folder / "workers/search.jsonl"
    trials.parent.mkdir()
    report.write_text("<p>1.5x</p>")
    trials.write_text('{"ask": 1}\n')
    check_file(journal, folder, report)  # not sealed yet: nothing to compare with
    seal_file(journal, folder, report)
    seal_file(journal, folder, trials)
    with trials.open("a") as file:
        file.write('{"tell": 1}\n')  # a trial file may grow
    check_run(folder, journal)
    check_file(journal, folder, report)
    report.write_text("<p>9.5x</p>")
    with pytest.raises(TamperedEvidenceError, match=r"report\.html was changed") as caught:
        check_file(journal, folder, report)
    assert "specpilot report run" in caught.value.hint
    trials.write_text('{"ask": 2}\n')
    with pytest.raises(TamperedEvidenceError, match=r"search\.jsonl was changed"):
        check_run(folder, journal)
    trials.unlink()
    with pytest.raises(TamperedEvidenceError, match=r"search\.jsonl is missing"):
        check_run(folder, journal)


@pytest.fixture
def workspace(path: Path, tmp_path: Path) -> Workspace:
    tree = tmp_path / "tree"
    tree.mkdir()
    source = Path(__file__).parents[2] / "engines/slim/engine.toml"
    (tree / "engine.toml").write_text(source.read_text())
    return Workspace.create(path.parent, tree)


def test_the_repository_is_held_against_the_journal(path: Path, workspace: Workspace) -> None:
    journal = Journal.open(path)
    first = workspace.first_commit
    journal.step("preflight", lambda: {"first_commit": first})
    check_run(path.parent, journal, workspace)
    (workspace.worktree("a", first) / "tunables.toml").write_text("x = 1\n")
    better = workspace.commit_all("a", "Change it")
    workspace.set_head(better)
    with pytest.raises(TamperedEvidenceError, match="specpilot/best"):
        check_run(path.parent, journal, workspace)
    journal.step("r1/merge/0", lambda: {"after": better})
    check_run(path.parent, journal, workspace)
    journal.set_meta("final_head", better)
    journal.set_meta("stop_reason", "rounds-done")
    workspace.set_head(first)
    with pytest.raises(TamperedEvidenceError, match="specpilot/best"):
        check_run(path.parent, journal, workspace)  # rolled back: the figures of the closing session are not its own
    journal.set_meta("stop_reason", "interrupted")
    check_run(path.parent, journal, workspace)
    workspace.first_commit = better
    with pytest.raises(TamperedEvidenceError, match="begins at"):
        check_run(path.parent, journal, workspace)


def test_an_edited_object_of_the_repository_is_seen(path: Path, workspace: Workspace) -> None:
    journal = Journal.open(path)
    objects = [p for p in (workspace.repo / ".git/objects").glob("??/*") if p.is_file()]
    victim, other = objects[0], objects[1]
    os.chmod(victim, 0o644)
    victim.write_bytes(other.read_bytes())
    with pytest.raises(TamperedEvidenceError, match="not as it was written"):
        check_run(path.parent, journal, workspace)
