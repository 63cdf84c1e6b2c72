"""Does the interval hold its level when looked at after every pair? Table over kinds of noise, by simulation.

    python experiments/measurement/coverage.py [--repetitions 20000] [--out FILE]

Each row: share of simulated comparisons (40 pairs, looked at from the second on) in which the interval excluded the
true effect at least once; it should not exceed the level. `drift`: log-speed of the machine is AR(1) from leg to leg
with the given correlation, pairs in ABBA order. `skewed` (exponential) is there to show the limit: log-ratios of
two exchangeable sides are symmetric, skewed ones are outside what the interval promises. `fixed-n t` peeked at the
same way shows what is avoided.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from specpilot.evaluation.stats import confidence_sequence

PAIRS = 40
LEVELS = (0.05, 0.02, 0.005)

Noise = Callable[[np.random.Generator, int], np.ndarray]


def drift(correlation: float) -> Noise:
    """ABBA log-ratios under AR(1) log-speed (sd 0.2) and independent noise (sd 0.02) per leg."""

    def draw(rng: np.random.Generator, rows: int) -> np.ndarray:
        speed = np.empty((rows, 2 * PAIRS))
        speed[:, 0] = rng.normal(size=rows) * 0.2
        for leg in range(1, 2 * PAIRS):
            fresh = rng.normal(size=rows) * 0.2 * math.sqrt(1 - correlation**2)
            speed[:, leg] = correlation * speed[:, leg - 1] + fresh
        speed += rng.normal(size=speed.shape) * 0.02
        return (speed[:, 1::2] - speed[:, 0::2]) * np.where(np.arange(PAIRS) % 2 == 0, 1, -1)

    return draw


def _hiccups(rng: np.random.Generator, rows: int) -> np.ndarray:
    spikes = (rng.random((rows, PAIRS)) < 0.1) * rng.choice([-0.5, 0.5], size=(rows, PAIRS))
    return rng.normal(size=(rows, PAIRS)) * 0.03 + spikes


NOISES: dict[str, Noise] = {
    "gaussian": lambda rng, rows: rng.normal(size=(rows, PAIRS)),
    "student-5": lambda rng, rows: rng.standard_t(5, size=(rows, PAIRS)),
    "student-3": lambda rng, rows: rng.standard_t(3, size=(rows, PAIRS)),
    "laplace": lambda rng, rows: rng.laplace(size=(rows, PAIRS)),
    "hiccups": _hiccups,
    "drift 0.3": drift(0.3),
    "drift 0.5": drift(0.5),
    "drift 0.8": drift(0.8),
    "drift 0.95": drift(0.95),
    "drift 0.99": drift(0.99),
    "skewed": lambda rng, rows: rng.exponential(size=(rows, PAIRS)) - 1.0,
}


def radii(level: float) -> np.ndarray:
    """Half-width over the divisor-n standard deviation for 1..PAIRS pairs, from the shipped function."""
    shape = [np.array([1.0, -1.0] * (n // 2) + [0.0] * (n % 2)) for n in range(1, PAIRS + 1)]
    return np.array(
        [
            math.inf if n < 2 else confidence_sequence(list(x), level).high / x.std()
            for n, x in enumerate(shape, start=1)
        ]
    )


def ever_missed(x: np.ndarray, radius: np.ndarray) -> float:
    """Share of rows in which |mean| exceeded radius times the divisor-n standard deviation at any n from 2."""
    n = np.arange(1, PAIRS + 1)
    mean = np.cumsum(x, axis=1) / n
    sd = np.sqrt(np.maximum(np.cumsum(x * x, axis=1) / n - mean**2, 1e-18))
    return float((np.abs(mean) > radius * sd)[:, 1:].any(axis=1).mean())


def main() -> None:
    """Prints the table and stores it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    n = np.arange(1, PAIRS + 1)
    peeked = {a: np.append(math.inf, student.ppf(1 - a / 2, n[1:] - 1) / np.sqrt(n[1:] - 1)) for a in LEVELS}
    print(f"{'noise':12s}" + "".join(f"{a:>10}" for a in LEVELS))
    for name, noise in NOISES.items():
        x = noise(np.random.default_rng(arguments.seed), arguments.repetitions)
        table[name] = {str(a): ever_missed(x, radii(a)) for a in LEVELS}
        print(f"{name:12s}" + "".join(f"{value:10.4f}" for value in table[name].values()))
        if name == "gaussian":
            table["fixed-n t, peeked"] = {str(a): ever_missed(x, peeked[a]) for a in LEVELS}
    print("fixed-n t   " + "".join(f"{value:10.4f}" for value in table["fixed-n t, peeked"].values()))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"pairs": PAIRS, "repetitions": arguments.repetitions, "seed": arguments.seed, "missed": table}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
