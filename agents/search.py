"""The search worker: tunes declared knobs by ask and tell, so that the loop does the measuring.

Two arms get the same number of trials: Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) and
random search as its control. Trials are kept in one append-only file: a resumed session offers a trial that was
asked but not told again, and suggestions depend on the file's content and the seed alone, never on how often
the process was restarted.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .base import AgentError, ClaimDraft, Proposal, WorkContext
from .space import Space, Tunable, TunableEdit, Value, load_space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Optuna is imported where it is used: commands that do not search should not wait for it.

Arm = Literal["tpe", "random"]
ARMS: tuple[Arm, Arm] = ("tpe", "random")
RETRIES = 32
"""Suggestions that repeat a setting are redrawn this often; then the arm takes any untried one."""
MIN_GAIN = 1.01
"""A best setting below this screening ratio is not proposed."""


@dataclass(frozen=True)
class Trial:
    """One setting to screen. `apply` puts it into a worktree."""

    number: int
    arm: Arm
    values: dict[str, Value]

    def apply(self, worktree: Path) -> list[str]:
        """Write the values to the worktree's tunables.toml."""
        return TunableEdit(self.values).apply(worktree)


@dataclass(frozen=True)
class SearchReport:
    """How the arms compare, at equal numbers of trials."""

    trials: dict[str, int]
    failed: dict[str, int]
    best: dict[str, float | None]
    """Arm -> best screening ratio against the current setting."""
    mean: dict[str, float | None]
    space_size: float

    @property
    def text(self) -> str:
        """One honest paragraph."""
        if not sum(self.trials.values()):
            return "nothing was searched"
        parts = []
        for arm in self.trials:
            best, mean = self.best[arm], self.mean[arm]
            figure = "no setting could be measured" if best is None else f"best {best:.3f}x, mean {mean:.3f}x"
            failed = f", {self.failed[arm]} failed" if self.failed[arm] else ""
            label = "TPE" if arm == "tpe" else "random search"
            parts.append(
                f"{label}: {figure} over {self.trials[arm]} trial{'' if self.trials[arm] == 1 else 's'}{failed}"
            )
        if "random" not in self.trials:
            return "; ".join([*parts, "no control was run"])
        tpe, control = self.best["tpe"], self.best["random"]
        if tpe is None or control is None:
            verdict = "the arms cannot be compared"
        elif abs(tpe / control - 1) < 0.01:
            verdict = "no difference between the arms (below 1 %)"
        else:
            ahead, share = ("TPE", tpe / control) if tpe > control else ("random search", control / tpe)
            verdict = f"{ahead} is ahead by {100 * (share - 1):.1f} % in this one search of screening legs"
        return "; ".join([*parts, verdict])


@dataclass
class SearchSession:
    """One search over one base commit. Budget: `trials` per arm. The current setting counts as 1.0 in both arms.

    `path` is the append-only file. Opening an existing one continues it; raises AgentError when it belongs to
    another space, base commit or seed.
    """

    path: Path
    space: Space
    base_commit: str
    trials: int
    seed: int = 0
    name: str = "search"
    control: bool = True
    """Whether random search runs beside TPE. Without it nothing tells what the model-based search is worth."""
    _asked: list[Trial] = field(default_factory=list)
    _told: dict[int, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise AgentError(f"search needs at least one trial per arm, not {self.trials}")
        header = {
            "base_commit": self.base_commit,
            "seed": self.seed,
            "space": json.loads(json.dumps([asdict(t) for t in self.space.tunables])),
            "current": self.space.current,
            "arms": list(self.arms),
        }
        lines = self._lines()
        if not lines:
            self._append({"header": header})
            return
        if lines[0].get("header") != header:
            raise AgentError(f"{self.path} belongs to another search", "give each base commit a file of its own")
        for line in lines[1:]:
            if "ask" in line:
                self._asked.append(Trial(**line["ask"]))
            else:
                self._told[line["tell"]] = line["ratio"]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms of this session, in turn."""
        return ARMS if self.control else ("tpe",)

    # ------------------------------------------------------------------ ask and tell

    def ask(self) -> Trial | None:
        """The next setting to screen (arms take turns), an unfinished one first; None when the budget is spent."""
        for trial in self._asked:
            if trial.number not in self._told:
                return trial
        used = {arm: sum(t.arm == arm for t in self._asked) for arm in self.arms}
        arm = min(self.arms, key=lambda a: used[a])
        if used[arm] >= self.trials:
            return None
        values = self._suggest(arm)
        if values is None:
            return None
        trial = Trial(len(self._asked), arm, values)
        self._append({"ask": asdict(trial)})
        self._asked.append(trial)
        return trial

    def tell(self, trial: Trial, ratio: float | None) -> None:
        """Enter the screening ratio against the current setting; None: the engine failed with it."""
        if trial.number >= len(self._asked) or self._asked[trial.number] != trial:
            raise AgentError(f"trial {trial.number} was not asked by this search")
        if trial.number in self._told:
            return
        if ratio is not None and not 0 < ratio < float("inf"):
            raise AgentError(f"a screening ratio must be a positive number, not {ratio}")
        self._append({"tell": trial.number, "ratio": ratio})
        self._told[trial.number] = ratio

    @property
    def finished(self) -> bool:
        """True when every trial of the budget was told."""
        return len(self._told) >= len(self.arms) * self.trials or (
            len(self._asked) == len(self._told) and self._untried() == 0
        )

    # ------------------------------------------------------------------ results

    def best(self) -> tuple[Trial, float] | None:
        """The best measured setting of both arms; None when none was measured."""
        measured = [(self._asked[number], ratio) for number, ratio in self._told.items() if ratio is not None]
        return max(measured, key=lambda item: (item[1], -item[0].number), default=None)

    def proposal(self) -> Proposal | None:
        """A candidate that sets the best values; None when nothing beat the current setting by 1 %."""
        best = self.best()
        if best is None or best[1] < MIN_GAIN:
            return None
        trial, ratio = best
        changed = {k: v for k, v in trial.values.items() if v != self.space.current[k]}
        words = ", ".join(f"{name} = {value}" for name, value in sorted(changed.items()))
        concerned = {tunable.component for tunable in self.space.tunables if tunable.name in changed}
        component = concerned.pop() if len(concerned) == 1 else "*"
        return Proposal(
            worker=self.name,
            component=component,
            task=f"Set {words}",
            claim=ClaimDraft(component, f"With {words} the decode round is faster at this load.", ratio),
            edit=TunableEdit(changed),
            why=f"best of {len(self._told)} screened settings, {ratio:.3f}x in its screening leg; {self.report().text}",
        )

    def report(self) -> SearchReport:
        """The arms side by side."""
        by_arm: dict[str, list[float | None]] = {
            arm: [self._told[t.number] for t in self._asked if t.arm == arm and t.number in self._told]
            for arm in self.arms
        }
        good = {arm: [ratio for ratio in ratios if ratio is not None] for arm, ratios in by_arm.items()}
        return SearchReport(
            trials={arm: len(ratios) for arm, ratios in by_arm.items()},
            failed={arm: sum(ratio is None for ratio in ratios) for arm, ratios in by_arm.items()},
            best={arm: max(ratios, default=None) for arm, ratios in good.items()},
            mean={arm: statistics.fmean(ratios) if ratios else None for arm, ratios in good.items()},
            space_size=self.space.size,
        )

    # ------------------------------------------------------------------ inside

    def _seen(self, arm: Arm) -> set[str]:
        return {_key(self.space.current)} | {_key(trial.values) for trial in self._asked if trial.arm == arm}

    def _untried(self) -> float:
        return min(self.space.size - len(self._seen(arm)) for arm in self.arms)

    def _suggest(self, arm: Arm) -> dict[str, Value] | None:
        """A setting this arm has not tried; None when it has tried all."""
        seen = self._seen(arm)
        if self.space.size <= len(seen):
            return None
        for attempt in range(RETRIES):
            values = self._draw(arm, attempt)
            if _key(values) not in seen:
                return values
        generator = random.Random(f"{self.seed}/{arm}/{len(self._asked)}")
        while True:
            values = {t.name: _uniform(t, generator) for t in self.space.tunables}
            if _key(values) not in seen:
                return values

    def _draw(self, arm: Arm, attempt: int) -> dict[str, Value]:
        import optuna

        seed = random.Random(f"{self.seed}/{arm}/{len(self._asked)}/{attempt}").randrange(2**32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler: optuna.samplers.BaseSampler = (
                optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=max(2, min(5, self.trials // 3)), multivariate=True
                )
                if arm == "tpe"
                else optuna.samplers.RandomSampler(seed=seed)
            )
        space = {tunable.name: _distribution(tunable) for tunable in self.space.tunables}
        with _quiet():
            study = optuna.create_study(direction="maximize", sampler=sampler)
            study.add_trial(optuna.trial.create_trial(params=self.space.current, distributions=space, value=1.0))
            for trial in self._asked:
                ratio = self._told.get(trial.number)
                if trial.arm == arm and ratio is not None:
                    study.add_trial(optuna.trial.create_trial(params=trial.values, distributions=space, value=ratio))
            return dict(study.ask(space).params)

    def _lines(self) -> list[dict[str, Any]]:
        """The file's lines; a last line torn by a crash is cut off."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise AgentError(f"{self.path} is damaged: {error}", "remove it to search again") from error

    def _append(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass
class SearchWorker:
    """Opens a session per base commit and round; the loop asks it for trials, measures them and tells their ratios."""

    trials: int = 6
    name: str = "search"
    control: bool = True
    """As in `SearchSession`."""

    def open(self, context: WorkContext) -> SearchSession | None:
        """The session of this base commit, new or continued; None when the tree declares nothing to tune."""
        facts = {} if context.block_size is None else {"block_size": context.block_size}
        space = load_space(context.tree, drafter=context.drafter, facts=facts)
        if not space.tunables:
            return None
        # The round is in the name: an extended run may search again from the same commit, with another seed.
        path = context.folder / f"search-{context.base_commit[:12]}-r{context.round}.jsonl"
        return SearchSession(path, space, context.base_commit, self.trials, context.seed, self.name, self.control)


def _key(values: dict[str, Value]) -> str:
    return json.dumps(values, sort_keys=True)


def _distribution(tunable: Tunable) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if tunable.choices:
        return CategoricalDistribution(tunable.choices)
    if tunable.kind == "int":
        return IntDistribution(int(tunable.low), int(tunable.high), log=tunable.log)
    return FloatDistribution(tunable.low, tunable.high, log=tunable.log)


def _uniform(tunable: Tunable, generator: random.Random) -> Value:
    if tunable.choices:
        return generator.choice(tunable.choices)
    if tunable.kind == "int":
        return generator.randint(int(tunable.low), int(tunable.high))
    return generator.uniform(tunable.low, tunable.high)


class _quiet:
    """Optuna says nothing on the console while we ask it."""

    def __enter__(self) -> None:
        import optuna

        self.level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)

    def __exit__(self, *_: object) -> None:
        import optuna

        optuna.logging.set_verbosity(self.level)
