"""The same code against the real engine `slim` with a tiny random model: protocol, identity, timing, scoring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from specpilot.deployment import Deployment, MeasurementSettings, Regime, parse_deployment
from specpilot.engine_tree import load_engine_spec
from specpilot.evaluation.compare import compare
from specpilot.evaluation.errors import WrongWeights
from specpilot.evaluation.legs import run_leg
from specpilot.evaluation.prompts import PromptPool
from specpilot.evaluation.server import EngineServer, check_identity
from specpilot.models import ResolvedModels, ensure_models
from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model

YAML = """
name: tiny
target: {path: target, architecture: LlamaForCausalLM}
drafter: {method: dflash, path: drafter}
regime: {concurrency: 1, input_tokens: 200, output_tokens: 24}
workload: {tuning: tuning.jsonl, hidden: hidden.jsonl}
engine: {tree: slim, threads: 1}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, ResolvedModels, Path]]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder / "target")
    make_tiny_drafter(folder / "drafter", folder / "target")
    for name in ("tuning", "hidden"):
        rows = [{"id": k, "source": "x", "text": f"<|im_start|>user\nCount to {k}.<|im_end|>\n"} for k in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    patch = pytest.MonkeyPatch()
    patch.setenv("SPECPILOT_HOME", str(folder / "home"))
    deployment = parse_deployment(YAML, folder)
    yield deployment, ensure_models(deployment), folder
    patch.undo()


def server(tiny: tuple[Deployment, ResolvedModels, Path], variant: str, commit: str = "aa") -> EngineServer:
    deployment, models, folder = tiny
    tree = deployment.engine_tree()
    return EngineServer(
        tree=tree,
        spec=load_engine_spec(tree),
        variant=variant,
        commit=commit,
        models=models,
        deployment=deployment,
        log_dir=folder / "logs" / "tiny",
    )


def test_slim_is_measured_and_scored(tiny) -> None:
    deployment = tiny[0]
    pool = PromptPool(deployment, tiny[1].target_dir, "secret")
    with ExitStack() as stack:
        servers = [server(tiny, *which) for which in (("stock", "aa"), ("reference", "bb"))]
        with ThreadPoolExecutor(2) as starts:
            base, reference = starts.map(stack.enter_context, servers)
        with pytest.raises(WrongWeights, match="target sha256"):
            check_identity(base.identity, "aa", "stock", tiny[1].model_copy(update={"target_sha256": "0" * 64}))
        settings = MeasurementSettings(max_pairs=3, min_pairs=3)
        found, legs = compare(
            base, reference, pool.stream("tuning"), settings, 0.02, regime=Regime(concurrency=1, output_tokens=24)
        )
        assert found.base.accepted_length is not None and found.base.accepted_length >= 1.0
        assert found.candidate.accepted_length == 1.0 and found.candidate.tokens == 72
        for leg in legs:
            assert leg.counters["committed_tokens"] >= 23 and leg.counters["rounds"] == leg.generations[0].rounds
            assert leg.generations[0].claimed_tokens == 24
        for leg in legs:
            (answer,) = leg.generations
            ids = answer.prompt_ids + answer.output_ids
            rows = reference.client.score(ids, len(answer.prompt_ids))
            assert [row.token for row in rows] == answer.output_ids
            assert max(row.gap for row in rows) < 0.05
        wrong = [*answer.prompt_ids, *answer.output_ids[:5], (answer.output_ids[5] + 1) % 250]
        (row,) = reference.client.score(wrong, len(wrong) - 1)
        assert row.gap > 0 and row.top_token == answer.output_ids[5] and len(row.top) == 2
        together = run_leg(reference, pool.take("hidden", 4), concurrency=2, max_new_tokens=8, side="base")
        assert [len(g.output_ids) for g in together.generations] == [8] * 4
