"""The shipped mechanisms for slim: each applies alone and with every other, its kernels are right, and it changes no greedy token."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "memory" / "seeds"
NAMES = [p.parent.name for p in sorted(SEEDS.glob("*/mechanism.yaml")) if "slim" in p.read_text()]
BODY = {name: yaml.safe_load((SEEDS / name / "mechanism.yaml").read_text()) for name in NAMES}
FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
NATIVE = shutil.which("g++") is not None and {"avx2", "fma"} <= set(FLAGS)
needs_native = pytest.mark.skipif(not NATIVE, reason="needs g++ and a processor with AVX2 and FMA")

DRIVE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(int(sys.argv[3]))
from slim_engine import profiling
from slim_engine.counters import COUNTERS
from slim_engine.loading import EngineOptions, load
from slim_engine.request import LogprobOptions, Request
from slim_engine.sampling import SamplingParams
from slim_engine.scheduler import Scheduler
out = {}
def run(scheduler, prompts, **params):
    made = [Request(str(i), p, SamplingParams(max_new_tokens=24, ignore_eos=True, **params), (2,), lambda c: None) for i, p in enumerate(prompts)]
    for r in made: scheduler.add(r)
    while scheduler.busy: scheduler.step()
    return [r.output_ids for r in made], made
prompts = [[5, 9, 7, 5, 9, 7, 5, 9], list(range(40, 90)), [11] * 3]
with torch.inference_mode():
    for name, target, drafter in json.loads(sys.argv[1]):
        loaded = load(EngineOptions(Path(target), drafter))
        s = Scheduler(loaded)
        profiling.start()
        out[name + ' together'], _ = run(s, prompts)
        trace = json.loads(profiling.stop(Path(sys.argv[2])).read_text())['traceEvents']
        out[name + ' scopes'] = sorted({e['name'] for e in trace})
        out[name + ' alone'] = [run(s, [p])[0][0] for p in prompts]
        out[name + ' lengths'] = [len(o) for o in run(s, prompts, temperature=0.8, seed=3)[0]]
        scored = Request('s', list(range(30, 70)), SamplingParams(max_new_tokens=0), (2,), lambda c: None, logprobs=LogprobOptions(0, 2))
        s.add(scored)
        while s.busy: s.step()
        out[name + ' scores'] = [t.logprob for t in scored.input_logprobs]
out['counters'] = COUNTERS.snapshot()
print(json.dumps(out))
"""

KERNEL = """
import torch
import numpy as np
torch.set_num_threads(2)
from slim_engine.native_linear import NativeLinear
random = torch.Generator().manual_seed(0)
for n, k in [(1, 1), (7, 5), (16, 16), (50, 33), (100, 577), (33, 64), (260, 32), (960, 576), (576, 1536)]:
    weight = (torch.randn(n, k, generator=random) * 0.1).bfloat16()
    x = torch.randn(70, k, generator=random)
    truth = x.double().numpy() @ weight.double().numpy().T
    limit = 2.0**-23 * k * (np.abs(x.double().numpy()) @ np.abs(weight.double().numpy()).T) + 1e-12
    linear = NativeLinear(weight, 'w')
    single = torch.cat([linear(x[i : i + 1]) for i in range(70)])
    for m in [*range(1, 18), 48, 49, 70]:
        y = linear(x[:m])
        assert (np.abs(y.double().numpy() - truth[:m]) <= limit[:m]).all(), (n, k, m)
        assert torch.equal(y, single[:m]), (n, k, m)
weight = torch.zeros(40, 24).bfloat16()
weight[3, 2], weight[17, 5], weight[39, 0] = float('nan'), float('inf'), float('-inf')
y = NativeLinear(weight, 'w')(torch.ones(5, 24))
assert y[:, 3].isnan().all() and (y[:, 17] == float('inf')).all() and (y[:, 39] == float('-inf')).all()
assert (y[:, [0, 1, 2, 38]] == 0).all()
"""

ARGMAX = """
import torch
torch.set_num_threads(2)
from slim_engine.native_head import best_tokens
from slim_engine.native_linear import NativeLinear
random = torch.Generator().manual_seed(0)
for n, k in [(1, 8), (15, 8), (260, 32), (1000, 64), (4099, 40)]:
    weight = torch.randn(n, k, generator=random).bfloat16()
    weight[n // 2 :] = weight[: n - n // 2].clone()  # every maximum exists twice: the first must win
    linear = NativeLinear(weight, 'w')
    for m in [*range(1, 18), 48, 49, 100]:
        x = torch.randn(m, k, generator=random)
        assert best_tokens(linear, x, 'target.head') == linear(x).numpy().argmax(-1).tolist(), (n, m)
x = torch.zeros(2, 40)
assert best_tokens(linear, x, 'target.head') == [0, 0]
weight[77, 3] = float('nan')
assert best_tokens(NativeLinear(weight, 'w'), torch.ones(1, 40), 'target.head') == [77]
"""


def closure(names: list[str]) -> list[str]:
    """`names` with what they require before them."""
    order: list[str] = []
    for name in names:
        order += [n for n in [*closure(BODY[name]["requires"]), name] if n not in order]
    return order


def git(folder: Path, *args: str) -> None:
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *args], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"git {' '.join(args)}: {done.stderr}"


def grow(base: Path, folder: Path, names: list[str]) -> Path:
    """A clone of `base` in `folder` with the patches of `names` merged in order."""
    git(base, "clone", "-q", str(base), str(folder))
    for name in names:
        git(folder, "apply", "--3way", "--index", str(SEEDS / name / "change.patch"))
        git(folder, "commit", "-q", "-m", name)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("seeds") / "base"
    shutil.copytree(ROOT / "engines" / "slim", tree, ignore=shutil.ignore_patterns("__pycache__"))
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "base")
    return tree


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    folder = tmp_path_factory.mktemp("models")
    made = []
    for name, heads, kv_heads, dim in [("llama", 3, 1, 16), ("qwen3", 4, 2, 8)]:
        target = make_tiny_model(folder / name, name, heads=heads, kv_heads=kv_heads, head_dim=dim)
        made.append((name, str(target), str(make_tiny_drafter(folder / f"{name}-d", target))))
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def python(tree: Path, cache: Path, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "SLIM_NATIVE_CACHE": str(cache),
        "OMP_NUM_THREADS": "2",
        **env,
    }
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=tree, env=environment, capture_output=True, text=True, timeout=120
    )


def drive(tree: Path, cache: Path, models: list[tuple[str, str, str]], threads: int = 1) -> dict:
    done = python(tree, cache, DRIVE, json.dumps(models), str(tree / "trace.json"), str(threads))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock(base: Path, cache: Path, models: list[tuple[str, str, str]]) -> dict:
    return drive(base, cache, models)


def test_every_pair_applies_in_both_orders(base: Path, tmp_path: Path) -> None:
    tree = grow(base, tmp_path / "t", [])
    for pair in itertools.permutations(NAMES, 2):
        git(tree, "checkout", "-q", "-f", "--detach", "origin/HEAD")
        git(tree, "clean", "-fdq")
        for name in closure(list(pair)):
            git(tree, "apply", "--3way", "--index", str(SEEDS / name / "change.patch"))
            git(tree, "commit", "-q", "-m", name)


@needs_native
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_greedy_tokens_and_scores_are_those_of_stock(
    name: str, base: Path, cache: Path, models: list[tuple[str, str, str]], stock: dict, tmp_path: Path
) -> None:
    names = NAMES if name == "all" else [name]
    found = drive(grow(base, tmp_path / "t", closure(names)), cache, models, 2 if name == "all" else 1)
    for architecture in ("llama", "qwen3"):
        assert found[f"{architecture} together"] == stock[f"{architecture} together"]
        assert found[f"{architecture} alone"] == stock[f"{architecture} alone"]
        assert found[f"{architecture} lengths"] == [24, 24, 24]
        assert found[f"{architecture} scores"] == pytest.approx(stock[f"{architecture} scores"], abs=1e-4)
        assert {"target.qkv", "target.attention", "target.mlp", "target.head", "draft.mlp", "round"} <= set(
            found[f"{architecture} scopes"]
        )
    for counter in [c for n in names for c in BODY[n]["counters"]]:
        if counter != "native_gemm_calls" or name == "native-bf16-gemm":  # passes and fused heads take its place
            assert found["counters"].get(counter, 0) > 0, counter
        assert counter not in stock["counters"]


@needs_native
def test_gemm_against_float64_and_its_own_single_rows(base: Path, cache: Path, tmp_path: Path) -> None:
    done = python(grow(base, tmp_path / "t", ["native-bf16-gemm"]), cache, KERNEL)
    assert done.returncode == 0, done.stderr


@needs_native
def test_fused_argmax_takes_the_first_of_equals(base: Path, cache: Path, tmp_path: Path) -> None:
    done = python(grow(base, tmp_path / "t", closure(["fused-argmax"])), cache, ARGMAX)
    assert done.returncode == 0, done.stderr


@needs_native
def test_without_a_compiler_the_engine_does_not_start(base: Path, cache: Path, tmp_path: Path, models: list) -> None:
    tree = grow(base, tmp_path / "t", ["native-bf16-gemm"])
    code = "from slim_engine.native_linear import library; library()"
    done = python(tree, tmp_path / "empty", code, PATH="/nonexistent", CXX="g++-none")
    assert done.returncode != 0
    assert "no C++ compiler found" in done.stderr
