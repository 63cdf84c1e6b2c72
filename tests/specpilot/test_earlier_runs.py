"""What earlier versions wrote into journals is still read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from specpilot.contracts import StopReason
from specpilot.deployment import parse_deployment
from specpilot.loop.records import RunMeta
from tests.specpilot.test_deployment import minimal

META = {
    "run_id": "20261130-094253-d-aaaa",
    "deployment_name": "d",
    "deployment_path": "/d/deployment.yaml",
    "created": "2026-11-30T09:42:53+0000",
    "secret": "00ff",
    "version": "0.1.0",
    "memory_url": "sqlite:////m.db",
}


def test_a_runs_identity_with_a_field_that_is_no_more() -> None:
    assert RunMeta.model_validate(META | {"options": {}}) == RunMeta.model_validate(META)
    assert RunMeta.model_validate(META).model_dump() == META
    with pytest.raises(ValidationError, match="secret"):
        RunMeta.model_validate({key: value for key, value in META.items() if key != "secret"})


def test_a_deployment_that_names_money_limits_can_still_be_read() -> None:
    """Journals hold the deployment with all its keys; a limit that is refused today must not lock a run of yesterday."""
    data = minimal() | {"budget": {"rounds": 2, "wall_clock_minutes": 15.0, "usd": 3.5, "tokens": None}}
    assert parse_deployment(yaml.safe_dump(data), Path("/d")).budget.usd == 3.5


def test_reasons_that_a_journal_may_hold() -> None:
    """All that any version ever wrote there; the three that can be resumed owe something."""
    written = "rounds-done no-headroom budget-wall-clock interrupted infrastructure gate-unsound".split()
    assert [reason.value for reason in StopReason] == written
    assert [reason.value for reason in StopReason if not reason.complete] == written[3:]
