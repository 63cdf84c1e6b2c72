"""The matrices that one decoding pass of each target reads: (name, N, K, how often, epilogue).

Matrices of one input are one launch, for the library as well (qkv and z of the recurrent layers; q, gate, k and v;
gate and up). The tiny in_proj_a and in_proj_b (48 rows) stay in BF16 and are left out on both sides, as are attention,
norms and the recurrence.
"""

from __future__ import annotations

MODELS: dict[str, list[tuple[str, int, int, int, str]]] = {
    "Qwen3.8-27B": [
        ("recurrent qkv+z", 16384, 5120, 48, "store"),
        ("recurrent out", 5120, 6144, 48, "store"),
        ("attention qkv", 14336, 5120, 16, "store"),
        ("attention out", 5120, 6144, 16, "store"),
        ("gate+up", 34816, 5120, 64, "store"),
        ("down", 5120, 17408, 64, "store"),
        ("head", 248320, 5120, 1, "store"),
    ],
    "Muse-Glimmer-30B": [
        ("attention q+gate+kv", 8704, 6656, 52, "store"),
        ("attention out", 6656, 4096, 52, "store"),
        ("gate+up", 39936, 6656, 52, "store"),
        ("down", 6656, 19968, 52, "store"),
        ("head", 202048, 6656, 1, "store"),
    ],
}


def matrices() -> list[tuple[int, int]]:
    """The distinct (N, K), smallest first."""
    found = {(n, k) for rows in MODELS.values() for _, n, k, _, _ in rows}
    return sorted(found, key=lambda nk: nk[0] * nk[1])
