"""The server as a process: the native API, wrong input, clients that leave, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request as HttpRequest
from slim_engine import service
from slim_engine.request import Chunk, Request
from slim_engine.sampling import SamplingParams
from slim_engine.server import main as server_main
from slim_engine.text import TextCodec, TextStream

from tests.engines.slim.support import PROMPT, engine, free_port, generate, greedy, run, start, wait_until_up


def test_generate(server: str, truth: list[int]) -> None:
    answer = generate(server, input_ids=PROMPT, sampling_params=greedy(60), rid="mine").json()
    assert answer["output_ids"] == truth
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 5, 60)
    assert meta["finish_reason"] == {"type": "length", "length": 60}
    assert meta["spec_accept_length"] == pytest.approx(59 / meta["spec_verify_ct"])


def test_stream_holds_only_new_ids(server: str, truth: list[int]) -> None:
    body = {"input_ids": PROMPT, "sampling_params": greedy(60), "stream": True}
    with httpx.stream("POST", f"{server}/generate", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert [t for e in events for t in e["output_ids"]] == truth
    assert (
        "".join(e["text"] for e in events)
        == generate(server, input_ids=PROMPT, sampling_params=greedy(60)).json()["text"]
    )
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * (len(events) - 1) + [False]
    assert (
        len(events) == events[-1]["meta_info"]["spec_verify_ct"] + 1
    )  # one event per round, and one for the first token


def test_scoring(server: str, truth: list[int]) -> None:
    sampling = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": PROMPT + truth, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    meta = generate(server, **body, logprob_start_len=len(PROMPT) - 1).json()["meta_info"]
    entries, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert entries[0] == [None, PROMPT[-1], None] and tops[0] is None
    assert [e[1] for e in entries[1:]] == truth == [t[0][1] for t in tops[1:]]
    assert all(e[0] == t[0][0] and t[0][0] >= t[1][0] for e, t in zip(entries[1:], tops[1:], strict=True))
    assert generate(server, **body).json()["meta_info"]["input_token_logprobs"] == []
    whole = generate(server, **body, logprob_start_len=0, return_text_in_logprobs=True).json()["meta_info"]
    assert len(whole["input_token_logprobs"]) == len(PROMPT + truth)
    assert isinstance(whole["input_token_logprobs"][5][2], str)


def test_several_at_once_give_the_same_tokens(server: str, llama: Path) -> None:
    prompts = [[i, i + 1, 2 * i, 5] for i in range(10, 22)]
    want = [r.output_ids for r in run(engine(llama), prompts, max_new_tokens=30, ignore_eos=True)]
    with ThreadPoolExecutor(12) as pool:
        got = list(
            pool.map(lambda p: generate(server, input_ids=p, sampling_params=greedy(30)).json()["output_ids"], prompts)
        )
    assert got == want


def test_server_info(server: str) -> None:
    info = httpx.get(f"{server}/server_info").json()
    assert info["kv_cache_dtype"] == "float32"
    assert info == httpx.get(f"{server}/get_server_info").json()
    assert (info["engine"], info["commit"], info["variant"], info["threads"]) == ("slim", "abc123", "stock", 1)
    assert info["drafter"]["method"] == "dflash" and info["drafter"]["block_size"] == 8
    assert len(info["target"]["sha256"]) == len(info["drafter"]["sha256"]) == len(info["tree_digest"]) == 64
    generate(server, input_ids=PROMPT, sampling_params=greedy(11))
    after = httpx.get(f"{server}/server_info").json()
    assert after["counters"]["committed_tokens"] - info["counters"].get("committed_tokens", 0) == 10
    assert after["accepted_length"] == after["counters"]["committed_tokens"] / after["counters"]["rounds"]
    assert httpx.post(f"{server}/flush_cache").status_code == 200


def test_profile(server: str, tmp_path: Path) -> None:
    assert httpx.post(f"{server}/stop_profile").status_code == 400
    assert httpx.post(f"{server}/start_profile", json={"output_dir": str(tmp_path / "p")}).status_code == 200
    assert httpx.post(f"{server}/start_profile").status_code == 400
    generate(server, input_ids=PROMPT, sampling_params=greedy(8))
    trace = Path(httpx.post(f"{server}/stop_profile").json()["trace"])
    assert trace.parent == tmp_path / "p"
    assert any(e["name"] == "round" for e in json.loads(trace.read_text())["traceEvents"])
    (tmp_path / "file").write_text("")
    assert httpx.post(f"{server}/start_profile", json={"output_dir": str(tmp_path / "file")}).status_code == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [5]}, "exactly one"),
        ({"input_ids": []}, "prompt is empty"),
        ({"text": ""}, "prompt is empty"),
        ({"input_ids": [5, 260]}, "from 0 to 259"),
        ({"input_ids": [-1]}, "from 0 to 259"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [5] * 250, "sampling_params": {"max_new_tokens": 7}}, "exceed"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"input_ids": [5], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty is not supported"),
        ({"input_ids": [5], "sampling_params": {"stop": ""}}, "stop"),
        ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, "beyond"),
        ({"input_ids": [5], "strem": True}, "strem"),
    ],
)
def test_wrong_input(server: str, body: dict[str, Any], words: str) -> None:
    answer = generate(server, **body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_wrong_json_and_paths(server: str) -> None:
    assert (
        httpx.post(f"{server}/generate", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    )
    for path, status in (("/nowhere", 404), ("/generate", 405), ("/v1/completions", 405)):
        answer = httpx.get(f"{server}{path}")
        assert answer.status_code == status and answer.json()["error"]["code"] == status
        assert answer.json()["error"]["message"].startswith(f"GET {path}: ")


def test_a_client_that_leaves_frees_its_slot(server: str) -> None:
    before = httpx.get(f"{server}/server_info").json()["counters"]["requests"]
    for _ in range(9):  # one more than --max-requests
        with httpx.stream(
            "POST", f"{server}/generate", json={"input_ids": PROMPT, "sampling_params": greedy(240), "stream": True}
        ) as answer:
            next(answer.iter_lines())
    assert generate(server, input_ids=PROMPT, sampling_params=greedy(3)).status_code == 200
    for _ in range(100):
        if httpx.get(f"{server}/server_info").json()["counters"]["requests"] == before + 10:
            return
        time.sleep(0.1)
    raise AssertionError("requests of departed clients are still running")


def test_a_client_that_leaves_is_noticed_though_chunks_never_stop(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-streaming request whose client is gone before its first chunk, and an engine that stops only when told."""
    monkeypatch.setattr(service, "_POLL_S", 0.1)

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def scene() -> None:
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        request = Request("r", PROMPT, SamplingParams(max_new_tokens=10**6), (), chunks.put_nowait)
        generation = service.Generation(request, chunks, TextStream(TextCodec(llama), ()))

        async def decode() -> None:
            late = time.monotonic() + 20  # a hundred times as long as it takes to notice
            while not request.cancelled and time.monotonic() < late:
                request.emit(Chunk([50], [], None))
                await asyncio.sleep(0.001)
            how = "abort" if request.cancelled else "length"
            request.emit(Chunk([], [], {"type": how, "message": "cancelled"}))

        engine_thread = asyncio.create_task(decode())
        with pytest.raises(service.EngineFault, match="cancelled"):
            await generation.wait(HttpRequest({"type": "http"}, gone))
        await engine_thread

    asyncio.run(scene())


def test_port_in_use(server: str, llama: Path) -> None:
    process = start("--target", str(llama), "--port", server.rsplit(":", 1)[1])
    assert process.wait(60) == 3
    error = process.communicate()[1]
    assert "cannot listen" in error and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--target", "/nowhere"], ["--target", "{llama}", "--drafter", "/nowhere"]])
def test_missing_checkpoint(llama: Path, arguments: list[str]) -> None:
    process = start(*[a.format(llama=llama) for a in arguments], "--port", "0")
    assert process.wait(60) == 2
    error = process.communicate()[1]
    assert "/nowhere is not a folder" in error and "Traceback" not in error


def test_threads_are_those_asked_for(llama: Path) -> None:
    """--threads counts, whatever OMP_NUM_THREADS says."""
    port = free_port()
    process = start("--target", str(llama), "--port", str(port), OMP_NUM_THREADS="2")
    try:
        for _ in range(600):
            try:
                info = httpx.get(f"http://127.0.0.1:{port}/server_info").json()
                break
            except httpx.TransportError:
                time.sleep(0.1)
        assert info["threads"] == 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--threads", v) for v in ("-1", "0", "two")],
        *[("--max-requests", v) for v in ("0", "-3")],
        ("--max-len", "0"),
        *[("--port", v) for v in ("70000", "-1", "http")],
    ],
)
def test_wrong_options_are_one_line_and_a_code(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        server_main(["--target", "/nowhere", "--port", "0", option, value])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slim: argument {option}: ") and value in said and said.count("\n") == 1


def test_sigterm_during_generation(llama: Path) -> None:
    """The stream ends with an abort, the process with 0, within seconds."""
    port = free_port()
    process = start("--target", str(llama), "--port", str(port), "--max-len", "512")
    url = wait_until_up(process, port)
    body = {"input_ids": PROMPT, "sampling_params": greedy(500), "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "abort", "message": "the server is shutting down"}
    assert process.wait(15) == 0
    assert "Traceback" not in process.communicate()[1]
