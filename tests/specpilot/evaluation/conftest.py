"""Real servers on real sockets: the made-up engine of tests/helpers, started through the sandbox."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpilot.deployment import Deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.server import EngineServer
from tests.helpers.fake_deployment import SHA, write_fake_deployment
from tests.helpers.fake_server import Behaviour, build, write_fake_tree


@pytest.fixture(autouse=True)
def own_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests must not wait for a real run on this machine, nor for each other."""
    monkeypatch.setenv("SPECPILOT_LEASE_DIR", str(tmp_path / "leases"))


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment folder with prompts of two sources, a tokenizer and a stand-in checkpoint."""
    return write_fake_deployment(tmp_path_factory.mktemp("deployment"))


@pytest.fixture(scope="session")
def resolved(deployment: Deployment) -> Any:
    """Digests of the stand-in checkpoint, as `specpilot.models` would give them."""
    folder = deployment.folder / "target"
    return SimpleNamespace(target_dir=folder, target_sha256=SHA, drafter=str(folder), drafter_sha256=SHA)


MakeEngine = Callable[..., EngineServer]


@pytest.fixture
def make_engine(tmp_path: Path, deployment: Deployment, resolved: Any) -> MakeEngine:
    """`make_engine(commit="aa", variant="stock", **behaviour)`: a not yet started engine server."""
    numbers = itertools.count()

    def make(
        commit: str = "aa", variant: str = "stock", options: dict[str, Any] | None = None, **how: Any
    ) -> EngineServer:
        tree = write_fake_tree(tmp_path / f"tree{next(numbers)}", Behaviour(**how))
        return EngineServer(
            tree=tree,
            spec=load_engine_spec(tree),
            variant=variant,
            commit=commit,
            models=resolved,
            deployment=deployment,
            log_dir=tmp_path / "logs" / commit,
            **(options or {}),
        )

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Iterator[MakeEngine]:
    """Like `make_engine`, but started, and stopped at the end of the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(make_engine(*args, **kwargs))


@pytest.fixture
def talk() -> Iterator[Callable[..., EngineClient]]:
    """`talk(timeout_s=5, **behaviour)`: a client of an in-process fake server (no identity, no sandbox)."""
    with ExitStack() as stack:

        def start(timeout_s: float = 5.0, speculative: bool = True, **how: Any) -> EngineClient:
            server = build(Behaviour(**{"prefill_s": 0.0, "round_s": 0.0} | how), 0, speculative=speculative)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            client = EngineClient(f"http://127.0.0.1:{server.server_address[1]}", timeout_s)
            stack.callback(client.close)
            return client

        yield start
