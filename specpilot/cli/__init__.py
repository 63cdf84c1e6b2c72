"""The front door: `specpilot ...`. Each file holds one command group; the work is done in the rooms.

Rooms are imported inside the commands, so that `specpilot status` does not pay for the engine client, and a
broken room does not take the others down.
"""

from __future__ import annotations

from specpilot.cli.app import main

__all__ = ["main"]
