"""The server as a process: both APIs, the official client, wrong input, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from fastapi import Request as HttpRequest
from slim_engine import service
from slim_engine.request import Chunk, Request
from slim_engine.sampling import SamplingParams
from slim_engine.server import main as server_main
from slim_engine.text import TextCodec, TextStream
from transformers import AutoModelForCausalLM

from tests.engines.slim.conftest import TREE
from tests.engines.slim.support import PROMPT, engine, free_port, greedy, run
from tests.helpers.tiny_model import SPECIALS, VOCAB


def _start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "slim_engine.server", "--threads", "1", *arguments]
    return subprocess.Popen(command, cwd=TREE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def server(llama: Path, drafter: Path) -> Iterator[str]:
    port = free_port()
    process = _start(
        *("--target", str(llama), "--drafter", str(drafter), "--port", str(port), "--max-len", "256"),
        *("--variant", "stock", "--name", "tiny"),
        SPECPILOT_COMMIT="abc123",
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, process.communicate()[1]
        try:
            httpx.get(f"{url}/health").raise_for_status()
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield url
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.communicate(timeout=20)[1]
    assert process.returncode == 0


def _generate(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=60)


@pytest.fixture(scope="module")
def truth(llama: Path) -> list[int]:
    return run(engine(llama), [PROMPT], max_new_tokens=60, ignore_eos=True)[0].output_ids


def test_generate(server: str, truth: list[int]) -> None:
    answer = _generate(server, input_ids=PROMPT, sampling_params=greedy(60), rid="mine").json()
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
        == _generate(server, input_ids=PROMPT, sampling_params=greedy(60)).json()["text"]
    )
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * (len(events) - 1) + [False]
    assert (
        len(events) == events[-1]["meta_info"]["spec_verify_ct"] + 1
    )  # one event per round, and one for the first token


def test_scoring(server: str, truth: list[int]) -> None:
    sampling = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": PROMPT + truth, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    meta = _generate(server, **body, logprob_start_len=len(PROMPT) - 1).json()["meta_info"]
    entries, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert entries[0] == [None, PROMPT[-1], None] and tops[0] is None
    assert [e[1] for e in entries[1:]] == truth == [t[0][1] for t in tops[1:]]
    assert all(e[0] == t[0][0] and t[0][0] >= t[1][0] for e, t in zip(entries[1:], tops[1:], strict=True))
    assert _generate(server, **body).json()["meta_info"]["input_token_logprobs"] == []
    whole = _generate(server, **body, logprob_start_len=0, return_text_in_logprobs=True).json()["meta_info"]
    assert len(whole["input_token_logprobs"]) == len(PROMPT + truth)
    assert isinstance(whole["input_token_logprobs"][5][2], str)


def test_several_at_once_give_the_same_tokens(server: str, llama: Path) -> None:
    prompts = [[i, i + 1, 2 * i, 5] for i in range(10, 22)]
    want = [r.output_ids for r in run(engine(llama), prompts, max_new_tokens=30, ignore_eos=True)]
    with ThreadPoolExecutor(12) as pool:
        got = list(
            pool.map(lambda p: _generate(server, input_ids=p, sampling_params=greedy(30)).json()["output_ids"], prompts)
        )
    assert got == want


def test_server_info(server: str) -> None:
    info = httpx.get(f"{server}/server_info").json()
    assert info["kv_cache_dtype"] == "float32"
    assert info == httpx.get(f"{server}/get_server_info").json()
    assert (info["engine"], info["commit"], info["variant"], info["threads"]) == ("slim", "abc123", "stock", 1)
    assert info["drafter"]["method"] == "dflash" and info["drafter"]["block_size"] == 8
    assert len(info["target"]["sha256"]) == len(info["drafter"]["sha256"]) == len(info["tree_digest"]) == 64
    _generate(server, input_ids=PROMPT, sampling_params=greedy(11))
    after = httpx.get(f"{server}/server_info").json()
    assert after["counters"]["committed_tokens"] - info["counters"].get("committed_tokens", 0) == 10
    assert after["accepted_length"] == after["counters"]["committed_tokens"] / after["counters"]["rounds"]
    assert httpx.post(f"{server}/flush_cache").status_code == 200


def test_profile(server: str, tmp_path: Path) -> None:
    assert httpx.post(f"{server}/stop_profile").status_code == 400
    assert httpx.post(f"{server}/start_profile", json={"output_dir": str(tmp_path / "p")}).status_code == 200
    assert httpx.post(f"{server}/start_profile").status_code == 400
    _generate(server, input_ids=PROMPT, sampling_params=greedy(8))
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
    answer = _generate(server, **body)
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
    assert _generate(server, input_ids=PROMPT, sampling_params=greedy(3)).status_code == 200
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


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_openai_completions(client: openai.OpenAI, server: str, truth: list[int]) -> None:
    extra = {"ignore_eos": True}
    want = _generate(server, input_ids=PROMPT, sampling_params=greedy(30)).json()["text"]
    done = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, logprobs=2, extra_body=extra
    )
    assert done.choices[0].text == want
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None and (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 30)
    assert done.choices[0].logprobs is not None and len(done.choices[0].logprobs.token_logprobs or []) == 30
    pieces = list(
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stream=True, extra_body=extra
        )
    )
    assert "".join(p.choices[0].text for p in pieces) == want
    assert pieces[-1].choices[0].finish_reason == "length"


def test_openai_stop_string(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    text = whole.choices[0].text
    at = next(i for i in range(5, len(text) - 2) if text[i : i + 2].isprintable() and text[i : i + 2].isascii())
    stop = text[at : at + 2]
    cut = text[: text.index(stop)]
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": [stop]}
    done = client.completions.create(**options, extra_body={"ignore_eos": True})
    assert (done.choices[0].text, done.choices[0].finish_reason) == (cut, "stop")
    pieces = list(client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(p.choices[0].text for p in pieces) == cut
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_openai_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    options: Any = {
        "model": "tiny",
        "messages": messages,
        "max_completion_tokens": 25,
        "temperature": 0,
        "logprobs": True,
    }
    done = client.chat.completions.create(**options, top_logprobs=2)
    text = done.choices[0].message.content
    assert done.choices[0].message.role == "assistant"
    assert done.usage is not None and done.usage.prompt_tokens == len(
        "+user\nhello+\n+assistant\n"
    )  # + for a special token, one token per byte
    assert (
        done.choices[0].logprobs is not None
        and len(done.choices[0].logprobs.content or []) == done.usage.completion_tokens
    )
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].usage is not None and pieces[-1].usage.total_tokens == done.usage.total_tokens


def _letters(tokens: list[int]) -> list[bytes]:
    """What each token of the tiny vocabulary stands for: its specials, then one byte each in the order of GPT-2's letters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    by_letter = sorted(
        [*plain, *range(256, 256 + 68)]
    )  # the letters' code points; from 256 on they stand for the other bytes
    others = [byte for byte in range(256) if byte not in plain]
    bytes_of = [point if point < 256 else others[point - 256] for point in by_letter]
    return [SPECIALS[t].encode() if t < len(SPECIALS) else bytes([bytes_of[t - len(SPECIALS)]]) for t in tokens]


def _expected(llama: Path, server: str) -> tuple[list[int], Any]:
    """The greedy answer to PROMPT, and the log-probabilities that transformers gives at each of its positions."""
    ids = _generate(server, input_ids=PROMPT, sampling_params=greedy(30)).json()["output_ids"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + ids])).logits[0]
    return ids, logits[len(PROMPT) - 1 : -1].log_softmax(-1)


def test_openai_completion_logprobs_are_the_targets(client: openai.OpenAI, server: str, llama: Path) -> None:
    ids, logp = _expected(llama, server)
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 3}
    extra = {"ignore_eos": True}
    whole = client.completions.create(**options, extra_body=extra).choices[0]
    told = whole.logprobs
    assert told is not None and told.tokens is not None and told.top_logprobs is not None
    assert told.token_logprobs == pytest.approx([float(logp[i, t]) for i, t in enumerate(ids)], abs=2e-4)
    for row, top in zip(logp, told.top_logprobs, strict=True):
        assert len(top) == 3 and sorted(top.values(), reverse=True) == pytest.approx(
            row.topk(3).values.tolist(), abs=2e-4
        )
    for word, data in zip(told.tokens, _letters(ids), strict=True):
        assert word == (data.decode() if data.isascii() else f"bytes:\\x{data[0]:02x}")
    pieces = [p.choices[0].logprobs for p in client.completions.create(**options, stream=True, extra_body=extra)]
    assert len(pieces) > 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for p in pieces for x in getattr(p, name)] == getattr(told, name), f"{name}: streamed as in one piece"
    for token, offset in zip(told.tokens, told.text_offset or [], strict=True):
        if token.isascii() and not token.startswith(("bytes:", "<|")):
            assert whole.text[offset : offset + len(token)] == token
    bare = client.completions.create(**options, extra_body=extra | {"logprobs": 0}).choices[0].logprobs
    assert bare is not None and bare.token_logprobs == told.token_logprobs and bare.top_logprobs == [{}] * 30


def test_openai_chat_logprobs_are_the_targets(client: openai.OpenAI, server: str, llama: Path) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    options |= {"temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None and whole.content is not None and len(whole.content) == 20
    prompt = _chat_prompt()
    ids = _generate(server, input_ids=prompt, sampling_params=greedy(20)).json()["output_ids"]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for entry, row, token in zip(whole.content, logp, ids, strict=True):
        assert bytes(entry.bytes or []) == _letters([token])[0]
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=2e-4)
        assert entry.top_logprobs[0].bytes == entry.bytes, "greedy: the chosen one is the best"
    streamed = [c.choices[0].logprobs for c in client.chat.completions.create(**options, stream=True)]
    assert [e for part in streamed if part for e in part.content or []] == whole.content
    assert (
        client.chat.completions.create(**options | {"logprobs": False, "top_logprobs": None}).choices[0].logprobs
        is None
    )


def _chat_prompt() -> list[int]:
    """`hello` in the tiny model's chat template, one token per byte and per special."""
    ids = {data: token for token, data in zip(range(VOCAB), _letters(list(range(VOCAB))), strict=True)}
    words: list[int] = []
    for part in ("<|im_start|>", "user\nhello", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"):
        words += [ids[part.encode()]] if part in SPECIALS else [ids[bytes([byte])] for byte in part.encode()]
    return words


@pytest.mark.parametrize(
    "change",
    [
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": "many"},
        {"model": "other"},
        {"messages": []},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"temperature": 9},
        {"max_tokens": 100000},
        {"extra_body": {"stop_token_ids": ["a"]}},
    ],
)
def test_openai_wrong_input(client: openai.OpenAI, change: dict[str, Any]) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options)
    assert caught.value.body


_REFUSED = {
    "n": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"5": 3.0},
    "repetition_penalty": 1.5,
    "min_p": 0.3,
    "min_tokens": 2,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}],
    "guided_regex": "a+",
    "best_of": 2,
    "echo": True,
    "suffix": "end",
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_openai_refuses_by_name_what_would_change_the_answer(server: str, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "prompt": PROMPT}
    if path != "completions":
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    for name, value in _REFUSED.items():
        answer = httpx.post(f"{server}/v1/{path}", json=body | {name: value})
        assert answer.status_code == 400, name
        assert f"{name} is not supported" in answer.json()["error"]["message"]
    neutral = {"n": 1, "repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "response_format": {"type": "text"}}
    for same in (neutral, dict.fromkeys(_REFUSED), {"user": "somebody", "logit_bias": {}, "tools": []}):
        assert httpx.post(f"{server}/v1/{path}", json=body | same).status_code == 200


def test_openai_stop_token_ids(client: openai.OpenAI, truth: list[int]) -> None:
    at = next(i for i in range(3, 60) if truth[i] not in truth[:i])
    extra = {"ignore_eos": True, "stop_token_ids": [truth[at]]}
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, extra_body=extra)
    assert done.usage is not None and done.usage.completion_tokens == at + 1
    assert done.choices[0].finish_reason == "stop"


def test_port_in_use(server: str, llama: Path) -> None:
    process = _start("--target", str(llama), "--port", server.rsplit(":", 1)[1])
    assert process.wait(60) == 3
    error = process.communicate()[1]
    assert "cannot listen" in error and "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--target", "/nowhere"], ["--target", "{llama}", "--drafter", "/nowhere"]])
def test_missing_checkpoint(llama: Path, arguments: list[str]) -> None:
    process = _start(*[a.format(llama=llama) for a in arguments], "--port", "0")
    assert process.wait(60) == 2
    error = process.communicate()[1]
    assert "/nowhere is not a folder" in error and "Traceback" not in error


def test_threads_are_those_asked_for(llama: Path) -> None:
    """--threads counts, whatever OMP_NUM_THREADS says."""
    port = free_port()
    process = _start("--target", str(llama), "--port", str(port), OMP_NUM_THREADS="2")
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
    process = _start("--target", str(llama), "--port", str(port), "--max-len", "512")
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            break
        except httpx.TransportError:
            time.sleep(0.1)
    body = {"input_ids": PROMPT, "sampling_params": greedy(500), "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/generate", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "abort", "message": "the server is shutting down"}
    assert process.wait(15) == 0
    assert "Traceback" not in process.communicate()[1]
