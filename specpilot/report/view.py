"""The live view of a run: a rich screen on a terminal, plain lines anywhere else.

Drawing never stops a run: an event that cannot be drawn is dropped. The view holds no truth; the journal does.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specpilot.report.panels import screen
from specpilot.report.state import MALFORMED, RunState, clock
from specpilot.report.summary import final_summary


class RunView:
    """Shows a run as its events arrive. A context manager; `event` may be called from any thread.

    Kinds of events and the fields they carry (all optional; more are ignored):

    - `phase`: name (`prepare`, `gate`, `baselines`, `round 1`, `closing`), detail, attempt: whom it is about
    - `calibration`: the fields of `contracts.Calibration`
    - `selftest`: one planted cheat (cheat, caught, got, expected), or outcomes: a list of them
    - `selftest-end`: passed, caught, cheats, null_ratio, null_low, null_high
    - `baseline`: variants {name: {decode_tokens_per_s, accepted_length, ...}}, ratios [{of, over, ratio, low, high}]
    - `gaps`: the fields of `contracts.GapTable`
    - `prompts`: done, of: how far a session of several engines is
    - `doing`: text: what begins now and is silent for some seconds; attempt: whom it is about
    - `attempt`: id, round, worker, component, mechanism, task, state, reason, detail
    - `pair`: attempt, pair, of, mean, low, high (progress of a comparison; prints no line)
    - `comparison`: attempt, and the fields of `contracts.Comparison`
    - `verdict`: attempt, and the fields of `contracts.Verdict`
    - `merge`: attempt_id, mechanism, merged, reason, gain, low, high
    - `left-out`: attempt_id, name, outcome, gain, low, high, detail: a merged change against the final engine without it
    - `trial`: worker, arm, values, ratio
    - `extended`: wall_clock_minutes, rounds (all that the run may take now)
    - `budget`: limit_s, elapsed_s, rounds (prints no line)
    - `note`: level (`info`, `warning`, `error`), text
    - `ended`: stop, resume (the command that goes on): the run stopped before its end
    - `done`: stop, report (path), data (`report.data.ReportData`): prints the closing summary
    """

    def __init__(
        self,
        deployment: str = "",
        run_id: str = "",
        run_dir: Path | None = None,
        *,
        plain: bool = False,
        console: Console | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=plain or not sys.stdout.isatty())
        self.plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self.run_dir = run_dir
        self.state = RunState(deployment=deployment, run_id=run_id)
        if limit_s is not None:
            self.state.budget = {"limit_s": limit_s}
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._summary: RenderableType | None = None

    def __enter__(self) -> RunView:
        where = f"  {self.run_dir}" if self.run_dir else ""
        self._print(f"run {self.state.run_id or '-'} of {self.state.deployment or '-'}{where}")
        if not self.plain:
            self._live = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=2,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            for at, line in self.state.events if self._summary is None else ():
                self._print(f"{time.strftime('%H:%M:%S', time.localtime(at))} {line}")
        if self._summary is not None:
            self.console.print(self._summary)
            self._summary = None
            if not self.plain and (self.state.done or {}).get("report"):
                self._print(f"report  {(self.state.done or {})['report']}")

    def event(self, kind: str, data: dict[str, Any]) -> None:
        """Take one event; prints its lines when plain, else the screen shows them at the next refresh."""
        with self._lock:
            try:
                lines = self.state.apply(kind, data)
                if kind == "done" and data.get("data") is not None:
                    self._summary = final_summary(data["data"])
            except MALFORMED as error:
                lines = [f"(the view cannot show a {kind} event: {type(error).__name__})"]
            if self.plain:
                for line in lines:
                    self._print(f"{clock(time.time() - self.state.started)} {line}")

    def render(self) -> RenderableType:
        """The whole screen as it stands."""
        with self._lock:
            try:
                return screen(self.state, self.console)
            except MALFORMED as error:
                return Group(Text(f"(the view cannot draw: {type(error).__name__}: {error})", style="dim"))

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
