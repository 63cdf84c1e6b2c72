"""Re-check the evidence of this engine on this machine: `verify.py [--checksums] [--expect SHA256] [--prompts N]`.

First every file against evidence/SHA256SUMS. Then *token forcing*: the final engine answers hidden prompts
greedily, and every token is fed to the stock engine decoding one token at a time (the reference). Each must be
its argmax, or a near-tie: within the gap that the run calibrated, and no more often than it calibrated.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path

import layout  # type: ignore[import-not-found]

SUMS = "evidence/SHA256SUMS"
ENTRY = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>\S.*)")
"""A line of SHA256SUMS, as `sha256sum` writes it."""
FREE = {".venv", ".cache", "models"}
"""Folders that the scripts fill on the user's machine; not part of the evidence."""
UNLIKELY = 0.001
"""So many near-ties are refused when that many or more have a smaller probability at the calibrated share (the gate's rule)."""


def main() -> None:
    """Exit code 0: everything holds; 8: a file was changed; 7: a token is not the reference's."""
    parser = argparse.ArgumentParser(prog="verify.sh", description="Re-check this engine's evidence on this machine.")
    parser.add_argument("--checksums", action="store_true", help="check the files only; needs no engine")
    parser.add_argument("--expect", metavar="SHA256", help=f"digest of {SUMS}, as the export printed it")
    parser.add_argument("--prompts", type=int, default=6, help="hidden prompts to answer (default 6)")
    parser.add_argument("--tokens", type=int, help="new tokens per prompt (default: as in the run)")
    options = parser.parse_args()
    check_files(options.expect)
    if not options.checksums:
        force(options.prompts, options.tokens)


def check_files(expect: str | None) -> None:
    """Every listed file is there and unchanged, and no other file is."""
    path = layout.HOME / SUMS
    if not path.is_file():
        layout.fail(layout.TAMPERED, f"{SUMS} is missing", "take a fresh copy of the export.")
    digest = layout.file_sha256(path)
    if expect is not None and digest != expect.lower():
        layout.fail(layout.TAMPERED, f"{SUMS} has SHA-256 {digest}, expected {expect.lower()}")
    listed: dict[str, str] = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), start=1):
        entry = ENTRY.fullmatch(line)
        if entry is not None and entry["name"] not in listed:
            listed[entry["name"]] = entry["digest"]
            continue
        found = "empty" if not line.strip() else "a repetition" if entry else f"{line[:100]!r}"
        layout.fail(
            layout.TAMPERED,
            f"{SUMS} was changed: line {number} is {found}; each line is a digest, two spaces and a file's name, once",
            "take a fresh copy of the export.",
        )
    problems = [f"{name}: {problem}" for name in sorted(listed) if (problem := _problem(name, listed[name]))]
    problems += [f"{name}: is not part of the export" for name in sorted(_present() - set(listed) - {SUMS})]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        layout.fail(layout.TAMPERED, "the export was changed: " + "; ".join(problems[:5]) + more, "take a fresh copy.")
    print(f"files: {len(listed)} match {SUMS} (its SHA-256 is {digest})", flush=True)


def _problem(name: str, expected: str) -> str:
    path = layout.HOME / name
    if path.is_symlink() or not path.is_file():
        return "is missing"
    return "" if layout.file_sha256(path) == expected else "was changed"


def _present() -> set[str]:
    found = set()
    for path in layout.HOME.rglob("*"):
        inside = path.relative_to(layout.HOME)
        if inside.parts[0] in FREE or "__pycache__" in inside.parts:
            continue
        if path.is_file() or path.is_symlink():
            found.add(inside.as_posix())
    return found


def binomial_tail(count: int, total: int, share: float) -> float:
    """Probability of `count` or more successes in `total` trials of probability `share`."""
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    choose = math.lgamma(total + 1)
    terms = (
        math.exp(
            choose
            - math.lgamma(k + 1)
            - math.lgamma(total - k + 1)
            + k * math.log(share)
            + (total - k) * math.log1p(-share)
        )
        for k in range(count, total + 1)
    )
    return min(1.0, math.fsum(terms))


def force(count: int, tokens: int | None) -> None:
    """Token forcing on hidden prompts."""
    import servers  # type: ignore[import-not-found]

    info = layout.manifest()
    calibration = json.loads((layout.HOME / "evidence" / "calibration.json").read_text(encoding="utf-8"))
    if not calibration:
        layout.fail(layout.TAMPERED, "evidence/calibration.json is empty: the run never calibrated its gate")
    epsilon, limit = float(calibration["epsilon"]), float(calibration["near_tie_rate_limit"])
    wanted = tokens or int(info["output_tokens"])
    if count < 1 or wanted < 1:
        layout.fail(layout.INVALID, "--prompts and --tokens must be at least 1")
    prompts = servers.load_prompts(info, "hidden", count)
    with servers.started(info, ["final"]) as (final,):
        final.thaw()
        answers = []
        for ids in prompts:
            answers.append(final.generate(ids, wanted).ids)
            print(f"  answered {len(answers)}/{count}", flush=True)
    exact = near = violations = 0
    worst = 0.0
    first = ""
    with servers.started(info, ["reference"]) as (reference,):
        reference.thaw()
        for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
            for place, (token, best, gap) in enumerate(reference.score([*ids, *answer], len(ids))):
                worst = max(worst, gap)
                if token == best and gap >= 0:
                    exact += 1
                elif 0 <= gap <= epsilon:
                    near += 1
                else:
                    violations += 1
                    first = (
                        first
                        or f"prompt {number}, token {place}: emitted {token}, reference {best}, gap {gap:.4f} nats"
                    )
            print(f"  prompt {number}/{count}: {exact} exact, {near} near-ties, {violations} violations", flush=True)
    total = exact + near + violations
    print(
        f"token forcing: {total} tokens: {exact} exact, {near} near-ties (gap at most {epsilon:g} nats), "
        f"{violations} violations; largest gap {worst:.4f} nats"
    )
    if violations:
        layout.fail(layout.DIFFERS, f"{violations} tokens are not what the target would emit; first: {first}")
    if binomial_tail(near, total, limit) < UNLIKELY:
        layout.fail(
            layout.DIFFERS, f"{near} near-ties in {total} tokens are more than the calibrated share of {limit:g}"
        )
    print("the final engine emitted exactly what the target model would")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
