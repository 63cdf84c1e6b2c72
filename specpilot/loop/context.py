"""Everything a phase needs, in one place: the run's folder, its journal, its engines and its prompts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpilot.bubblewrap import bubblewrap
from specpilot.deployment import Deployment
from specpilot.engine_tree import EngineSpec, load_engine_spec
from specpilot.evaluation.prompts import PromptPool
from specpilot.evaluation.server import EngineServer
from specpilot.journal import Journal
from specpilot.loop.budget import BudgetClock
from specpilot.loop.records import Prepared, RunMeta
from specpilot.models import ResolvedModels
from specpilot.workspace import Workspace

if TYPE_CHECKING:
    from specpilot.memory.store import MemoryStore
    from specpilot.report.view import RunView

UNCONFINED = (
    "no usable bubblewrap: candidates run unconfined and can change whatever this user can, this program and its evidence "
    "included. Install it (apt install bubblewrap), or read every patch before you trust its result."
)


@dataclass
class RunContext:
    """One run in this process. Created by `run.py`, passed to every phase."""

    run_dir: Path
    deployment: Deployment
    meta: RunMeta
    journal: Journal
    view: RunView
    budget: BudgetClock
    memory: MemoryStore
    workspace: Workspace | None = None
    models: ResolvedModels | None = None
    prepared: Prepared | None = None
    session: int = 0
    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    """Part of the prompts' secret that is in no file: whoever reads the journal still cannot foretell a prompt. Nothing needs to
    ask a prompt again after a restart: finished steps are read, unfinished ones begin anew."""

    @property
    def logs(self) -> Path:
        """Folder of the engines' and workers' logs."""
        return self.run_dir / "logs"

    @cached_property
    def spec(self) -> EngineSpec:
        """The stock engine's description: the editable paths and variants that hold for the whole run."""
        return load_engine_spec(self.tree_at(self.trees.first_commit))

    @property
    def trees(self) -> Workspace:
        """The run-owned repository (available once `prepare` made it)."""
        if self.workspace is None:
            raise RuntimeError("the run's repository is not open yet")
        return self.workspace

    @property
    def resolved(self) -> ResolvedModels:
        """The checkpoints on disk (available once `prepare` fetched them)."""
        if self.models is None:
            raise RuntimeError("the run's models are not resolved yet")
        return self.models

    @property
    def identity(self) -> Prepared:
        """The identities asserted at every start of an engine."""
        if self.prepared is None:
            raise RuntimeError("the run is not prepared yet")
        return self.prepared

    def prompts(self, key: str) -> PromptPool:
        """A pool whose prompts no other step, and no earlier session of the same step, ever saw."""
        tokenizer = Path(self.identity.target_dir) / "tokenizer.json"
        return PromptPool(self.deployment, tokenizer, f"{self.meta.secret}:{self.salt}:{self.session}:{key}")

    @contextmanager
    def engine(self, commit: str, variant: str, purpose: str) -> Iterator[EngineServer]:
        """Starts the engine of `commit` as `variant`, yields it ready, and always stops it."""
        server = EngineServer(
            tree=self.tree_at(commit),
            spec=self.spec,
            variant=variant,
            commit=commit,
            models=self.resolved,
            deployment=self.deployment,
            log_dir=self.logs / purpose.replace("/", "-"),
            recorder=self.recorder(purpose),
            hidden=self.secret_paths(),
        )
        with server:
            yield server

    def recorder(self, purpose: str) -> Callable[[int, int, float], None]:
        """Tells the journal of a child process before it runs, so that a later life of the run can end it."""
        return lambda pid, pgid, start: self.journal.record_process(pid, pgid, start, purpose)

    def tree_at(self, commit: str) -> Path:
        """A worktree with exactly the files of `commit`, for serving."""
        return self.trees.checkout(f"serve-{commit[:12]}", commit)

    def secret_paths(self) -> list[Path]:
        """What no engine may read: prompts (it could answer them while it starts), the journal (its write-ahead log too) with the nonces' secret."""
        prompts = [*self.deployment.prompt_files("tuning"), *self.deployment.prompt_files("hidden")]
        journal = [self.journal.path.with_name(self.journal.path.name + end) for end in ("", "-wal", "-shm")]
        return [path for path in (*prompts, *journal) if path.exists()]

    def warn_unconfined(self) -> None:
        """Says, before candidate code runs, that nothing keeps it inside its folder. Its results are worth a reader's trust in it."""
        if bubblewrap() is None:
            self.say("note", level="warning", text=UNCONFINED)

    def doing(self, text: str, attempt: str | None = None) -> None:
        """Says what begins now and gives no sign of life for some seconds; `attempt`: whom it is about."""
        self.say("doing", text=text, **({"attempt": attempt} if attempt else {}))

    def tell_again(self, known: bool, kind: str, **data: Any) -> None:
        """Shows the event of a step; the journal has it already where the step had finished before (`known`)."""
        if known:
            self.view.event(kind, data)
        else:
            self.say(kind, **data)

    def say(self, kind: str, **data: Any) -> None:
        """Shows an event and keeps it in the journal."""
        self.journal.event(kind, data)
        self.view.event(kind, data)
