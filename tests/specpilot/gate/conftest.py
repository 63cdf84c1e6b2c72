"""One tiny real engine for all tests of this folder that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specpilot.gate.selftest import SelfTestContext

from .tiny import tiny_context


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SelfTestContext]:
    """Tiny target and DFlash drafter, greedy; the reference is started and calibrated."""
    with tiny_context(tmp_path_factory.mktemp("gate")) as made:
        yield made
