"""Seeds load once and never replace the user's evidence; exports round-trip and notice tampering."""

from __future__ import annotations

import json
import sqlite3

import pytest
import yaml

from specpilot.memory import MemoryStore, SchemaTooNewError, SeedError, StoreUnavailableError, TamperedError, transfer
from specpilot.memory.errors import InvalidMechanismError
from specpilot.memory.seeding import SEED_FOLDER, read_seeds, write_evidence


@pytest.fixture
def seed_folder(tmp_path, mechanism, effect):
    folder = tmp_path / "seeds" / "bf16_gemm"
    folder.mkdir(parents=True)
    body = {
        "name": "bf16_gemm",
        "component": "target.mlp",
        "title": "T",
        "hypothesis": "H",
        "predicted_gain": 1.4,
        "requires": [],
        "counters": None,
        "patch": "change.patch",
        "preconditions": {
            "hardware": {"kind": "cpu", "isa": ["avx2", "fma"]},
            "architectures": ["llama", "qwen3"],
            "drafters": "any",
            "regime": {"max_concurrency": 4},
            "engine": "slim",
        },
    }
    (folder / "mechanism.yaml").write_text(yaml.safe_dump(body))
    (folder / "change.patch").write_text(mechanism().patch)
    (folder / "evidence.json").write_text(json.dumps([effect().model_dump(mode="json")]))
    return folder.parent


def test_seed_loads_once_with_its_evidence(url, seed_folder, query):
    for _ in range(2):
        with MemoryStore(url, seed_folder=seed_folder) as store:
            (stored,) = store.mechanisms()
            assert (stored.status, stored.origin, stored.version, len(stored.effects)) == ("verified", "seed", 1, 1)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        assert raw.execute("select count(*) from effect").fetchone() == (1,)


def test_seed_without_evidence_is_unproven(url, seed_folder):
    (seed_folder / "bf16_gemm" / "evidence.json").unlink()
    with MemoryStore(url, seed_folder=seed_folder) as store:
        assert store.get("bf16_gemm").status == "stale"


def test_new_evidence_of_a_known_seed_is_added(url, seed_folder, effect):
    with MemoryStore(url, seed_folder=seed_folder):
        pass
    both = [effect(), effect(1.9, deployment="other")]
    (seed_folder / "bf16_gemm" / "evidence.json").write_text(json.dumps([e.model_dump(mode="json") for e in both]))
    with MemoryStore(url, seed_folder=seed_folder) as store:
        assert len(store.get("bf16_gemm").effects) == 2 and store.get("bf16_gemm").version == 1


def test_local_evidence_survives_a_newer_seed(url, seed_folder, effect):
    with MemoryStore(url, seed_folder=seed_folder) as store:
        store.record_effect("bf16_gemm", effect(1.9, run="mine"))
    path = seed_folder / "bf16_gemm" / "mechanism.yaml"
    path.write_text(path.read_text().replace("title: T", "title: U"))
    with MemoryStore(url, seed_folder=seed_folder) as store:
        assert store.get("bf16_gemm").mechanism.title == "U"
        assert [e.run for e in store.get("bf16_gemm", 1).effects if e.run == "mine"] == ["mine"]


def test_seed_does_not_shadow_the_users_own_version(url, seed_folder, mechanism):
    with MemoryStore(url, seed_folder=None) as store:
        store.add(mechanism(title="mine"), origin="run-7")
    with MemoryStore(url, seed_folder=seed_folder) as store:
        assert store.get("bf16_gemm").mechanism.title == "mine"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "mechanism.yaml").write_text("name: other"), "folder's name"),
        (lambda f: (f / "change.patch").unlink(), "change.patch"),
        (lambda f: (f / "mechanism.yaml").write_text("- a"), "not a mapping"),
        (lambda f: (f / "mechanism.yaml").write_text("a: ["), "cannot read"),
        (lambda f: (f / "evidence.json").write_text("{}"), "not a list"),
        (lambda f: (f / "evidence.json").write_text("[{}]"), "deployment"),
        (lambda f: (f / "mechanism.yaml").write_text("name: bf16_gemm\npatch: change.patch\n"), "component"),
    ],
)
def test_damaged_seed_names_the_file(url, seed_folder, damage, words):
    damage(seed_folder / "bf16_gemm")
    with pytest.raises(SeedError, match=words) as caught:
        MemoryStore(url, seed_folder=seed_folder)
    assert "bf16_gemm" in str(caught.value)


def test_shipped_seeds_are_valid():
    seeds = read_seeds(SEED_FOLDER)
    names = {seed.mechanism.name for seed in seeds}
    for seed in seeds:
        assert set(seed.mechanism.requires) <= names
        assert seed.mechanism.preconditions.engine == "slim"


def test_written_evidence_reads_back(url, seed_folder, effect):
    with MemoryStore(url, seed_folder=seed_folder) as store:
        store.record_effect("bf16_gemm", effect(1.7, run="later"))
        stored = store.get("bf16_gemm")
    write_evidence(stored, seed_folder / "bf16_gemm")
    assert sorted(e.uid for e in read_seeds(seed_folder)[0].effects) == sorted(e.uid for e in stored.effects)


@pytest.fixture
def exported(store, mechanism, effect, tmp_path):
    store.add(mechanism(title="é"), origin="run-1")
    store.add(mechanism(title="second"), origin="run-2")
    store.record_effect("bf16_gemm", effect())
    path = tmp_path / "memory.json"
    assert store.export(path) == 2
    return path


def test_export_import_round_trip_and_twice_is_once(exported, tmp_path, store):
    with MemoryStore(tmp_path / "other.db", seed_folder=None) as other:
        assert other.import_(exported) == (2, 1)
        assert other.import_(exported) == (0, 0)
        assert other.get("bf16_gemm").mechanism == store.get("bf16_gemm").mechanism
        assert other.get("bf16_gemm").effects == store.get("bf16_gemm").effects
        assert other.get("bf16_gemm", 1).mechanism.title == "é"
        assert other.get("bf16_gemm").status == "verified"
    assert not list(tmp_path.glob("*.part"))


def test_tampered_export_is_refused_and_nothing_is_stored(exported, store):
    before = store.stats()
    exported.write_text(exported.read_text().replace('"ratio": 1.5', '"ratio": 1.59'))
    with pytest.raises(TamperedError) as caught:
        store.import_(exported)
    assert caught.value.exit_code == 8 and str(exported) in caught.value.message
    assert store.stats() == before


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", InvalidMechanismError),
        ('{"format": "specpilot-memory", "ver', TamperedError),
        ("[]", InvalidMechanismError),
        ('{"format": "specpilot-memory", "version": 99}', SchemaTooNewError),
    ],
)
def test_other_files_are_refused(store, tmp_path, content, error):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(error):
        store.import_(path)


def test_missing_file_and_unwritable_folder(store, tmp_path):
    with pytest.raises(InvalidMechanismError):
        store.import_(tmp_path / "none.json")
    with pytest.raises(StoreUnavailableError):
        store.export(tmp_path / "none" / "x.json")


def test_full_disk_leaves_the_old_export(exported, store):
    before = exported.read_bytes()
    part = exported.with_name(exported.name + ".part")
    part.symlink_to("/dev/full")
    with pytest.raises(StoreUnavailableError, match="No space left"):
        store.export(exported)
    assert exported.read_bytes() == before and not part.is_symlink()


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x00\xff\xfe", b"[1, 2]", b'{"format": "other"}', b"SQLite format 3\x00"]
)
def test_what_is_no_export_is_wrong_use(tmp_path, content):
    path = tmp_path / "f.json"
    path.write_bytes(content)
    for wrong in (path, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidMechanismError) as caught:
            transfer.read(wrong)
        assert caught.value.exit_code == 2 and str(wrong) in caught.value.message


def test_a_cut_export_is_tampered_with(tmp_path):
    path = tmp_path / "f.json"
    transfer.write(path, [])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TamperedError) as caught:
        transfer.read(path)
    assert caught.value.exit_code == 8
