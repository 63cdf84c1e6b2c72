"""The import rule of docs/architecture.md, seen from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["memory", "agents"])
def test_room_imports_neither_torch_nor_the_rooms_above_it(room):
    code = f"import specpilot.{room}, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("specpilot.")}
    allowed = {"memory"} if room == "memory" else {"memory", "agents", "costmodel"}
    assert {name.split(".")[1] for name in ours} <= allowed
    assert not {"torch", "optuna", "httpx"} & set(loaded)
