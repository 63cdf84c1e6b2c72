"""`kill -9` of the whole process group, then `specpilot resume`: the same end, nothing done twice, nothing left."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from specpilot.memory import MemoryStore
from specpilot.paths import JOURNAL_NAME
from tests.helpers.fake_server import Behaviour
from tests.helpers.killing import Started, run_with_kills, state_of
from tests.specpilot.loop.setting import fake_setting, patch_between, remember

STOCK = Behaviour(round_s=0.012)


def test_killed_three_times_ends_as_it_would_have(tmp_path: Path) -> None:
    deployment = fake_setting(tmp_path, STOCK)
    memory = f"sqlite:///{tmp_path / 'memory.sqlite'}"
    with MemoryStore(memory, seed_folder=None) as store:
        remember(store, "half-the-round", patch_between(STOCK, replace(STOCK, round_s=0.005)))
        remember(store, "lossy", patch_between(STOCK, replace(STOCK, round_s=0.003, wrong_every=4)))
    killed = run_with_kills(
        deployment.folder / "deployment.yaml",
        tmp_path / "run",
        [Started(4), Started(8), Started(12)],  # of 13: baselines, the first candidate, the closing session
        arguments=[],
        environment={"SPECPILOT_MEMORY_URL": memory},
    )
    assert killed.kills == [Started(4), Started(8), Started(12)]
    assert killed.exit_code == 0
    assert killed.repeated == {}
    assert killed.survivors == []
    state = state_of(tmp_path / "run")
    assert state.merged == ["half-the-round"]
    assert sorted(state.attempts.values()) == [("merged", None), ("rejected", "token-mismatch")]
    assert state.stop == "rounds-done"
    assert list((tmp_path / "run" / "worktrees").iterdir()) == []
    with MemoryStore(memory, seed_folder=None) as store:
        effects = {m.mechanism.name: len(m.effects) for m in store.mechanisms() if m.origin == "test"}
    assert effects == {"half-the-round": 1, "lossy": 1}
    rows = sqlite3.connect(tmp_path / "run" / JOURNAL_NAME).execute(
        "SELECT count(*) FROM processes WHERE ended_at IS NULL"
    )
    assert rows.fetchone() == (0,)
