"""Planted cheats: real candidates that look faster without being it, one file each under `corpus/`.

Each is planted on a fresh worktree of the stock tree as a module of its own plus one import line, so that it goes on
applying when the engine is edited. None of this code is imported here; it runs only inside an engine process.
"""

from __future__ import annotations

from specpilot.gate.cheats.corpus import Cheat, Edit, Stage, load_cheats, plant, select

__all__ = ["Cheat", "Edit", "Stage", "load_cheats", "plant", "select"]
