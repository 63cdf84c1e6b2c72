"""engine.toml: launch commands, the editable paths, tunables, and clear refusals."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot.deployment import find_deployment, load_deployment
from specpilot.engine_tree import EngineSpec, load_engine_spec
from specpilot.errors import UsageError

TOML = """
name = "tiny"
version = "1"
protocol = "sglang-native/1"
[launch]
command = ["{python}", "-m", "x", "--port", "{port}"]
env = { THREADS = "{threads}" }
[variants]
stock = []
ar = ["--no-speculation"]
reference = ["--no-speculation"]
final = []
final-ar = ["--no-speculation"]
[editable]
include = ["src/**", "tunables.toml", "*.cpp"]
exclude = ["src/secret/**"]
[tunables.rows]
type = "int"
min = 1
max = 8
default = 4
[tunables.fast]
type = "bool"
default = false
[tunables.mode]
type = "choice"
choices = ["a", "b"]
default = "a"
[tunables.rate]
type = "float"
min = 0.0
max = 1.0
default = 0.5
"""


def write(tmp_path: Path, text: str = TOML) -> Path:
    (tmp_path / "engine.toml").write_text(text)
    return tmp_path


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return load_engine_spec(write(tmp_path))


def test_the_bundled_engine_is_readable() -> None:
    tree = load_deployment(find_deployment("cpu_c1_smollm2-135m_ngram")).engine_tree()
    spec = load_engine_spec(tree)
    assert spec.name == "slim"
    filled = spec.environment({"threads": "2", "cache": "/run/cache/abc"})
    assert filled["SLIM_NATIVE_CACHE"] == "/run/cache/abc", "no commit may load what another one built"
    values = {name: name.upper() for name in ("python", "target", "drafter", "host", "port", "threads")}
    assert spec.command("ar", values)[:2] == ["PYTHON", "-m"]
    values = tomllib.loads((tree / "tunables.toml").read_text())
    assert values.keys() == spec.tunables.keys()
    for name, value in values.items():
        assert spec.tunables[name].allows(value)


def test_command_fills_placeholders(spec: EngineSpec) -> None:
    assert spec.command("ar", {"python": "py", "port": "80"}) == ["py", "-m", "x", "--port", "80", "--no-speculation"]
    assert spec.environment({"threads": "2"}) == {"THREADS": "2"}
    with pytest.raises(UsageError, match="{port}"):
        spec.command("ar", {"python": "py"})
    with pytest.raises(UsageError, match="no variant 'fast'"):
        spec.command("fast", {})


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("src/a.py", True),
        ("src/deep/er/a.py", True),
        ("tunables.toml", True),
        ("kernel.cpp", True),
        ("deep/kernel.cpp", False),
        ("src/secret/a.py", False),
        ("engine.toml", False),
        ("other/a.py", False),
        ("src/../engine.toml", False),
        ("../src/a.py", False),
        ("/src/a.py", False),
        ("src", False),
        (".git/config", False),
        ("src/.git/hooks/pre-commit", False),
    ],
)
def test_editable_paths(spec: EngineSpec, path: str, allowed: bool) -> None:
    assert spec.editable(path) is allowed


@given(st.text())
def test_editable_never_raises_and_never_allows_a_way_out(path: str) -> None:
    spec = EngineSpec.model_validate(tomllib.loads(TOML))
    if spec.editable(path):
        assert ".." not in path.split("/") and not path.startswith("/")


def test_tunables_text(spec: EngineSpec) -> None:
    assert tomllib.loads(spec.tunables_text({"rows": 8, "mode": "b"})) == {
        "rows": 8, "fast": False, "mode": "b", "rate": 0.5,
    }  # fmt: skip
    with pytest.raises(UsageError, match="no tunable 'row'") as caught:
        spec.tunables_text({"row": 1})
    assert "did you mean 'rows'" in caught.value.hint
    for bad in ({"rows": 9}, {"rows": 1.5}, {"rows": True}, {"fast": 1}, {"mode": "c"}, {"rate": "x"}):
        with pytest.raises(UsageError, match="outside"):
            spec.tunables_text(bad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[launch]", "[lunch]"), "launch"),
        (('"sglang-native/1"', '"other/2"'), "protocol 'other/2' is not supported"),
        (("final-ar = [", "final_ar = ["), "lacks final-ar"),
        (("default = 4", "default = 40"), "outside its own range"),
        (("max = 8", ""), "needs min and max"),
        (("[editable]", "[editable"), "not valid TOML"),
    ],
)
def test_bad_manifests(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_engine_spec(write(tmp_path, TOML.replace(*change)))
    assert "engine.toml" in caught.value.message


def test_a_folder_without_manifest_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an engine tree"):
        load_engine_spec(tmp_path)
