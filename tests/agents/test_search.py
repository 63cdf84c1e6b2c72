"""Reading and writing tunables; ask and tell; the two arms; what survives a crash."""

from __future__ import annotations

import json
import tomllib

import pytest

from specpilot.agents import AgentError, DoesNotApplyError, SearchWorker
from specpilot.agents.space import load_space, set_values

from .conftest import ENGINE_TOML, TUNABLES_TOML


def score(values):
    """A made-up engine: best at verify_drafts 4, lazy on, pack 32."""
    return 1.5 - 0.05 * abs(values["verify_drafts"] - 4) + 0.1 * values["lazy"] + 0.002 * values["pack"]


def searched(worker, where, screen):
    """The session of `where`, driven to its end as the loop drives it."""
    session = worker.open(where)
    while (trial := session.ask()) is not None:
        session.tell(trial, screen(trial.values))
    return session


def test_space_of_a_drafter(tree):
    space = load_space(tree, drafter="dflash", facts={"block_size": 8})
    assert [t.name for t in space.tunables] == ["verify_drafts", "lazy", "pack"]
    assert space.current == {"verify_drafts": 7, "lazy": False, "pack": 8}, "clipped to block_size - 1"
    assert space.size == 7 * 2 * 3
    assert [t.name for t in load_space(tree, drafter="ngram").tunables][-1] == "ngram_max"
    assert load_space(tree, drafter="ngram").tunables[0].high == 15, "an unknown fact leaves the declared range"


def test_space_of_the_shipped_engine():
    from pathlib import Path

    shipped = Path(__file__).parents[2] / "engines" / "slim"
    space = load_space(shipped, drafter="dflash", facts={"block_size": 8})
    assert space.current["verify_drafts"] == 7 and not any(t.name.startswith("ngram") for t in space.tunables)


@pytest.mark.parametrize(
    ("engine", "tunables", "words"),
    [
        ("[tunables.a]\ntype='int'\nmin=1\nmax=4\n", "", "'default'"),
        ("[tunables.a]\ntype='colour'\ndefault=1\n", "", "colour"),
        ("[tunables.a]\ntype='int'\nmin=1\nmax=4\ndefault=2\nmax_from='x*2'\n", "", "max_from"),
        ("[tunables.a]\ntype='int'\nmin=1\nmax=4\ndefault=2\n", "a = true", "a = True"),
        ("[tunables.a]\ntype='choice'\nchoices=[1,2]\ndefault=2\n", "a = 3", "a = 3"),
        ("[tunables", "", "cannot read"),
    ],
)
def test_wrong_declarations_name_the_tunable(tree, engine, tunables, words):
    (tree / "engine.toml").write_text(engine)
    (tree / "tunables.toml").write_text(tunables)
    with pytest.raises(AgentError, match=words):
        load_space(tree, drafter="dflash")


def test_set_values_keeps_comments_and_order():
    text = set_values(TUNABLES_TOML, {"verify_drafts": 3, "lazy": True, "extra": 'a"b'})
    assert text == '# knobs\nverify_drafts = 3  # all\nlazy = true\npack = 8\nngram_max = 4\nextra = "a\\"b"\n'
    assert set_values("", {"x": 0.5}) == "x = 0.5\n"
    assert set_values("a = 1\n[t]\na = 2\n", {"a": 3, "b": 1}) == "a = 3\nb = 1\n[t]\na = 2\n"
    with pytest.raises((DoesNotApplyError, tomllib.TOMLDecodeError)):
        set_values("a = [\n 1,\n]\n", {"a": 2})


def test_search_finds_a_better_setting_and_edits_the_file(tree, context):
    session = searched(SearchWorker(trials=10), context(), lambda values: score(values) / 1.366)
    proposal, report = session.proposal(), session.report()
    assert report.trials == {"tpe": 10, "random": 10}, "equal budgets"
    assert proposal.claim.predicted_gain == pytest.approx(max(report.best.values()))
    assert proposal.claim.predicted_gain > 1.1
    assert proposal.apply(tree) == ["tunables.toml"]
    values = tomllib.loads((tree / "tunables.toml").read_text())
    assert score(values) / 1.366 == pytest.approx(proposal.claim.predicted_gain)
    assert values["ngram_max"] == 4 and "# knobs" in (tree / "tunables.toml").read_text()
    assert "TPE: best" in report.text and "random search: best" in report.text


def test_no_setting_is_tried_twice_by_an_arm_nor_the_current_one(context):
    session = SearchWorker(trials=12).open(context())
    seen = {"tpe": [], "random": []}
    while (trial := session.ask()) is not None:
        assert trial.values != session.space.current
        assert trial.values not in seen[trial.arm]
        seen[trial.arm].append(trial.values)
        session.tell(trial, score(trial.values))
    assert len(seen["tpe"]) == len(seen["random"]) == 12 and session.finished


def test_small_space_is_exhausted_and_the_search_ends(tree, context):
    (tree / "engine.toml").write_text(
        "[tunables.pack]\ntype='choice'\nchoices=[1,8,32]\ndefault=8\ncomponent='linear'\n"
    )
    session = SearchWorker(trials=50).open(context())
    asked = 0
    while (trial := session.ask()) is not None:
        session.tell(trial, 0.9)
        asked += 1
    assert asked == 4 and session.finished
    assert session.proposal() is None, "nothing beat the current setting"
    assert "no difference between the arms" in session.report().text


def test_a_killed_search_continues_as_if_nothing_happened(context, tmp_path):
    def run(folder, kill_every):
        trace = []
        worker, where = SearchWorker(trials=8), context(folder=folder)
        session = worker.open(where)
        while (trial := session.ask()) is not None:
            if kill_every and len(trace) % kill_every == 1:
                session = worker.open(where)  # asked, never told: the process died while measuring
                assert session.ask() == trial
            session.tell(trial, score(trial.values))
            trace.append((trial.arm, trial.values))
            if kill_every:
                with (folder / f"search-{where.base_commit[:12]}-r{where.round}.jsonl").open("ab") as file:
                    file.write(b'{"ask": {"numb')  # torn by the kill
                session = worker.open(where)
        return trace, session.best()

    assert run(tmp_path / "one", 0) == run(tmp_path / "two", 3)


def test_failed_trials_count_and_never_win(context):
    session = SearchWorker(trials=2).open(context())
    while (trial := session.ask()) is not None:
        session.tell(trial, None)
    assert session.best() is None and session.proposal() is None
    assert session.report().failed == {"tpe": 2, "random": 2}
    assert "cannot be compared" in session.report().text


def test_session_of_another_base_or_seed_is_refused(context, tmp_path):
    worker = SearchWorker(trials=2)
    worker.open(context(seed=1))
    with pytest.raises(AgentError, match="another search"):
        worker.open(context(seed=2))
    assert worker.open(context(base_commit="b" * 40)) is not None


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan")])
def test_nonsense_scores_are_refused(context, ratio):
    session = SearchWorker(trials=1).open(context())
    with pytest.raises(AgentError):
        session.tell(session.ask(), ratio)


def test_nothing_to_tune(tree, context):
    (tree / "engine.toml").write_text("name = 'x'\n")
    assert SearchWorker().open(context()) is None


def test_tpe_beats_chance_on_a_smooth_engine(tree, context, tmp_path):
    """Against the same number of random trials, over several seeds, on a space random search cannot exhaust."""
    knobs = "".join(f"[tunables.k{i}]\ntype='float'\nmin=0.0\nmax=1.0\ndefault=0.0\ncomponent='x'\n" for i in range(4))
    (tree / "engine.toml").write_text(knobs)
    (tree / "tunables.toml").write_text("")
    wins = 0
    for seed in range(5):
        smooth = lambda values: 2.0 - sum((v - 0.7) ** 2 for v in values.values())  # noqa: E731
        where = context(seed=seed, folder=tmp_path / str(seed))
        best = searched(SearchWorker(trials=20), where, smooth).report().best
        wins += best["tpe"] > best["random"]
    assert wins >= 3


def test_session_file_is_plain_json_lines(context):
    session = SearchWorker(trials=1).open(context())
    session.tell(session.ask(), 1.1)
    lines = [json.loads(line) for line in session.path.read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["header", "ask", "tell"]
    assert ENGINE_TOML.count("[tunables.") == 4 and len(lines[0]["header"]["space"]) == 3


def test_without_control_all_trials_are_tpes_and_the_report_says_so(context):
    report = searched(SearchWorker(trials=3, control=False), context(), score).report()
    assert report.trials == {"tpe": 3} and report.text.endswith("no control was run")
