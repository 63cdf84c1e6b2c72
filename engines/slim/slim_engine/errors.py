"""The errors a user can cause. The server turns them into one line and an exit code, or into a 4xx answer."""

from __future__ import annotations


class SlimError(Exception):
    """Something the user can put right: the message says what, where and how."""


class CheckpointError(SlimError):
    """A checkpoint folder is missing, incomplete or of a kind this engine does not run."""


class TunableError(SlimError):
    """tunables.toml and engine.toml disagree."""


class RequestError(SlimError):
    """A request cannot be served as asked (HTTP 400)."""
