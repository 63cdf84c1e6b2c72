"""One launch of every kind at small shapes, for compute-sanitizer (see check.sh).

python experiments/w12/sanitize.py [no-clusters]
"""

from __future__ import annotations

import sys

import torch

from specpilot.kernels.w12 import gemm
from specpilot.kernels.w12.format import encode
from specpilot.kernels.w12.gemm import Shape
from specpilot.kernels.w12.layout import tile_bf16, tile_w12

SHAPES = (
    Shape(5, split=2, depth=2, stage_subtiles=2),
    Shape(4, rows=2, boxed=False),
    Shape(3, depth=4, stage_subtiles=4, stages=2),
    Shape(3, split=2, boxed=False),
    Shape(5, grouped=True),
    Shape(3, split=2, depth=2, grouped=True, boxed=False),
)


def main() -> None:
    """Launch, compare roughly, say so."""
    torch.manual_seed(0)
    shapes = [shape for shape in SHAPES if shape.split == 1 or "no-clusters" not in sys.argv]
    for weight in (torch.randn(250, 640, device="cuda") * 0.02, torch.randn(128, 384, device="cuda") ** 9):
        weight = weight.bfloat16()
        for tiles in (tile_w12(encode(weight)), tile_bf16(weight)):
            dense = torch.empty_like(weight)
            gemm.expand(tiles, dense)
            for m, shape in ((m, s) for m in (1, 16, 40) for s in shapes):
                for dependent in (False, True):
                    x = torch.randn(m, weight.shape[1], device="cuda").bfloat16()
                    y = torch.empty(m, weight.shape[0], dtype=torch.bfloat16, device="cuda")
                    gemm.launch(tiles, x, y, shape, residual=y.zero_(), dependent=dependent)
                    reference = x.double() @ weight.double().T
                    assert ((y.double() - reference).norm() / reference.norm()).item() < 4e-3
    weight = (torch.randn(1056, 256, device="cuda") * 0.02).bfloat16()
    x = torch.randn(3, 256, device="cuda").bfloat16()
    gemm.launch(tile_w12(encode(weight), paired=True), x, x.new_empty(3, 528), Shape(5), gemm.SILU)
    best = (torch.empty(20000, device="cuda"), torch.empty(20000, dtype=torch.int32, device="cuda"))
    index = torch.empty(3, 16, dtype=torch.int64, device="cuda")
    blocks = gemm.launch(tile_w12(encode(weight)), x, None, Shape(5), gemm.BEST, best=best)
    gemm.finish_best(best, blocks, None, index)
    gemm.add_norm(x, x[0], torch.empty_like(x), residual=x, total=torch.empty_like(x))
    torch.cuda.synchronize()
    print("all kinds launched")


if __name__ == "__main__":
    main()
