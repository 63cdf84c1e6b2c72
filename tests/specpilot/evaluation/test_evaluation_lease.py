"""One holder per device, across threads and processes; and what others use is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specpilot.errors import EnvironmentProblem, InfrastructureError
from specpilot.evaluation.lease import CpuUse, CpuWatch, DeviceLease, other_engines

HOLD = """
import sys, time
from specpilot.evaluation.lease import DeviceLease
with DeviceLease("cpu", "holding"):
    print("held", flush=True)
    time.sleep(30)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECPILOT_LEASE_DIR", str(tmp_path / "leases"))
    return tmp_path / "leases"


def test_another_process_waits_and_a_killed_holder_lets_go() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(InfrastructureError, match=f"pid {holder.pid} holding"), DeviceLease("cpu", timeout_s=0.2):
            pass
        with DeviceLease("gpu-0", timeout_s=0.2):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with DeviceLease("cpu", timeout_s=5):
        pass


def test_reentrant_in_a_thread_exclusive_between_threads() -> None:
    order: list[str] = []
    refused = threading.Event()

    def other() -> None:
        try:
            DeviceLease("cpu", timeout_s=0.0).__enter__()
        except InfrastructureError as error:
            order.append("another thread" if "another thread of this run" in str(error) else str(error))
        refused.set()
        with DeviceLease("cpu"):
            order.append("other")

    with DeviceLease("cpu"):
        with DeviceLease("cpu", "again"):
            pass
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert refused.wait(60)
        order.append("first")  # the inner lease's end let nobody in
    thread.join(60)
    assert order == ["another thread", "first", "other"]


def test_a_planted_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    (folder / "cpu.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(EnvironmentProblem, match="device lock"), DeviceLease("cpu"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("device", ["../x", "", "a/b"])
def test_odd_device_names_are_refused(device: str) -> None:
    with pytest.raises(ValueError):
        DeviceLease(device)


def test_foreign_share_by_hand() -> None:
    use = CpuUse(wall_s=2.0, busy_s=3.0, stolen_s=0.0, own_s=0.5, engine_s=1.5, cores=2)
    assert use.foreign_share == pytest.approx(0.25)
    assert CpuUse(1.0, 0.1, 0.0, 0.5, 0.5, 2).foreign_share == 0.0
    watch = CpuWatch()
    watch.uses = [use, CpuUse(2.0, 2.0, 1.0, 0.5, 1.5, 2)]
    found = watch.summary()
    assert found["foreign_cpu_share"] == 0.125 and found["foreign_cpu_share_worst_leg"] == 0.25
    assert found["stolen_cpu_share"] == 0.125 and len(found["warnings"]) == 2
    with pytest.raises(RuntimeError):
        watch.stop(0.0)


def test_a_cpu_hog_is_reported() -> None:
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        watch = CpuWatch()
        watch.start(0.0)
        time.sleep(0.5)
        use = watch.stop(0.0)
    finally:
        hog.kill()
        hog.wait()
    assert use.foreign_share > 0.5 / use.cores and watch.summary()["warnings"]


def test_engines_that_are_not_ours_are_seen_until_they_are_stopped() -> None:
    # A child of a shell that has gone is nobody's descendant here: a leftover.
    script = "SPECPILOT_COMMIT=c0ffee sh -c 'exec sleep 120' > /dev/null & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout)
    try:
        assert f"pid {pid} serving c0ffee" in other_engines()
        with subprocess.Popen(["sleep", "30"], env=os.environ | {"SPECPILOT_COMMIT": "c0ffee"}) as own:
            assert not any(str(own.pid) in words for words in other_engines())
            own.kill()
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while any(str(pid) in words for words in other_engines()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert f"pid {pid} serving c0ffee" not in other_engines()
    finally:
        os.kill(pid, signal.SIGKILL)
