"""A whole decode pass of a dense 28 B decoder (Muse-Glimmer-30B's matrices) in one CUDA graph: library BF16 against W12.

    PYTHONPATH=. python experiments/w12/decode.py OUT.json

Random weights (sigma 0.02; nothing but time is learned from them), 52 layers of 13 distinct ones used four times each (12 GB in
BF16, far beyond any cache), attention over 512 cached tokens with torch's own kernel, one request, m rows: 1 is
autoregressive decoding, 8 and 16 are the verification of a block. Three engines, replayed in turn:

* `library`: torch, elementwise work and norms compiled, the matrices fused as far as W12's are.
* `w12`: the same operations, each product replaced by its W12 layer.
* `w12 fused`: residual, SiLU and greedy token inside the products, this folder's norm, dependent launches.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from plain import EPS, add_and_norm, gaussian, greedy, normed, silu_times
from torch import Tensor

from specpilot.kernels.w12.linear import W12GateUp, W12Head, W12Linear, from_linear

HIDDEN, INTER, HEADS, KV_HEADS, HEAD, VOCAB = 6656, 19968, 32, 2, 128, 202048
DISTINCT, TIMES, CONTEXT = 13, 4, 512
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


@dataclass
class Layer:
    """Weights of one layer, in both forms."""

    before: Tensor
    after: Tensor
    mixed: Tensor  # q, gate, k, v
    out: Tensor
    gate_up: Tensor
    down: Tensor
    packed: dict[str, W12Linear]
    packed_gate_up: W12GateUp
    cache: Tensor  # [2, KV_HEADS, CONTEXT, HEAD]


def make_layer() -> Layer:
    """Random weights, packed."""
    shapes = {
        "mixed": (2 * Q + 2 * KV, HIDDEN),
        "out": (HIDDEN, Q),
        "down": (HIDDEN, INTER),
        "gate_up": (2 * INTER, HIDDEN),
    }
    dense = {name: gaussian(*shape) for name, shape in shapes.items()}
    return Layer(
        before=1 + gaussian(HIDDEN),
        after=1 + gaussian(HIDDEN),
        packed={name: W12Linear(from_linear(weight), dependent=True) for name, weight in dense.items()},
        packed_gate_up=W12GateUp(*dense["gate_up"].chunk(2), dependent=True),
        cache=torch.randn(2, KV_HEADS, CONTEXT, HEAD, device="cuda").bfloat16(),
        **dense,
    )


@torch.compile(dynamic=False)
def gated(found: Tensor, gate: Tensor) -> Tensor:
    """[KV_HEADS, heads of one x m, HEAD] to [m, Q], times the sigmoid of [m, Q]."""
    m = gate.shape[0]
    return found.view(KV_HEADS, -1, m, HEAD).permute(2, 0, 1, 3).reshape(m, Q) * torch.sigmoid(gate)


def attend(mixed: Tensor, layer: Layer, mask: Tensor) -> Tensor:
    """[m, 2 Q + 2 KV] to [m, Q]: the last m places of the cache are these rows'. Heads of one key lie in one batch."""
    m = mixed.shape[0]
    q, gate, k, v = mixed.split([Q, Q, KV, KV], dim=-1)
    for i, new in enumerate((k, v)):
        layer.cache[i, :, CONTEXT - m :] = new.view(m, KV_HEADS, HEAD).transpose(0, 1)
    heads = q.view(m, KV_HEADS, HEADS // KV_HEADS, HEAD).permute(1, 2, 0, 3).reshape(1, KV_HEADS, -1, HEAD)
    keys, values = layer.cache.unsqueeze(1)
    return gated(F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask)[0], gate)


Pass = Callable[[Tensor, Tensor], Tensor]


def plain_pass(layers: list[Layer], last: Tensor, linear: Callable[[Layer, str, Tensor], Tensor]) -> Pass:
    """Compiled operations of torch around whatever `linear` multiplies with; hidden states to normed hidden states."""

    def run(h: Tensor, mask: Tensor) -> Tensor:
        x = F.rms_norm(h, (HIDDEN,), layers[0].before, EPS)
        gains = [layer.before for layer in layers[1:]] + [last]
        for layer, gain in zip(layers, gains, strict=True):
            h, x = add_and_norm(h, linear(layer, "out", attend(linear(layer, "mixed", x), layer, mask)), layer.after)
            h, x = add_and_norm(h, linear(layer, "down", silu_times(linear(layer, "gate_up", x))), gain)
        return x

    return run


def fused_pass(layers: list[Layer], last: Tensor) -> Pass:
    """Everything that the W12 kernels can take in."""

    def run(h: Tensor, mask: Tensor) -> Tensor:
        for layer in layers:
            h = layer.packed["out"](attend(layer.packed["mixed"](normed(h, layer.before)), layer, mask), residual=h)
            h = layer.packed["down"](layer.packed_gate_up(normed(h, layer.after)), residual=h)
        return normed(h, last)

    return run


def attention_only(layers: list[Layer], mixed: Tensor, mask: Tensor) -> Tensor:
    """What all three share, to know its part of a pass."""
    for layer in layers:
        found = attend(mixed, layer, mask)
    return found


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one pass and where its result lands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
    return graph, result


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one pass."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def main() -> None:
    """Time, compare, record."""
    torch.manual_seed(0)
    layers = [make_layer() for _ in range(DISTINCT)] * TIMES
    last, head = 1 + gaussian(HIDDEN), gaussian(VOCAB, HIDDEN)
    packed_head = W12Head(from_linear(head), dependent=True)
    found: dict[str, dict[str, object]] = {}
    for m in (1, 8, 16):
        h = torch.randn(m, HIDDEN, device="cuda").bfloat16()
        rows = torch.arange(m, device="cuda").unsqueeze(1)
        mask = torch.arange(CONTEXT, device="cuda").unsqueeze(0) <= CONTEXT - m + rows
        mask = mask.repeat(HEADS // KV_HEADS, 1)
        ends: dict[str, tuple[Pass, Callable[[Tensor], Tensor]]] = {
            "library": (
                plain_pass(layers, last, lambda layer, name, x: F.linear(x, getattr(layer, name))),
                partial(greedy, head=head),
            ),
            "w12": (
                plain_pass(layers, last, lambda layer, name, x: layer.packed[name](x)),
                lambda x: packed_head.logits(x).argmax(-1),
            ),
            "w12 fused": (fused_pass(layers, last), packed_head.argmax),
        }
        runs = {
            name: partial(lambda body, end, h, mask: end(body(h, mask)), *both, h, mask) for name, both in ends.items()
        }
        mixed = torch.randn(m, 2 * Q + 2 * KV, device="cuda").bfloat16()
        runs["attention alone"] = partial(attention_only, layers, mixed, mask)
        hidden = {name: body(h, mask).double() for name, (body, _) in ends.items()}
        apart = {
            name: float((value - hidden["library"]).norm() / hidden["library"].norm()) for name, value in hidden.items()
        }
        graphs = {name: capture(run) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(21):
            for name, (graph, _) in graphs.items():
                took = replay(graph)
                if turn:  # the first replay uploads the graph
                    times[name].append(took)
        median = {name: statistics.median(values) for name, values in times.items()}
        spread = {name: (min(values), max(values)) for name, values in times.items()}
        tokens = {name: graphs[name][1].tolist() for name in ends}
        print(f"m={m}", {name: round(value, 3) for name, value in median.items()}, flush=True)
        print(
            "  library over",
            {n: round(median["library"] / t, 3) for n, t in median.items()},
            "hidden apart",
            apart,
            tokens,
        )
        found[str(m)] = {
            "ms": median,
            "least and most": spread,
            "hidden apart from the library's": apart,
            "tokens": tokens,
        }
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "card": torch.cuda.get_device_name()}
    Path(sys.argv[1]).write_text(json.dumps({"versions": versions, "passes": found}, indent=1))


if __name__ == "__main__":
    main()
