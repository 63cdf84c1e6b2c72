"""The exported slim engine on a tiny random model: the official OpenAI client streams from it, and its evidence holds."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from specpilot.deployment import parse_deployment
from specpilot.export import export_run
from specpilot.models import ResolvedModels, weights_digest

from .conftest import RunBuilder

openai = pytest.importorskip("openai")
pytest.importorskip("torch")

from tests.helpers.tiny_model import make_tiny_drafter, make_tiny_model  # noqa: E402

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on engine slim whose one merged change sets a tunable, exported."""
    base = tmp_path_factory.mktemp("slim")
    home = base / "deployment"
    target = make_tiny_model(home / "tiny-target")
    drafter = make_tiny_drafter(home / "tiny-drafter", target)
    for which in ("tuning", "hidden"):
        rows = [
            {"id": f"{which}{k}", "source": "x", "text": f"<|im_start|>user\n{which} {k}<|im_end|>\n"} for k in range(4)
        ]
        (home / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "name": "tiny",
        "target": {"path": "tiny-target", "architecture": "LlamaForCausalLM"},
        "drafter": {"method": "dflash", "path": "tiny-drafter"},
        "regime": {"concurrency": 1, "input_tokens": 100, "output_tokens": 24},
        "workload": {"tuning": "tuning.jsonl", "hidden": "hidden.jsonl"},
        "engine": {"threads": 1},
    }
    deployment = parse_deployment(yaml.safe_dump(body), home)
    models = ResolvedModels(
        target_dir=target,
        target_sha256=weights_digest(target),
        drafter=str(drafter),
        drafter_sha256=weights_digest(drafter),
    )
    run = RunBuilder(base / "run", deployment, ROOT / "engines" / "slim", models)

    def change(worktree: Path) -> None:
        path = worktree / "tunables.toml"
        path.write_text(path.read_text().replace("verify_drafts = 15", "verify_drafts = 2"))

    run.merge(change, 1.2)
    run.finish()
    to = base / "the export"
    export_run(run.folder, to)
    return to


def environment(exported: Path) -> dict[str, str]:
    target = json.loads((exported / "export.json").read_text())["target"]["path"]
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}
    return {**kept, "ENGINE_PYTHON": sys.executable, "THREADS": "1", "TARGET_DIR": target}


@pytest.fixture(scope="module")
def served(exported: Path) -> Iterator[int]:
    """Port of `serve.sh final`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [str(exported / "serve.sh"), "final", str(port)],
        env=environment(exported),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert server.stdout is not None
    words = b""
    for line in server.stdout:
        words += line
        if line.startswith(b"serving "):
            break
    assert b"serving final" in words, words.decode()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).close()  # at once: it says so once it answers
    yield port
    server.terminate()
    server.wait(15)
    server.stdout.close()


def test_exported_engine(served: int, exported: Path) -> None:
    """One test, so that tests in parallel do not start the servers twice."""
    check_official_client_streams_a_chat(served)
    check_the_readmes_request_is_answered_twice_alike(served, exported)
    check_it_serves_the_winning_commit_with_its_change(served, exported)
    check_verify_forces_its_tokens_through_the_reference(exported)


def check_official_client_streams_a_chat(served: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        assert model == "tiny-target"
        chat = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(model=model, messages=chat, max_tokens=20, temperature=0)
        stream = client.chat.completions.create(model=model, messages=chat, max_tokens=20, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 1 and "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 20


def check_the_readmes_request_is_answered_twice_alike(served: int, exported: Path) -> None:
    """The curl line as it stands, with this server's port; and the endpoints that are named exist."""
    text = (exported / "README.md").read_text()
    line = text[text.index("    curl ") :].split("\n\n", 1)[0].replace(":30000/", f":{served}/")
    words = shlex.split(line.replace("\\\n", " "))
    url, body = next(word for word in words if word.startswith("http://")), words[words.index("-d") + 1]
    asked = json.loads(body)
    assert asked["temperature"] == 0 and '- `"model"`: `"tiny-target"`' in text

    def answer() -> str:
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as got:
            return str(json.load(got)["choices"][0]["message"]["content"])

    assert answer() == answer()
    for path in set(re.findall(r"`GET (/\S+)`", text)):
        urllib.request.urlopen(f"http://127.0.0.1:{served}{path}", timeout=60).close()
    posted = set(re.findall(r"`POST (/\S+)`", text))
    assert posted == {"/v1/completions", "/v1/chat/completions", "/generate"}
    for path in posted:
        with pytest.raises(
            urllib.error.HTTPError, match="400"
        ):  # an empty request is wrong, an unknown path would be 404
            urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{served}{path}", b"{}", {"Content-Type": "application/json"}),
                timeout=60,
            )


def check_it_serves_the_winning_commit_with_its_change(served: int, exported: Path) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served}/server_info", timeout=60) as answer:
        info = json.load(answer)
    manifest = json.loads((exported / "export.json").read_text())
    assert info["commit"] == manifest["variants"]["final"]["commit"] and info["variant"] == "final"
    assert info["tunables"]["verify_drafts"] == 2 and info["drafter"]["method"] == "dflash"


def check_verify_forces_its_tokens_through_the_reference(exported: Path) -> None:
    words = [str(exported / "verify.sh"), "--prompts", "2", "--tokens", "16"]
    done = subprocess.run(words, env=environment(exported), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "token forcing: 32 tokens" in done.stdout and "0 violations" in done.stdout
    requirements = (exported / "requirements.txt").read_text()
    for name in ("torch==", "fastapi==", "uvicorn==", "tokenizers==", "gguf==", "numpy=="):
        assert f"\n{name}" in requirements
