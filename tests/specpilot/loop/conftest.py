"""What all runs of the made-up engine here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specpilot.loop import finish


@pytest.fixture(autouse=True, scope="session")
def _short_closing() -> Iterator[None]:
    """Four prompts close a run instead of eight: nothing here depends on how narrow the closing intervals are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(finish, "CLOSING_PROMPTS", 4)
        yield
