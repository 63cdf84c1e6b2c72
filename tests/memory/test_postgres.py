"""The same store on PostgreSQL. Needs $SPECPILOT_TEST_POSTGRES, the URL of an empty database, and its driver."""

from __future__ import annotations

import math
import os
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from specpilot.memory import MemoryStore
from specpilot.memory.schema import Base

URL = os.environ.get("SPECPILOT_TEST_POSTGRES")
pytestmark = pytest.mark.skipif(URL is None, reason="SPECPILOT_TEST_POSTGRES is not set")


def test_migrates_once_stores_recalls_and_searches(mechanism, effect, query, tmp_path):
    openers = [threading.Thread(target=lambda: MemoryStore(URL, seed_folder=None).close()) for _ in range(4)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    engine = create_engine(URL)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()
    with MemoryStore(URL, seed_folder=None) as store:
        store.add(mechanism("w12", title="Lossless é 12-bit"), origin="x")
        sent = effect(high=math.inf)
        for _ in range(2):
            store.record_effect("w12", sent)
        store.record_recall("r", "w12", tried=True, accepted=True, ratio=1.5)
        assert store.get("w12").effects == [sent]
        assert [m.mechanism.name for m in store.search("LOSS 12-b")] == ["w12"] and store.search("nope") == []
        assert [item.name for item in store.recall(query())] == ["w12"]
        assert store.stats().helped == "recalled 1 times, tried 1, accepted 1, 1.50x on average when accepted"
        assert store.export(tmp_path / "m.json") == 1 and store.import_(tmp_path / "m.json") == (0, 0)
