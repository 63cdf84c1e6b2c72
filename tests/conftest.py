"""What every test gets: a home folder of its own, and none of the developer's settings."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A suite started in the background inherits an ignored Ctrl-C, and so would the commands that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's `~/.specpilot` or memory."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SPECPILOT_HOME", str(home))
    monkeypatch.delenv("SPECPILOT_MEMORY_URL", raising=False)
    monkeypatch.setenv("SPECPILOT_LEASE_DIR", str(home))  # tests do not wait for real runs on this machine
    yield home
