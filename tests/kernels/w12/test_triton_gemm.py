"""The Triton product on tiles: interpreted on a CPU, with float32 operands, against the library on the true weight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECK = """
import torch
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.layout import tile_w12
from specpilot.kernels.w12.triton_gemm import matmul

generator = torch.Generator().manual_seed(0)
weight = (torch.randn(40, 128, generator=generator) * 0.02).bfloat16()
weight.view(-1)[torch.tensor([0, 1, 700, 5119])] = 1e4
crowded = (torch.randn(16, 64, generator=generator).exp() ** 9).bfloat16()
for w, record in ((weight, 16), (weight, 32), (crowded, 16)):
    x = torch.randn(3, w.shape[1], generator=generator)
    y = matmul(tile_w12(encode(w), record_bytes=record), x, exact32=True)
    torch.testing.assert_close(y, x @ w.float().T, rtol=1e-5, atol=1e-5)
print("agree")
"""


def test_agrees_with_the_library_under_the_interpreter() -> None:
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    if "numpy" in done.stderr and "interpreter" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy")
    assert done.stdout.strip() == "agree", done.stderr[-2000:]
