"""Instructions per weight in the kernels' inner loop, read off the machine code (needs cuobjdump).

    PYTHONPATH=. python experiments/w12/sass.py [LIBRARY.so]

The inner loop handles one or two subtiles of 16 x 64 weights: 32 or 64 weights a lane. Counted is the path without patches; the
patch path (about one subtile in six on Gaussian weights) is given beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

PIPES = {
    "integer": ("LOP3", "PRMT", "SHF", "ISETP", "IADD3", "VIADD", "VIADDMNMX", "LEA", "SEL", "MOV"),
    "multiply-add": ("IMAD",),
    "tensor": ("HMMA", "HGMMA"),
    "shared memory": ("LDS", "LDSM", "STS", "LDL", "STL"),
}
MANNERS = {1: "one row tile", 2: "two row tiles", 4: "four warps together"}
Code = list[tuple[int, str]]


def functions(library: str) -> dict[str, Code]:
    """Mangled name to (address, instruction)."""
    text = subprocess.run(["cuobjdump", "-sass", library], capture_output=True, text=True, check=True).stdout
    found: dict[str, Code] = {}
    current: Code = []
    for line in text.splitlines():
        if name := re.search(r"Function : (\S+)", line):
            current = found.setdefault(name[1], [])
        elif instruction := re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line):
            current.append((int(instruction[1], 16), instruction[2]))
    return found


def target(instruction: str) -> int | None:
    """Where a branch goes."""
    found = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
    return int(found[1], 16) if found else None


def inner_loop(code: Code) -> tuple[Code, Code]:
    """(path without patches, patch path) of the innermost loop around all tensor-core instructions."""
    products = [address for address, text in code if re.search("HG?MMA", text)]
    loops = [(t, a) for a, text in code if (t := target(text)) is not None and t <= products[0] and a >= products[-1]]
    start, stop = min(loops, key=lambda loop: loop[1] - loop[0])
    body = [(a, text) for a, text in code if start <= a <= stop]
    skipped: set[int] = set()
    stores = [a for a, text in body if "STS.U16" in text]
    kept = products + [a for a, text in body if "PRMT" in text]  # decoding rotates, patching does not
    for a, text in body:
        t = target(text)
        if t is not None and a < t <= stop and any(a < s < t for s in stores) and not any(a < p < t for p in kept):
            skipped |= {b for b, _ in body if a < b < t}
    return [(a, s) for a, s in body if a not in skipped], [(a, s) for a, s in body if a in skipped]


def main() -> None:
    """Print one line per kernel."""
    if len(sys.argv) > 1:
        library = sys.argv[1]
    else:
        from specpilot.kernels.w12.library import compile_library

        library = str(compile_library("90a"))
    found = functions(library)
    for kind, tokens, manner in [(f, t, r) for f in (0, 1) for r in MANNERS for t in (1, 2, 4, 8)]:
        name = next(n for n in found if f"gemmILi{kind}ELi{tokens}ELi{manner}ELi0E" in n)
        path, patch = inner_loop(found[name])
        counts = Counter(re.sub(r"^@!?U?P\d+ +", "", text).split()[0].split(".")[0] for _, text in path)
        weights = 32 * (2 if manner == 2 else 1)
        shares = {pipe: sum(counts[op] for op in ops) / weights for pipe, ops in PIPES.items()}
        print(
            f"{('w12', 'bf16')[kind]:4} {8 * tokens:2} tokens, {MANNERS[manner]}: {len(path) / weights:.2f} a weight",
            ", ".join(f"{pipe} {share:.2f}" for pipe, share in shares.items()),
            f"; patch path {len(patch)}",
        )


if __name__ == "__main__":
    main()
