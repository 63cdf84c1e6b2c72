"""The brief says what is needed; claims parse or name the wrong key; accepted changes become mechanisms."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot.agents import (
    AgentError,
    ClaimDraft,
    ComponentGap,
    claim_template,
    mechanism_from,
    parse_claim,
    render_brief,
)


def test_brief_holds_table_rules_and_the_way_to_submit():
    text = render_brief(
        attempt_id="r1-e1", run="run-7", worktree=Path("/w/t"), task="Make it fast", component="target.mlp",
        gaps=[ComponentGap("target.mlp", 20.0, 8.0, 12.0, 1.35, "bandwidth")], round_ms=50.0,
        editable=["slim_engine/**"], excluded=["engine.toml"], merged=["w12"], failed=["bf16: no-gain"], known_counters=["rounds"],
    )  # fmt: skip
    for words in ("20.00", "12.00", "1.35x", "Edit only: slim_engine/**; never: engine.toml", "w12", "bf16: no-gain",
                  "specpilot attempt submit run-7 r1-e1 --claim claim.yaml", "/w/t", "Counters that exist: rounds"):  # fmt: skip
        assert words in text


def test_template_parses():
    submission = parse_claim(claim_template("target.mlp"))
    assert submission.claim.component == "target.mlp" and submission.claim.predicted_gain == 1.1
    assert submission.remember.name == "short-name"
    assert parse_claim(claim_template("*")).claim.component == "*", "the default, and YAML for an alias"


def test_claim_file(tmp_path):
    path = tmp_path / "claim.yaml"
    path.write_text("component: host\nhypothesis: ' less work '\ncounters: [a, b]\n")
    claim = parse_claim(path).claim
    assert claim == ClaimDraft("host", "less work", None, ("a", "b"))
    assert parse_claim(path).remember is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("component: a\nhypothsis: b", "did you mean 'hypothesis'"),
        ("component: a", "hypothesis must be"),
        ("component: a\nhypothesis: b\npredicted_gain: fast", "predicted_gain"),
        ("component: a\nhypothesis: b\npredicted_gain: -1", "predicted_gain"),
        ("component: a\nhypothesis: b\npredicted_gain: .nan", "predicted_gain"),
        ("component: a\nhypothesis: b\ncounters: x", "list of names"),
        ("component: a\nhypothesis: b\ncounters: [x]\nforbidden_counters: [x]", "both grow"),
        ("component: a\nhypothesis: b\nremember: {name: 'A B', title: t}", "not a name"),
        ("component: a\nhypothesis: b\nremember: {name: ab, title: t, preconditions: {hardwear: 1}}", "hardwear"),
        ("- a", "expected"),
        ("a: [", "cannot read"),
        ("", "expected"),
    ],
)
def test_wrong_claims(text, words):
    with pytest.raises(AgentError, match=words) as caught:
        parse_claim(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["a: " + "[" * 5000 + "]" * 5000, "a: 1" + "0" * 5000, "a: 2026-13-45"])
def test_claims_that_no_reader_can_hold(text):
    with pytest.raises(AgentError, match="cannot read"):
        parse_claim(text)


def test_missing_claim_file(tmp_path):
    with pytest.raises(AgentError, match="cannot read"):
        parse_claim(tmp_path / "none.yaml")


def test_mechanism_of_an_accepted_change(context, patch):
    diff = patch({"line_3 = 3\n": "line_3 = 4\n"})
    found = mechanism_from(ClaimDraft("target.mlp", "Half the bytes.", 1.3, ("calls",)), diff, context(concurrency=2))
    again = mechanism_from(ClaimDraft("target.mlp", "Half the bytes.", 1.3, ("calls",)), diff, context(concurrency=2))
    assert found == again and found.name.startswith("target-mlp-half-the-bytes-")
    needs = found.preconditions
    assert (needs.hardware.kind, needs.hardware.isa, needs.architectures, needs.drafters, needs.engine) == (
        "cpu", ["avx2"], ["llama"], ["dflash"], "slim",
    )  # fmt: skip
    assert needs.regime.max_concurrency == 2 and found.counters == ["calls"]


def test_submitters_words_win(context, patch):
    text = "component: host\nhypothesis: h\nremember: {name: mine, title: T, requires: [w12], preconditions: {engine: any}}"
    submission = parse_claim(text)
    found = mechanism_from(
        submission.claim, patch({"line_1 = 1\n": "line_1 = 0\n"}), context(), remember=submission.remember
    )
    assert (found.name, found.title, found.requires, found.preconditions.engine) == ("mine", "T", ["w12"], None)


def test_patch_that_builds_on_others_requires_them(context, patch, tree):
    alone = patch({"line_1 = 1\n": "line_1 = 0\n"})
    claim, where = ClaimDraft("host", "h"), context(present=("w12", "bf16"))
    assert mechanism_from(claim, alone, where, first_tree=tree).requires == []
    built_on = alone.replace("-line_1 = 1", "-line_1 = 5")
    assert mechanism_from(claim, built_on, where, first_tree=tree).requires == ["w12", "bf16"]


def test_aliases_that_would_fill_any_memory():
    """A few hundred bytes that stand for a thousand million words, which the message about a wrong claim spelled out."""
    rows = ["- &l1 [" + ", ".join(["lol"] * 10) + "]"]
    rows += [f"- &l{k} [" + ", ".join([f"*l{k - 1}"] * 10) + "]" for k in range(2, 10)]
    with pytest.raises(AgentError, match="it holds aliases"):
        parse_claim("component:\n" + "\n".join(rows) + "\nhypothesis: x\n")


@pytest.mark.parametrize("bad", ["\\0", "\\e[2J", "\\ud800", "\\x9b"])
def test_words_that_nothing_can_hold_or_a_terminal_obeys(bad):
    for text in (f'component: x\nhypothesis: "a{bad}b"\n', f'component: x\nhypothesis: y\ncounters: ["a{bad}"]\n'):
        with pytest.raises(AgentError, match="must be a l|surrogates not allowed"):
            parse_claim(text)
    assert (
        parse_claim('component: x\nhypothesis: "two\\nlines,\\tone tab, a smile \\U0001F642"\n').claim.component == "x"
    )
