"""The Triton product on tiles: interpreted on a CPU, with float32 operands, against the library on the true weight.

And compiled for cards that are not there: a kernel that Triton refuses is found here, one that is wrong on a card is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert done.stdout.strip() == "agree", done.stderr[-2000:]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specpilot.kernels.w12 import triton_gemm

kernel = triton_gemm._gemm
types = dict.fromkeys(kernel.arg_names, "i32") | {"data": "*i32", "overflow": "*i32", "x": "*bf16", "y": "*bf16"}
types |= {"BLOCK_M": "constexpr", "EXACT32": "constexpr"}
source = ASTSource(kernel, types, {"BLOCK_M": int(sys.argv[2]), "EXACT32": False})
made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
assert made.asm["cubin"].startswith(b"\\x7fELF")
print(f"sm_{sys.argv[1]}" in made.asm["ptx"], "mma" in made.asm["ptx"] and ".bf16.bf16" in made.asm["ptx"])
"""


@pytest.mark.parametrize("card", [80, 90, 120])
@pytest.mark.parametrize("tokens", [16, 64])
def test_compiles_for_cards_that_are_not_there(card: int, tokens: int, tmp_path: Path) -> None:
    """To machine code, with BF16 products on the tensor cores. In a process of its own, with a cache of its own."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", COMPILE, str(card), str(tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", done.stderr[-2000:]
