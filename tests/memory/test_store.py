"""Opening, writing and reading the store, also from many processes and with bad input."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from pydantic import ValidationError
from sqlalchemy import create_engine

from specpilot.memory import (
    Effect,
    MemoryStore,
    NoSuchMechanismError,
    SchemaTooNewError,
    StoreUnavailableError,
    TamperedError,
)
from specpilot.memory.schema import Base


def test_round_trip_keeps_every_field(store, mechanism, effect):
    original = mechanism(
        requires=["other"],
        preconditions={
            "hardware": {"kind": "cpu", "isa": ["avx2"]},
            "drafters": "any",
            "regime": {"max_concurrency": 4},
        },
        counters=["native_calls"],
        forbidden_counters=["fallbacks"],
        predicted_gain=1.4,
        notes="read me",
    )
    assert store.add(original, origin="run-1") == 1
    sent = effect(high=math.inf, gate={"passed": True}, environment={"threads": 2}, round=3, accepted_length_after=2.5)
    store.record_effect("bf16_gemm", sent)
    stored = store.get("bf16_gemm")
    assert stored.mechanism == original
    assert stored.mechanism.preconditions.drafters == []
    assert (stored.version, stored.status, stored.origin) == (1, "verified", "run-1")
    assert stored.effects == [sent]
    assert stored.created.utcoffset() is not None


def test_same_content_is_one_version_and_new_content_the_next(store, mechanism):
    assert store.add(mechanism(), origin="a") == 1
    assert store.add(mechanism(), origin="b") == 1
    assert store.add(mechanism(title="better"), origin="b") == 2
    assert store.get("bf16_gemm").mechanism.title == "better"
    assert store.get("bf16_gemm", 1).origin == "a"
    assert [m.version for m in store.mechanisms()] == [2]


def test_status_follows_the_evidence(store, mechanism, effect):
    store.add(mechanism(), origin="a")
    assert store.get("bf16_gemm").status == "stale"
    store.record_effect("bf16_gemm", effect(1.0, outcome="refuted", reason="no-gain"))
    assert store.get("bf16_gemm").status == "refuted"
    store.record_effect("bf16_gemm", effect(2.0))
    store.record_effect("bf16_gemm", effect(0.95, low=0.9, outcome="refuted", reason="no-gain"))
    assert store.get("bf16_gemm").status == "verified", "a refutation elsewhere does not erase a verified effect"


def test_recording_an_effect_twice_stores_it_once(store, mechanism, effect):
    store.add(mechanism(), origin="a")
    for _ in range(2):
        store.record_effect("bf16_gemm", effect())
    assert len(store.get("bf16_gemm").effects) == 1
    assert store.stats().effects == {"verified": 1}


def test_a_resumed_run_that_tells_the_same_again_stores_it_once(store, mechanism, effect):
    """It has no date then: the store gives one. What a profile added in between makes it no other effect; another run does."""
    store.add(mechanism(), origin="a")
    undated = effect(at=None, commit="c1", low=0.0, high=math.inf)
    store.record_effect("bf16_gemm", undated)
    store.record_realised("bf16_gemm", run="run-1", commit="c1", realised_ms=3.5)
    store.record_effect("bf16_gemm", undated)
    (stored,) = store.get("bf16_gemm").effects
    assert stored.realised_ms == 3.5 and stored.at is not None
    store.record_effect("bf16_gemm", undated.model_copy(update={"run": "run-2"}))
    assert len(store.get("bf16_gemm").effects) == 2


def test_the_time_after_the_change_is_added_once_and_to_the_right_effect(store, mechanism, effect):
    store.add(mechanism(), origin="a")
    for run, commit in (("run-1", "c1"), ("run-1", "c2"), ("run-2", "c1")):
        store.record_effect("bf16_gemm", effect(run=run, commit=commit, predicted_ms=4.0))
    for milliseconds in (3.5, 9.0):
        store.record_realised("bf16_gemm", run="run-1", commit="c1", realised_ms=milliseconds)
    store.record_realised("nobody", run="run-1", commit="c1", realised_ms=1.0)
    found = {(e.run, e.commit): (e.predicted_ms, e.realised_ms) for e in store.get("bf16_gemm").effects}
    assert found == {("run-1", "c1"): (4.0, 3.5), ("run-1", "c2"): (4.0, None), ("run-2", "c1"): (4.0, None)}
    assert store.contradictions("bf16_gemm") == [], "the checksum goes with it"


def test_unknown_name_is_refused_and_names_the_known(store, mechanism, effect):
    store.add(mechanism("w12"), origin="a")
    with pytest.raises(NoSuchMechanismError) as caught:
        store.record_effect("w13", effect())
    assert "w13" in caught.value.message and "w12" in caught.value.hint and caught.value.exit_code == 2


def test_recall_outcomes_are_counted_once_per_run(store, mechanism):
    for name in ("a1", "a2", "a3"):
        store.add(mechanism(name), origin="x")
    store.record_recall("run-1", "a1", tried=False, accepted=False)
    store.record_recall("run-1", "a1", tried=True, accepted=True, ratio=2.0)
    store.record_recall("run-1", "a1", tried=False, accepted=False)
    store.record_recall("run-1", "a2", tried=True, accepted=True, ratio=8.0)
    store.record_recall("run-1", "a3", tried=True, accepted=False, ratio=0.9)
    stats = store.stats()
    assert (stats.recalled, stats.tried, stats.accepted) == (3, 3, 2)
    assert stats.accepted_ratio == pytest.approx(4.0)
    assert (
        stats.helped
        == "recalled 3, tried 3, accepted 2, 4.00x on average when accepted (over all runs, a mechanism once per run)"
    )


@pytest.mark.parametrize("has_fts", [True, False])
def test_search_matches_every_word_by_prefix(store, mechanism, has_fts):
    store._has_fts = store._has_fts and has_fts
    store.add(mechanism("w12", title="Lossless 12-bit weights"), origin="a")
    store.add(mechanism("fused_norm", title="Fused norm", hypothesis="100% fewer launches"), origin="a")
    names = lambda words: [m.mechanism.name for m in store.search(words)]  # noqa: E731
    assert names("lossl WEIGHTS") == ["w12"]
    assert names("lossless norm") == []
    assert sorted(names("fused")) == ["fused_norm"]
    assert sorted(names("  ")) == ["fused_norm", "w12"]
    assert names('"') in ([], ["fused_norm", "w12"])
    assert names("nothing_like_it") == []
    assert names("12-bit") == ["w12"]


def test_search_does_not_show_old_versions(store, mechanism):
    store.add(mechanism(title="alpha"), origin="a")
    store.add(mechanism(title="beta"), origin="a")
    assert [m.mechanism.title for m in store.search("bf16")] == ["beta"]


def test_changed_patch_is_noticed(store, mechanism, url):
    store.add(mechanism(), origin="a")
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("update mechanism set patch = patch || '+evil'")
    with pytest.raises(TamperedError) as caught:
        store.get("bf16_gemm")
    assert caught.value.exit_code == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "Has Space"},
        {"patch": "not a diff"},
        {"requires": ["bf16_gemm"]},
        {"preconditions": {"hardwear": {}}},
        {"predicted_gain": -1.0},
        {"colour": "red"},
    ],
)
def test_bad_mechanism_is_refused(mechanism, fields):
    with pytest.raises(ValidationError):
        mechanism(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"low": 1.6},
        {"ratio": math.nan},
        {"samples": [0.0]},
        {"outcome": "refuted"},
        {"outcome": "maybe"},
        {"ratio": -1.0, "low": -2.0},
    ],
)
def test_bad_effect_is_refused(effect, fields):
    with pytest.raises(ValidationError):
        effect(**fields)


def test_migrations_give_exactly_the_declared_schema(store, url):
    with create_engine(url).connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "include_object": lambda o, name, kind, *_: not (kind == "table" and name.startswith("mechanism_fts"))
            },
        )
        assert compare_metadata(context, Base.metadata) == []


def test_wal_mode_and_plain_paths(tmp_path):
    path = tmp_path / "deep" / "er" / "memory.db"
    with MemoryStore(path, seed_folder=None):
        with sqlite3.connect(path) as raw:
            assert raw.execute("pragma journal_mode").fetchone() == ("wal",)


def test_newer_schema_is_refused_and_left_alone(store, url):
    store.close()
    path = url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as raw:
        raw.execute("update alembic_version set version_num = '9999'")
    with pytest.raises(SchemaTooNewError) as caught:
        MemoryStore(url)
    assert "9999" in caught.value.message and "upgrade" in caught.value.hint
    with sqlite3.connect(path) as raw:
        assert raw.execute("select version_num from alembic_version").fetchone() == ("9999",)


def test_not_a_database(tmp_path):
    path = tmp_path / "memory.db"
    path.write_text("this is not a database, it is a letter to a friend" * 10)
    with pytest.raises(StoreUnavailableError) as caught:
        MemoryStore(path)
    assert "not a database" in caught.value.message and caught.value.exit_code == 3


def test_foreign_table_is_not_taken_over(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as raw:
        raw.execute("create table mechanism (x)")
    with pytest.raises(StoreUnavailableError, match="did not make"):
        MemoryStore(path)


@pytest.mark.parametrize("url", ["nosuch://host/db", "sqlite:////proc/nowhere/memory.db"])
def test_unusable_address(url):
    with pytest.raises(StoreUnavailableError):
        MemoryStore(url)


def test_password_is_not_printed():
    with pytest.raises(StoreUnavailableError) as caught:
        MemoryStore("postgresql+psycopg://me:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(caught.value)


OPEN_AND_WRITE = """
import sys
from specpilot.memory import Effect, Hardware, Mechanism, MemoryStore
url, worker, patch = sys.argv[1:]
with MemoryStore(url, seed_folder=None) as store:
    store.add(Mechanism(name="shared", component="*", title="t", hypothesis="h", patch=patch), origin="x")
    for number in range(10):
        store.record_effect("shared", Effect(deployment="d", deployment_fingerprint="f", hardware=Hardware(), ratio=1.5,
                            low=1.2, high=2, samples=[1.5], run=f"{worker}", round=number, outcome="verified"))
"""


def test_processes_share_a_fresh_store_without_losing_a_write(url, mechanism):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_AND_WRITE, url, str(worker), mechanism().patch], stderr=subprocess.PIPE
        )
        for worker in range(3)
    ]
    errors = [child.communicate(timeout=60)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0] * 3, errors
    with MemoryStore(url, seed_folder=None) as store:
        assert len(store.get("shared").effects) == 30


def test_threads_share_one_store(store, mechanism, effect):
    store.add(mechanism(), origin="a")
    threads = [threading.Thread(target=store.record_effect, args=("bf16_gemm", effect(round=n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.get("bf16_gemm").effects) == 8


def test_a_failed_write_leaves_nothing_behind(store, mechanism, effect, monkeypatch):
    store.add(mechanism(), origin="a")
    monkeypatch.setattr(Effect, "uid", property(lambda self: None))
    with pytest.raises(StoreUnavailableError):
        store.record_effect("bf16_gemm", effect())
    assert store.stats().effects == {} and Path(store.url.removeprefix("sqlite:///")).exists()
