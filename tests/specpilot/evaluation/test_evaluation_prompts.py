"""Prompts: never twice, deterministic, mixed by source, hidden apart from tuning."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specpilot.deployment import Deployment, parse_deployment
from specpilot.errors import MissingModelError, UsageError
from specpilot.evaluation.prompts import (
    CODES,
    PHRASE_TOKENS,
    PHRASES,
    PromptPool,
    code_of,
    part_of,
    read_prompts,
    stratified,
    with_phrase,
)
from tests.helpers.fake_deployment import YAML, byte_tokenizer


@pytest.fixture
def pool(deployment: Deployment) -> PromptPool:
    return PromptPool(deployment, deployment.folder / "target", "secret")


def test_every_use_is_unique_over_epochs_and_sets(pool: PromptPool) -> None:
    prompts = pool.take("tuning", 60) + pool.take("hidden", 60) + pool.take("tuning", 5)
    assert len({tuple(prompt.ids) for prompt in prompts}) == 125
    assert len({prompt.id for prompt in prompts}) == 125
    codes = [prompt.id.split("/")[-1] for prompt in prompts]
    assert len(set(codes)) == 125
    assert all(code in prompt.text for code, prompt in zip(codes, prompts, strict=True))


def test_the_phrase_opens_the_users_turn(pool: PromptPool, deployment: Deployment) -> None:
    tokenizer = Tokenizer.from_file(str(deployment.folder / "target" / "tokenizer.json"))
    for prompt in pool.take("tuning", 6):
        opening, rest = prompt.text.split("user\n", 1)
        assert opening == "<|im_start|>"
        assert any(rest.startswith(phrase.split("{}")[0]) for phrase in PHRASES)
        assert prompt.text.endswith("<|im_start|>assistant\n")
        assert tokenizer.decode(prompt.ids) == prompt.text


def test_with_phrase_on_other_templates() -> None:
    assert with_phrase("hello", "Task {}.", "7-a") == "Task 7-a. hello"
    assert with_phrase("[INST] hi [/INST]", "Case {}.", "7-a") == "[INST] Case 7-a. hi [/INST]"
    two_turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb"
    assert with_phrase(two_turns, "Task {}.", "7-a").startswith("<|im_start|>user\nTask 7-a. a")


def test_resume_continues_where_it_stopped(pool: PromptPool, deployment: Deployment) -> None:
    whole = pool.take("tuning", 20)
    first = PromptPool(deployment, deployment.folder / "target", "secret")
    head = first.take("tuning", 7)
    saved = json.loads(json.dumps(first.offsets))
    again = PromptPool(deployment, deployment.folder / "target" / "tokenizer.json", "secret", offsets=saved)
    assert head + again.take("tuning", 13) == whole
    assert again.offsets == {"tuning": 20, "hidden": 0, "closing": 0}


def test_stream_advances_one_by_one(pool: PromptPool) -> None:
    drawn = list(itertools.islice(pool.stream("hidden"), 3))
    assert pool.offsets["hidden"] == 3 and len({p.id for p in drawn}) == 3


def test_another_secret_gives_other_codes_and_order(deployment: Deployment) -> None:
    one, two = (PromptPool(deployment, deployment.folder / "target", s).take("tuning", 12) for s in ("a", "b"))
    assert not {p.id.split("/")[-1] for p in one} & {p.id.split("/")[-1] for p in two}
    assert [p.id.split("/")[1] for p in one] != [p.id.split("/")[1] for p in two]


def test_sets_do_not_mix(pool: PromptPool) -> None:
    assert all("hidden question" in p.text for p in pool.take("hidden", 8))
    assert all("hidden question" in p.text for p in pool.take("closing", 8))
    assert all("tuning question" in p.text for p in pool.take("tuning", 12))
    with pytest.raises(ValueError, match="set must be"):
        pool.take("training", 1)


def test_what_closes_a_run_was_never_asked_before(deployment: Deployment, pool: PromptPool) -> None:
    """Six texts of one source and two of the other: a quarter of each, rounded down, is for the closing session, in any run."""

    def texts(pool: PromptPool, which: str) -> set[str]:
        return {p.id.split("/")[1] for p in pool.take(which, 40)}

    hidden, closing = texts(pool, "hidden"), texts(pool, "closing")
    assert len(hidden) == 7 and len(closing) == 1 and not hidden & closing
    other = PromptPool(deployment, deployment.folder / "target", "another run")
    assert (texts(other, "hidden"), texts(other, "closing")) == (hidden, closing)
    ids = [p.id for which in ("hidden", "closing", "tuning") for p in other.take(which, 40)]
    assert len({name.split("/")[2] for name in ids}) == 120, "no code is used twice, whatever the set"


def test_texts_are_shared_out_by_text_and_never_run_out() -> None:
    rows = [{"id": str(k), "source": "ab"[k % 2], "text": f"text {k // 2 % 20}"} for k in range(80)]
    hidden, closing = part_of(rows, "hidden"), part_of(rows, "closing")
    assert sorted((row["id"] for row in hidden + closing), key=int) == [row["id"] for row in rows]
    assert not {row["text"] for row in hidden} & {row["text"] for row in closing}
    assert len({row["text"] for row in closing}) == 5
    assert part_of(rows, "tuning") == rows
    few = rows[:6]
    assert part_of(few, "hidden") == part_of(few, "closing") == few, "three texts a source: too few to share"


def test_one_epoch_uses_every_row_and_mixes_sources(pool: PromptPool) -> None:
    prompts = pool.take("tuning", 12)
    assert len({p.id.split("/")[1] for p in prompts}) == 12
    assert Counter(p.source for p in prompts) == {"code": 9, "maths": 3}
    assert Counter(p.source for p in prompts[:4])["maths"] == 1


def test_stratified_prefixes_hold_each_source_in_its_share() -> None:
    import random

    sources = ["a"] * 100 + ["b"] * 60
    order = stratified(sources, random.Random(3))
    assert sorted(order) == list(range(160))
    for length in range(1, 161):
        share = sum(sources[k] == "a" for k in order[:length])
        assert abs(share - length * 100 / 160) <= 1.5


def test_codes_are_injective_and_well_formed() -> None:
    codes = [code_of(b"s", k) for k in range(3000)]
    assert len(set(codes)) == 3000
    assert all(len(code) == 8 and code[:5].isdigit() and code[5] == "-" and code[6:].islower() for code in codes)
    code_of(b"s", CODES - 1)
    for bad in (-1, CODES):
        with pytest.raises(UsageError):
            code_of(b"s", bad)


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"id": k, "source": "x", "text": "a" * n} for k, n in enumerate((10, 50 - PHRASE_TOKENS, 51 - PHRASE_TOKENS))
    ]
    for name in ("tuning", "hidden"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    pool = PromptPool(parse_deployment(YAML.replace("200", "50"), tmp_path), tokenizer, "s")
    assert {p.id.split("/")[1] for p in pool.take("tuning", 10)} == {"0", "1"}
    pool = PromptPool(parse_deployment(YAML.replace("200", "20"), tmp_path), tokenizer, "s")
    with pytest.raises(UsageError, match="input_tokens = 20"):
        pool.take("tuning", 1)


@pytest.mark.parametrize("line", ["{", "[]", '{"id": 1}', '{"id": 1, "text": ""}', '{"id": 1, "text": 3}', "7"])
def test_bad_rows_name_file_and_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": 1, "source": "x", "text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match=r"p\.jsonl:3"):
        read_prompts(file)


def test_missing_files_are_named(tmp_path: Path, deployment: Deployment) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(MissingModelError, match="no tokenizer"):
        PromptPool(deployment, tmp_path, "s")


def test_a_hidden_prompt_that_workers_may_see_is_refused(tmp_path: Path) -> None:
    from specpilot.evaluation.prompts import check_prompt_files
    from tests.helpers.fake_deployment import write_fake_deployment

    deployment = write_fake_deployment(tmp_path)
    check_prompt_files(deployment)
    seen = (tmp_path / "tuning.jsonl").read_text().splitlines()[3]
    with (tmp_path / "hidden.jsonl").open("a") as file:
        file.write(seen + "\n")
    with pytest.raises(UsageError, match="tuning3"):
        check_prompt_files(deployment)
    with (tmp_path / "hidden.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UsageError, match="hidden.jsonl:10"):
        check_prompt_files(deployment)
