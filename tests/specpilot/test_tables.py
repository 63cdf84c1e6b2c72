"""Tables of the commands: whole ids where nobody sees columns."""

from __future__ import annotations

import pytest
from rich.table import Table

from specpilot.cli.tables import console


def test_an_id_stays_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    name = "20261130-155345-" + "a-long-name-of-a-deployment-" * 3
    table = Table("run", "state")
    table.add_row(name, "ended: rounds-done")
    console().print(table)
    assert f"{name}" in capsys.readouterr().out
