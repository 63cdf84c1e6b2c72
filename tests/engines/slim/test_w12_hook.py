"""W12 layers in the engine, swapped in by name through kernels/w12/engine_hook.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch

from specpilot.kernels.w12 import engine_hook
from tests.engines.slim.conftest import TREE
from tests.engines.slim.support import PROMPT, engine, free_port, greedy, run, wait_until_up

ROOT = TREE.parents[1]


def hook(*arguments: str, cwd: Path = TREE) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}  # --threads is what counts
    command = [sys.executable, "-m", "specpilot.kernels.w12.engine_hook", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def threads_of(process: subprocess.Popen[str]) -> int:
    """How many threads the process has; 0 where the system does not tell."""
    folder = Path(f"/proc/{process.pid}/task")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_the_served_engine_gives_the_tokens_of_the_stock_one(llama: Path, drafter: Path) -> None:
    port = free_port()
    process = hook("--", "--target", str(llama), "--drafter", str(drafter), "--port", str(port), "--threads", "1")
    url = wait_until_up(process, port)
    body = {"input_ids": PROMPT, "sampling_params": greedy(40)}
    before = threads_of(process)
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    after = threads_of(process)
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[0]
    stock = run(engine(llama, drafter), [PROMPT], max_new_tokens=40, temperature=0.0, ignore_eos=True)[0]
    assert answer["output_ids"] == stock.output_ids
    assert "w12: 16 layers" in told, "four matrices in each of four layers, neither the head nor the drafter"
    assert after == before, "one thread needs no team"


def test_a_swapped_layer_computes_the_same_product() -> None:
    weight = (torch.randn(48, 64) * 0.05).bfloat16()
    swapped = engine_hook.Swapped(lambda *_: "the engine's own", lambda name: name == "o")
    assert swapped(weight, "qkv", "float32", 8) == "the engine's own" == swapped(weight.float(), "o", "float32")
    layer = swapped(weight, "o", "float32", 8)
    x = torch.randn(3, 64)
    assert (layer.name, layer.in_features, layer.out_features) == ("o", 64, 48)
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert str(swapped).startswith("w12: 1 layers, 1")


def test_it_must_come_before_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, user = ModuleType("made_up.linear"), ModuleType("made_up.target")
    linear.make_linear = user.make_linear = lambda *_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up.linear", linear)
    engine_hook.install(linear, lambda name: True)
    linear.make_linear = user.make_linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up.target", user)
    with pytest.raises(RuntimeError, match="made_up.target took make_linear before"):
        engine_hook.install(linear, lambda name: True)


def test_wrong_use_is_one_line_and_a_code(tmp_path: Path) -> None:
    for arguments, cwd, words in (
        (["--layers", "("], TREE, "no regular expression"),
        (["--"], tmp_path, "folder of an engine tree"),
    ):
        process = hook(*arguments, cwd=cwd)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 2 and words in said and "Traceback" not in said
