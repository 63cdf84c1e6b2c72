"""The engine hook: serve an engine tree with chosen layers in W12, swapped in by name.

    cd ENGINE_TREE && python -m specpilot.kernels.w12.engine_hook [--layers REGEX] -- --target CHECKPOINT --port 30000 ...

An engine such as `slim` asks one function, `slim_engine.linear.make_linear`, for everything that it multiplies by; this
puts W12's in its place before anything has imported it, and then runs the engine's own server with its own arguments. The
tree stays as it is, so a mechanism's patch still applies to it. Mechanisms that multiply elsewhere (`native-forward`) are
not reached. On a CPU this pays at one or two rows (experiments/w12/cpu.md): for `--no-speculation`, not for a block's
verification. On a GPU `linear.swap` does the same for models made of `nn.Linear`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .container import policy
from .cpu.linear import CpuLinear
from .errors import MachineProblem
from .format import encode, exponent_counts

LAYERS = r"model\.layers\..*"
"""By default all matrices of the target's layers; the head of a tied checkpoint has too many escapes to gain."""
Make = Callable[..., Any]


class NamedLinear(CpuLinear):
    """A `CpuLinear` as engines want it: with the name of the weight."""

    name: str

    @classmethod
    def pack(cls, weight: Tensor, name: str) -> NamedLinear:
        """From bfloat16 [N, K]."""
        bases = policy.choose(exponent_counts(weight, policy.COUNTED_ROWS))
        layer = cls.from_planes(encode(weight, bases.row_block, base=bases.base))
        assert isinstance(layer, NamedLinear)
        layer.name = name
        return layer


class Swapped:
    """`make_linear` with the wanted layers taken over, and what it took."""

    def __init__(self, make: Make, wanted: Callable[[str], object]) -> None:
        self._make, self._wanted = make, wanted
        self.weights = self.nbytes = self.layers = 0

    def __call__(self, weight: Tensor, name: str, *rest: Any, **more: Any) -> Any:
        """weight: [N, K]. The engine's own layer unless it is bfloat16 and its name is wanted."""
        if weight.dtype != torch.bfloat16 or not self._wanted(name):
            return self._make(weight, name, *rest, **more)
        layer = NamedLinear.pack(weight, name)
        self.layers += 1
        self.weights += weight.numel()
        self.nbytes += layer.nbytes
        return layer

    def __str__(self) -> str:
        bits = f", {8 * self.nbytes / self.weights:.2f} bits read a weight" if self.weights else ""
        return f"w12: {self.layers} layers{bits}"


def install(linear: ModuleType, wanted: Callable[[str], object]) -> Swapped:
    """Put W12 into an engine's `linear` module. Raises RuntimeError if the engine was loaded from it already."""
    package = linear.__name__.rpartition(".")[0]
    bound = [name for name, module in sys.modules.items() if name.startswith(f"{package}.") and module is not linear]
    late = [name for name in bound if getattr(sys.modules[name], "make_linear", None) is linear.make_linear]
    if late:
        raise RuntimeError(f"{', '.join(late)} took make_linear before W12 was installed: install it first")
    linear.make_linear = swapped = Swapped(linear.make_linear, wanted)  # type: ignore[attr-defined]
    return swapped


def main() -> int:
    """Serve. Exit code 2 for a folder that is no engine tree or a bad pattern, 3 without a C++ compiler, else the engine's."""
    parser = argparse.ArgumentParser(prog="python -m specpilot.kernels.w12.engine_hook")
    parser.add_argument("--layers", default=LAYERS, metavar="REGEX", help=f"names to swap (default: {LAYERS})")
    parser.add_argument("engine", nargs=argparse.REMAINDER, help="-- and the arguments of the engine's server")
    given = parser.parse_args()
    try:
        wanted = re.compile(given.layers).fullmatch
        linear = importlib.import_module("slim_engine.linear")
        swapped = install(linear, wanted)
        from .cpu.build import library

        library()  # a missing compiler is told before a checkpoint is read
        server = importlib.import_module("slim_engine.server")
    except re.error as error:
        print(f"w12: --layers {given.layers!r} is no regular expression: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"w12: {error}: run this in the folder of an engine tree (it holds slim_engine/)", file=sys.stderr)
        return 2
    except MachineProblem as problem:
        print(f"w12: {problem.message}; {problem.hint}", file=sys.stderr)
        return 3
    code: int = server.main(given.engine[1:] if given.engine[:1] == ["--"] else given.engine)
    print(swapped)
    return code


if __name__ == "__main__":
    sys.exit(main())
