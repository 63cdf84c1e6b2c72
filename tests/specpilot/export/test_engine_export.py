"""The exported folder: complete, private data left out, nothing half-written, scripts that stand alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from specpilot.deployment import load_deployment
from specpilot.errors import DigestError, DiskFullError, EnvironmentProblem, RunFolderError, UsageError
from specpilot.export import export_run
from specpilot.export.pins import requirements, third_party_imports
from tests.helpers.scripts import scripts_of

from .conftest import SECRET

SCRIPTS = ("setup_env.sh", "download_models.sh", "serve.sh", "bench.sh", "verify.sh")


def script(folder: Path, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the export from another folder, with this interpreter as the engine's."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}
    return subprocess.run(
        [str(folder / name), *arguments],
        cwd="/",
        env={**kept, "ENGINE_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_everything_is_there(shared_run, shared_export):
    result, to = shared_export
    run = shared_run
    assert result.commit == run.head and result.mechanisms == ["faster-rounds", "r1-worker-1"]
    assert (to / "engine" / "behaviour.json").read_text() == '{\n "round_s": 0.003\n}\n'
    assert (to / "engine" / "notes.txt").read_bytes() == b"a\r\nb\r\n"
    assert json.loads((to / "stock" / "behaviour.json").read_text()) == {} and not (to / "stock" / "notes.txt").exists()
    assert not list(to.rglob(".git*"))
    for name in SCRIPTS:
        assert os.access(to / name, os.X_OK)
    names = {path.name for path in (to / "evidence").iterdir()}
    assert names == {"SHA256SUMS", "report.html", "journal.json", "calibration.json", "selftest.json", "baselines.json",
                     "final.json", "gaps.json", "comparisons.json", "verdicts.json", "environment.json"}  # fmt: skip
    assert result.files == sum(path.is_file() for path in to.rglob("*"))
    assert result.sums_sha256 == hashlib.sha256((to / "evidence" / "SHA256SUMS").read_bytes()).hexdigest()
    assert [path.name for path in to.parent.iterdir()] == ["my engine"]


def test_readme_and_evidence_tell_what_happened(shared_export):
    _, to = shared_export
    text = (to / "README.md").read_text()
    assert "final over stock: 2.25x [2.00, 2.50]" in text and "1.500x [1.400, 1.600]" in text
    assert "200 tokens forced, 199 exact, 1 near-ties, 0 violations" in text
    journal = json.loads((to / "evidence" / "journal.json").read_text())
    assert [row["name"] for row in journal["merged"]] == ["faster-rounds", "r1-worker-1"]
    assert {row["id"]: row["state"] for row in journal["attempts"]}["r1-bad"] == "rejected"
    assert json.loads((to / "evidence" / "calibration.json").read_text())["epsilon"] == 0.03
    assert set(json.loads((to / "evidence" / "verdicts.json").read_text())) == {
        "r1/attempt/r1-worker-0",
        "r1/attempt/r1-worker-1",
    }
    assert len(json.loads((to / "evidence" / "comparisons.json").read_text())) == 2


def test_secrets_stay_behind(shared_export):
    _, to = shared_export
    for path in to.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes() and b"hunter2" not in path.read_bytes(), path


def test_deployment_points_into_the_export(shared_export):
    _, to = shared_export
    deployment = load_deployment(to / "deployment.yaml")
    assert deployment.engine_tree() == (to / "engine").resolve()
    assert [path for path in deployment.missing_files() if "models" not in path.parts] == []


def test_run_without_a_merge_is_exported_with_a_plain_word(tmp_path):
    from tests.helpers.fake_deployment import write_fake_deployment
    from tests.helpers.fake_server import write_fake_tree

    from .conftest import RunBuilder, fake_models

    deployment = write_fake_deployment(tmp_path / "d")
    run = RunBuilder(tmp_path / "run", deployment, write_fake_tree(tmp_path / "tree"), fake_models(deployment))
    export_run(run.folder, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Nothing was merged." in text and "closing session was not measured" in text and "not ended" in text


def test_checksums_catch_every_kind_of_tampering(exported):
    result, to = exported
    good = script(to, "verify.sh", "--checksums", "--expect", result.sums_sha256)
    assert good.returncode == 0 and f"{result.files - 1} match" in good.stdout, good.stderr
    for damage, named in (
        (lambda: (to / "engine" / "fake_server.py").write_text("evil = 1\n"), "engine/fake_server.py: was changed"),
        (lambda: (to / "evidence" / "verdicts.json").unlink(), "evidence/verdicts.json: is missing"),
        (lambda: (to / "engine" / "sitecustomize.py").write_text(""), "engine/sitecustomize.py: is not part"),
        (lambda: (to / "evidence" / "report.html").write_text("better"), "evidence/report.html: was changed"),
    ):
        keep = to.with_name("kept")
        shutil.copytree(to, keep)
        damage()
        done = script(to, "verify.sh", "--checksums")
        assert done.returncode == 8 and named in done.stderr, done.stderr
        shutil.rmtree(to)
        keep.rename(to)


def test_rewritten_checksums_are_caught_by_the_printed_digest(exported):
    result, to = exported
    sums = to / "evidence" / "SHA256SUMS"
    (to / "evidence" / "report.html").write_text("better")
    new = hashlib.sha256(b"better").hexdigest()
    lines = [
        f"{new}  evidence/report.html" if "report.html" in line else line for line in sums.read_text().splitlines()
    ]
    sums.write_text("\n".join(lines) + "\n")
    assert script(to, "verify.sh", "--checksums").returncode == 0
    assert script(to, "verify.sh", "--checksums", "--expect", result.sums_sha256).returncode == 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: [*lines[:2], "", *lines[2:]], "line 3 is empty"),
        (lambda lines: [*lines, ""], "is empty"),
        (lambda lines: [lines[0].replace("  ", " "), *lines[1:]], "line 1 is '"),
        (lambda lines: [*lines[:4], lines[0], *lines[4:]], "line 5 is a repetition"),
        (lambda lines: ["\udcff" + lines[0], *lines[1:]], "line 1 is '"),
    ],
)
def test_a_damaged_list_of_checksums_is_said_so(exported, change, told):
    _, to = exported
    sums = to / "evidence" / "SHA256SUMS"
    text = "".join(line + "\n" for line in change(sums.read_text().splitlines()))
    sums.write_text(text, encoding="utf-8", errors="surrogateescape")
    done = script(to, "verify.sh", "--checksums")
    assert done.returncode == 8 and "evidence/SHA256SUMS was changed: " in done.stderr and told in done.stderr
    assert "Traceback" not in done.stderr


def test_scripts_say_what_is_missing(exported):
    _, to = exported
    done = script(to, "serve.sh", "final", "30111", ENGINE_PYTHON="/nowhere/python")
    assert done.returncode == 3 and "run ./setup_env.sh first" in done.stderr
    done = script(to, "serve.sh", "final", "30111")
    assert done.returncode == 4 and "run ./download_models.sh first" in done.stderr
    assert script(to, "serve.sh", "fast", "30111", TARGET_DIR=str(to.parent)).returncode == 2
    assert script(to, "serve.sh", "final", "99999").returncode == 2
    done = script(to, "setup_env.sh", PYTHON="/nowhere/python")
    assert done.returncode == 3 and "PYTHON=/nowhere/python is not a program" in done.stderr
    done = script(to, "download_models.sh", TARGET_DIR="/nowhere")
    assert done.returncode == 4 and "/nowhere holds no config.json" in done.stderr
    assert script(to, "verify.sh", "--checksums", ENGINE_PYTHON="/nowhere/python").returncode == 0, "any Python will do"


@pytest.mark.parametrize("threads", ["abc", "0", "-2", "1.5"])
def test_threads_must_be_a_number(exported, threads):
    _, to = exported
    done = script(to, "serve.sh", "final", "30111", TARGET_DIR=json.loads((to / "export.json").read_text())["target"]["path"],
                  THREADS=threads)  # fmt: skip
    assert done.returncode == 3 and f"THREADS='{threads}'" in done.stderr and "usage" not in done.stderr


def test_an_interpreter_that_will_not_do_is_named(exported):
    _, to = exported
    done = script(to, "serve.sh", ENGINE_PYTHON="/bin/false")
    assert done.returncode == 3 and "ENGINE_PYTHON=/bin/false is not Python 3.11 or newer" in done.stderr
    (to / "requirements.txt").write_text(
        "# Imported:\nno-such-package==1.0\npip==1\n# What these need in turn:\nother==2\n"
    )
    for name in ("serve.sh", "bench.sh"):
        done = script(to, name)
        assert done.returncode == 3 and "lacks no-such-package\n" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_changed_weights_are_not_served(run, tmp_path, which):
    to = tmp_path / "out"
    export_run(run.folder, to)
    assert script(to, "download_models.sh").returncode == 0
    folder = to / ("models/target" if which == "target" else "drafter")
    (folder / "model.safetensors").write_bytes(b"other weights")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for command in (["serve.sh", "final", port], ["bench.sh", "final", "stock"]):
        done = script(to, *command)
        assert done.returncode == 4 and f"the {which}'s weights" in done.stderr and "serving" not in done.stdout


def test_download_links_the_local_checkpoint_and_checks_its_digest(run, tmp_path):
    to = tmp_path / "out"
    export_run(run.folder, to)
    done = script(to, "download_models.sh")
    assert done.returncode == 0, done.stderr
    assert (to / "models" / "target" / "config.json").is_file()
    assert script(to, "verify.sh", "--checksums").returncode == 0, "what the scripts make is no tampering"
    (tmp_path / "my deployment" / "target" / "model.safetensors").write_bytes(b"other weights")
    done = script(to, "download_models.sh")
    assert done.returncode == 4 and "SHA-256 is" in done.stderr


def test_port_in_use(exported):
    _, to = exported
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        done = script(to, "serve.sh", "final", str(holder.getsockname()[1]))
    assert done.returncode == 3 and "choose another port" in done.stderr


def test_bench_and_verify_run_the_made_up_engine(exported):
    _, to = exported
    assert script(to, "download_models.sh").returncode == 0
    done = script(to, "bench.sh", "stock", "final", "--prompts", "2", "--tokens", "24", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (ratio,) = result["ratios"]
    final, stock = result["rates"]["final"], result["rates"]["stock"]
    assert len(final) == len(stock) == 2 and min(final + stock) > 0
    assert (ratio["of"], ratio["over"]) == ("final", "stock")
    assert ratio["ratio"] ** 2 == pytest.approx(final[0] / stock[0] * final[1] / stock[1]), "geometric mean of pairs"
    done = script(to, "verify.sh", "--prompts", "2", "--tokens", "24")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "token forcing: 48 tokens" in done.stdout and "0 violations" in done.stdout


def test_verify_finds_an_engine_that_emits_other_tokens(run, tmp_path):
    run.merge(lambda w: (w / "behaviour.json").write_text('{\n "wrong_every": 7\n}\n') and None)
    to = tmp_path / "out"
    export_run(run.folder, to)
    assert script(to, "download_models.sh").returncode == 0
    done = script(to, "verify.sh", "--prompts", "1", "--tokens", "16")
    assert (
        done.returncode == 7 and "2 tokens are not what the target would emit; first: prompt 1, token 6" in done.stderr
    )


def test_serve_in_the_foreground(exported):
    _, to = exported
    assert script(to, "download_models.sh").returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [str(to / "serve.sh"), "stock", str(port)],
        env={**os.environ, "ENGINE_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
    )
    try:
        assert b"starting stock" in server.stdout.readline()
        told = f"serving stock on http://127.0.0.1:{port} ".encode()
        assert any(line.startswith(told) for line in server.stdout), "the engine's own words may come before"
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/server_info", timeout=60
        ) as answer:  # at once: it answers
            info = json.load(answer)
        assert info["commit"] == json.loads((to / "export.json").read_text())["variants"]["stock"]["commit"]
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()


def test_an_engine_that_dies_is_not_called_serving(exported):
    """Its exit code is the script's, at once, and the helper that waits for it goes with it."""
    _, to = exported
    assert script(to, "download_models.sh").returncode == 0
    (to / "stock" / "fake_server.py").write_text("raise SystemExit(5)\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = script(to, "serve.sh", "stock", port)
    assert done.returncode == 5 and "serving" not in done.stdout
    assert "warning" not in done.stderr, "the helper saw the end, and did not wait until its patience was over"
    (to / "stock" / "fake_server.py").write_text("import time\ntime.sleep(3)\n")
    done = script(to, "serve.sh", "stock", port)
    assert done.returncode == 0 and "serving" not in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["file", "full folder", "link"])
def test_never_overwrites(shared_run, tmp_path, kind):
    to = tmp_path / "taken"
    if kind == "file":
        to.write_text("mine")
    elif kind == "full folder":
        to.mkdir()
        (to / "mine").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        to.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not an empty folder"):
        export_run(shared_run.folder, to)
    assert not list(tmp_path.glob(".taken.part-*"))


def test_empty_folder_is_fine_and_leftovers_of_a_killed_export_go(shared_run, tmp_path):
    to = tmp_path / "empty"
    to.mkdir()
    (tmp_path / ".empty.part-999999999").mkdir()
    export_run(shared_run.folder, to)
    assert (to / "serve.sh").is_file() and not list(tmp_path.glob(".empty.part-*"))


def test_full_disk_leaves_nothing(shared_run, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DiskFullError) as caught:
        export_run(shared_run.folder, tmp_path / "out")
    assert caught.value.exit_code == 3 and "no space left" in caught.value.message
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.part-*"))


def test_really_full_disk(shared_run, tmp_path):
    """On a file system of 24 KiB: git is the first to fail, in its own words."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        with pytest.raises(DiskFullError, match="no space left"):
            export_run(shared_run.folder, small / "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_unwritable_parent(shared_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem):
        export_run(shared_run.folder, tmp_path / "file" / "out")


def test_bad_arguments(shared_run, tmp_path):
    with pytest.raises(UsageError, match="format"):
        export_run(shared_run.folder, tmp_path / "out", format="zip")
    with pytest.raises(RunFolderError):
        export_run(tmp_path / "no run", tmp_path / "out")


def test_changed_drafter_is_refused(run, tmp_path):
    (tmp_path / "my deployment" / "target" / "model.safetensors").write_bytes(b"trained further")
    with pytest.raises(DigestError, match="drafter"):
        export_run(run.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pins_follow_imports_without_running_them(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(
        "import os, yaml\nfrom numpy.linalg import norm\nfrom . import b\nimport pkg.b\nraise SystemExit"
    )
    (tmp_path / "pkg" / "b.py").write_text("def f():\n    import no_such_module_anywhere\n")
    (tmp_path / "broken.py").write_text("def (")
    assert third_party_imports([tmp_path]) == ["no_such_module_anywhere", "numpy", "yaml"]
    text, every = requirements([tmp_path], sys.executable)
    import numpy

    assert f"numpy=={numpy.__version__}" in text and "pyyaml==" in text and "+" not in text.split("\n", 1)[1]
    assert every["numpy"] == numpy.__version__
    with pytest.raises(EnvironmentProblem):
        requirements([tmp_path], "/nowhere/python")


def test_an_export_knows_of_cores_what_the_run_knew(shared_export, monkeypatch):
    """On 64 cores of which a container pays for two."""
    _, to = shared_export
    with scripts_of(to / "tools"):
        import cores
        import layout
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    monkeypatch.delenv("THREADS", raising=False)
    assert layout.threads({"threads": None}) == "2" and layout.threads({"threads": 3}) == "3"
    monkeypatch.setenv("THREADS", "5")
    assert layout.threads({"threads": 3}) == "5"


def test_near_tie_rule_is_the_binomial_one(shared_export):
    _, to = shared_export
    with scripts_of(to / "tools"):
        import verify  # the stand-alone program, as it runs in an export
    from scipy.stats import binom

    for count, total, share in ((0, 100, 0.01), (1, 100, 0.01), (6, 300, 0.01), (300, 300, 0.5), (3, 10, 0.2)):
        assert verify.binomial_tail(count, total, share) == pytest.approx(binom.sf(count - 1, total, share), rel=1e-9)
    assert verify.binomial_tail(1, 10, 0.0) == 0.0 and verify.binomial_tail(0, 10, 0.0) == 1.0


def test_many_near_ties_are_refused(run, tmp_path):
    """The made-up model has a near-tie at about 3 % of its positions; taking every one exceeds a share of 0.1 %."""
    run.merge(lambda w: (w / "behaviour.json").write_text('{\n "flip_near_ties": 0.02\n}\n') and None)
    to = tmp_path / "out"
    export_run(run.folder, to)
    assert script(to, "download_models.sh").returncode == 0
    words = ("--prompts", "4", "--tokens", "100")
    assert script(to, "verify.sh", *words).returncode == 0, "calibrated share of 20 %"
    path = to / "evidence" / "calibration.json"
    path.write_text(path.read_text().replace("0.2", "0.001"))
    sums = to / "evidence" / "SHA256SUMS"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [
        f"{digest}  evidence/calibration.json" if "calibration" in line else line
        for line in sums.read_text().splitlines()
    ]
    sums.write_text("\n".join(lines) + "\n")
    done = script(to, "verify.sh", *words)
    assert done.returncode == 7 and "more than the calibrated share" in done.stderr, done.stdout


def test_ended_bench_leaves_no_server(exported):
    import signal
    import time

    import psutil

    _, to = exported
    assert script(to, "download_models.sh").returncode == 0
    environment = {**os.environ, "ENGINE_PYTHON": sys.executable}
    bench = subprocess.Popen([str(to / "bench.sh"), "--prompts", "500"], env=environment, stdout=subprocess.PIPE)
    for line in bench.stdout:
        if b"prompt 1/500" in line:
            break
    children = psutil.Process(bench.pid).children(recursive=True)
    assert len(children) == 4
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(60) == 130
    bench.stdout.close()
    deadline = time.monotonic() + 60
    while any(child.is_running() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(child.is_running() for child in children)
