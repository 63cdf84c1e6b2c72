"""One engine process from one commit: started, identified, frozen, thawed, stopped.

Threat model: the process is untrusted. It is told its port and its checkpoints and nothing else of the run; it
must prove by `/server_info` which commit, variant and checkpoint it serves, and that proof must come from the
process we started; while another engine is timed it is stopped by signal, so that it neither takes CPU time nor
works ahead. What it may touch is `specpilot.sandbox`'s business.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from specpilot import sandbox
from specpilot.cores import usable_cores
from specpilot.deployment import Deployment
from specpilot.engine_tree import EngineSpec
from specpilot.errors import EnvironmentProblem, InfrastructureError
from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.errors import (
    EngineCrash,
    EngineError,
    LimitExceeded,
    StartFailed,
    WrongIdentity,
    WrongWeights,
)
from specpilot.evaluation.wire import flat_counters

if TYPE_CHECKING:
    from specpilot.models import ResolvedModels

HOST = "127.0.0.1"
PORT_TRIES = 3
REQUEST_TIMEOUT_S = 120.0
SPECULATIVE = ("stock", "final")
"""Variants that must load the drafter; the others may."""

Scheduling = dict[int, tuple[tuple[int, ...], int, int]]
"""Thread id -> cores it may use, policy, nice value."""


class EngineServer:
    """A context manager around one engine process; `client` talks to it while it is not frozen."""

    def __init__(
        self,
        *,
        tree: Path,
        spec: EngineSpec,
        variant: str,
        commit: str,
        models: ResolvedModels,
        deployment: Deployment,
        log_dir: Path,
        port: int | None = None,
        recorder: Callable[[int, int, float], None] | None = None,
        limits: sandbox.Limits | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        hidden: Sequence[Path] = (),
    ) -> None:
        """Does not start anything. `port` None picks a free one; `recorder` is told (pid, pgid, start time);
        `hidden` names paths the process must not see (where the sandbox can hide any)."""
        self.tree = tree
        self.spec = spec
        self.variant = variant
        self.commit = commit
        self.models = models
        self.deployment = deployment
        self.log_dir = log_dir
        self.port = port or 0
        self.startup_s = 0.0
        self.identity: dict[str, Any] = {}
        self.scheduled: Scheduling = {}
        self.frozen = False
        self._fixed_port = port is not None
        self._recorder = recorder
        self._limits = limits or sandbox.Limits()
        self._request_timeout_s = request_timeout_s
        self._hidden = list(hidden)
        self._child: sandbox.Child | None = None
        self._client: EngineClient | None = None

    def __enter__(self) -> EngineServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        return f"{self.variant} engine of {self.commit[:12]}"

    @property
    def child(self) -> sandbox.Child:
        """The sandboxed process. Raises RuntimeError before `start` and after `stop`."""
        if self._child is None:
            raise RuntimeError(f"the {self} is not running")
        return self._child

    @property
    def client(self) -> EngineClient:
        """The protocol client. Raises RuntimeError when the engine is not running or frozen: our own mistake."""
        if self._client is None:
            raise RuntimeError(f"the {self} is not running")
        if self.frozen:
            raise RuntimeError(f"the {self} is frozen; thaw it first")
        return self._client

    def start(self) -> None:
        """Launches, waits until ready, checks identity; leaves nothing running when it fails.

        Raises StartFailed (with the log's tail), LimitExceeded, WrongIdentity, or EnvironmentProblem when a given
        port is taken. A free port lost to another process between choosing and binding is tried again.
        """
        if self._child is not None:
            raise RuntimeError(f"the {self} runs already")
        for attempt in range(1 if self._fixed_port else PORT_TRIES):
            self._choose_port()
            try:
                self._launch()
                break
            except StartFailed as error:
                self.stop()
                if "address already in use" not in error.message.lower() or attempt == PORT_TRIES - 1:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Ends the process and everything it started. Safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._child is not None:
            if self.frozen:
                self._child.thaw()
            self._child.stop()
            self._child = None
        self.frozen = False

    def freeze(self) -> None:
        """Stops the process by signal: no CPU time, no answers, memory kept.

        Raises LimitExceeded when something keeps continuing it.
        """
        if not self.frozen:
            try:
                self.child.freeze()
            except InfrastructureError as error:
                raise LimitExceeded(
                    f"the {self} does not stay stopped: {error.message}", "something wakes it"
                ) from error
            self.frozen = True

    def thaw(self) -> None:
        """Lets a frozen process go on."""
        if self.frozen:
            self.child.thaw()
            self.frozen = False

    @contextmanager
    def active(self) -> Iterator[EngineServer]:
        """Thawed inside the block, frozen after it."""
        self.thaw()
        try:
            yield self
        finally:
            if self._child is not None and self._child.poll() is None:
                self.freeze()

    @property
    def called_from(self) -> set[int]:
        """Local ports that our own requests to this engine came from, also while it is frozen."""
        return self._client.called_from if self._client is not None else set()

    def stated_counters(self) -> dict[str, float]:
        """The engine's counters, after checking that it still is the engine that was started. Raises WrongIdentity."""
        info = self.client.server_info()
        check_identity(info, self.commit, self.variant, self.models)
        return flat_counters(info)

    def cpu_seconds(self) -> float:
        """User and system CPU seconds of all processes of this engine: those that live, and those that a living one has collected.

        Without the latter, an engine could spend time in short-lived children and have it taken for a stranger's.
        """
        total = 0.0
        for process in self.child.processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def scheduling(self) -> Scheduling:
        """How the kernel schedules each living thread of this engine now. Empty where the system does not tell.

        Any process of the same user can change it from outside and make an engine slow for good, unless bubblewrap hides it.
        """
        found: Scheduling = {}
        if not hasattr(os, "sched_getaffinity"):
            return found
        for process in self.child.processes():
            try:
                for thread in process.threads():
                    cores = tuple(sorted(os.sched_getaffinity(thread.id)))
                    nice = os.getpriority(os.PRIO_PROCESS, thread.id)
                    found[thread.id] = (cores, os.sched_getscheduler(thread.id), nice)
            except (OSError, psutil.Error):
                continue
        return found

    def log_tail(self) -> str:
        """The last lines of the engine's output."""
        return self.child.tail() if self._child is not None else ""

    def _choose_port(self) -> None:
        if self._fixed_port:
            if not port_is_free(self.port):
                raise EnvironmentProblem(
                    f"port {self.port} is in use on {HOST}", "choose another, or end what holds it."
                )
            return
        self.port = free_port()

    def _launch(self) -> None:
        engine = self.deployment.engine
        # Build results are kept per commit, so that no candidate can plant a library for another.
        cache = self.log_dir.parent / "cache" / self.commit[:12]
        cache.mkdir(parents=True, exist_ok=True)
        values = {
            "python": engine.python or sys.executable,
            "target": str(self.models.target_dir),
            "drafter": self.models.drafter,
            "host": HOST,
            "port": str(self.port),
            "threads": str(engine.threads or usable_cores()),
            "variant": self.variant,
            "commit": self.commit,
            "cache": str(cache),
        }
        extra = {
            **self.spec.environment(values),
            **engine.environment,
            "SPECPILOT_COMMIT": self.commit,
            "SPECPILOT_VARIANT": self.variant,
        }
        began = time.monotonic()
        self._child = sandbox.spawn(
            self.spec.command(self.variant, values),
            cwd=self.tree / self.spec.launch.cwd,
            env=sandbox.scrub_environment(extra),
            log_path=self.log_dir / f"{self.variant}-{self.commit[:12]}-{self.port}.log",
            limits=self._limits,
            writable=[cache],
            readable=[self.tree, self.models.target_dir],
            hidden=self._hidden,
            recorder=self._recorder,
        )
        self._client = EngineClient(
            f"http://{HOST}:{self.port}",
            request_timeout_s=self._request_timeout_s,
            on_failure=self._explain,
        )
        self._wait_ready(began + self.spec.readiness.timeout_s)
        self.startup_s = time.monotonic() - began
        self.identity = self._client.server_info()
        check_identity(self.identity, self.commit, self.variant, self.models)
        self.scheduled = self.scheduling()

    def _wait_ready(self, deadline: float) -> None:
        client = self._client
        assert client is not None
        while True:
            self._raise_if_dead(StartFailed, "died while starting")
            if client.healthy(1.0, self.spec.readiness.path):
                # A stranger on the same port could have answered: ours must be alive and listening there.
                self._raise_if_dead(StartFailed, "died while starting")
                return
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"the {self} was not ready after {self.spec.readiness.timeout_s:.0f} s; its last words:\n"
                    f"{self.log_tail()}",
                    f"log: {self.child.log_path}",
                )
            time.sleep(self.spec.readiness.interval_s)

    def _raise_if_dead(self, kind: type[EngineError], what: str) -> None:
        status = self.child.poll()
        if status is None:
            return
        killed, tail = self.child.killed_for, self.log_tail()
        words = f"the {self} {what} (status {status}); its last words:\n{tail}"
        if killed is not None:
            raise LimitExceeded(f"the {self} was ended for its use of {killed}:\n{tail}", f"log: {self.child.log_path}")
        raise kind(words, f"log: {self.child.log_path}")

    def _explain(self, error: EngineError) -> EngineError:
        """The error of a request, replaced by what happened to the process if it is dead."""
        if self._child is None or not isinstance(error, EngineCrash):
            return error
        self._child.wait(1.0)
        try:
            self._raise_if_dead(EngineCrash, "died")
        except EngineError as better:
            return better
        return error


def check_identity(info: dict[str, Any], commit: str, variant: str, models: ResolvedModels) -> None:
    """Raises WrongIdentity unless `/server_info` states this commit, this variant and these checkpoints."""
    target, drafter = _section(info, "target"), _section(info, "drafter")
    code = [("commit", info.get("commit"), commit), ("variant", info.get("variant"), variant)]
    weights = [("target sha256", target.get("sha256"), models.target_sha256)]
    if models.drafter_sha256 is not None and (variant in SPECULATIVE or drafter.get("sha256") is not None):
        weights.append(("drafter sha256", drafter.get("sha256"), models.drafter_sha256))
    for kind, wanted in ((WrongIdentity, code), (WrongWeights, weights)):
        wrong = [
            f"{what} is {repr(found)[:100]}, expected {right!r}" for what, found, right in wanted if found != right
        ]
        if wrong:
            raise kind("the engine is not the one asked for: " + "; ".join(wrong), "was a slot or a path swapped?")


def _section(info: dict[str, Any], name: str) -> dict[str, Any]:
    value = info.get(name)
    return value if isinstance(value, dict) else {}


def free_port() -> int:
    """A loopback TCP port that nobody holds now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could bind this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
