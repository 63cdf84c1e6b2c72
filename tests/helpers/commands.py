"""Commands for tests of the sandbox: what they print, whom they start, and whether those are gone."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from specpilot.sandbox import Limits, scrub_environment

ENV = scrub_environment({})
QUICK = Limits(grace_s=0.3)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


FAMILY = """
    import os, subprocess, sys, time
    sleeper = [sys.executable, "-c", "import time; time.sleep(120)"]
    child = subprocess.Popen(sleeper)
    own_session = subprocess.Popen(sleeper, start_new_session=True)
    if os.fork() == 0:               # daemon: twice forked, own session, parent gone
        os.setsid()
        pid = os.fork()
        if pid:
            os._exit(0)
        print("daemon", os.getpid(), flush=True)
        time.sleep(120)
    print("child", child.pid, flush=True)
    print("session", own_session.pid, flush=True)
    {then}
"""


def pids_in(log: Path, count: int = 3) -> list[int]:
    assert eventually(lambda: len(log.read_text().split()) >= 2 * count if log.exists() else False)
    return [int(word) for word in log.read_text().split() if word.isdigit()]


PARENT = """
    import sys, time
    from pathlib import Path
    from specpilot.sandbox import *
    folder = Path(sys.argv[1])
    child = spawn([sys.executable, "-c", Path(folder, "family.py").read_text()], cwd=folder, env=scrub_environment({}),
                  log_path=folder / "log", limits=Limits(grace_s=0.3))
    if sys.argv[2] == "frozen":
        while len((folder / "log").read_text().split()) < 6: time.sleep(0.02)
        child.freeze()
    print(child.pid, flush=True)
    time.sleep(120)
"""
