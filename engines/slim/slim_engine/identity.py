"""What is being served: digest of the tree, commit, weights, tunables. The evidence that a measurement was of what it says."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from slim_engine import __version__
from slim_engine.counters import COUNTERS
from slim_engine.loading import Loaded
from slim_engine.tunables import TREE

_SKIP = {"__pycache__", ".git"}


def tree_digest(tree: Path = TREE) -> str:
    """sha256 over the sorted relative paths and contents of the tree's files, caches and git data left out."""
    total = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file() and not _SKIP & set(p.relative_to(tree).parts)):
        total.update(f"{path.relative_to(tree).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


class Identity:
    """Fixed facts, taken at start-up, before a file can change under the server."""

    def __init__(self, loaded: Loaded, variant: str, threads: int) -> None:
        """threads: torch's in the engine thread, where alone they compute."""
        options, drafter = loaded.options, loaded.models.drafter
        self._loaded = loaded
        self._digest = tree_digest()
        self._variant = variant
        self._threads = threads
        self._drafter: dict[str, Any] = {
            "method": options.method,
            "path": None,
            "sha256": loaded.drafter_sha256,
            "block_size": None,
        }
        if drafter is not None:
            self._drafter["block_size"] = drafter.max_drafts + 1
            self._drafter["path"] = options.drafter if options.method == "dflash" else None

    def server_info(self) -> dict[str, Any]:
        """Answer of GET /server_info. accepted_length: tokens committed per decode round and request, bonus token included."""
        loaded = self._loaded
        rounds = COUNTERS.get("rounds")
        return {
            "engine": "slim",
            "version": __version__,
            "commit": os.environ.get("SPECPILOT_COMMIT"),
            "tree_digest": self._digest,
            "variant": self._variant,
            "compute": loaded.options.compute,
            "kv_cache_dtype": "float32",  # of kv.py; whoever stores it narrower says so here, and the cost model counts fewer bytes
            "threads": self._threads,
            "torch": torch.__version__,
            "max_len": loaded.max_len,
            "max_requests": loaded.options.max_requests,
            "target": {
                "path": str(loaded.options.target),
                "sha256": loaded.target_sha256,
                "architecture": loaded.config.architecture,
                "vocab_size": loaded.config.vocab_size,
            },
            "drafter": self._drafter,
            "tunables": dict(loaded.tunables),
            "counters": COUNTERS.snapshot(),
            "accepted_length": COUNTERS.get("committed_tokens") / rounds if rounds else None,
        }
