"""Who works on a run: one process at a time, told by an operating-system lock. Imports errors only."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from specpilot.errors import RunLockedError, disk_full_named


class RunLock:
    """Held while a process works on a run: an operating-system lock, gone when the process is gone."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "run.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> RunLock:
        """Take the lock. Raises `RunLockedError` naming the holder."""
        with disk_full_named(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunLockedError(
                f"{self.path.parent} is in use by {self.holder(self.path.parent) or 'a process that is just ending'}",
                "wait for it, or end it, then try again; `specpilot status` shows what it does.",
            ) from None
        words = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        with suppress(OSError):  # a full disk keeps nobody from the lock, only its name from those who meet it
            file.truncate(0)
            os.write(file.fileno(), words.encode())
        self._file = file
        return self

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @staticmethod
    def holder(run_dir: Path) -> str | None:
        """Who works on the run now, in words; None if nobody does."""
        try:
            with (run_dir / "run.lock").open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read() or "another process"
        except FileNotFoundError:
            pass
        return None
