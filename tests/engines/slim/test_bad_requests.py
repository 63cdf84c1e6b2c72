"""What a client can send that no request should be: each is answered 4xx in the API's error format, and the server goes on."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from slim_engine import bodies
from slim_engine.errors import RequestError
from slim_engine.text import TextCodec
from starlette.exceptions import HTTPException

from tests.engines.slim.support import PROMPT, generate, greedy
from tests.helpers.tiny_model import make_tiny_model

HALF = r'"\ud800"'  # of a surrogate pair, as JSON spells it
LONG = "9" * 400


def _refused(server: str, path: str, body: str | bytes, status: int = 400) -> str:
    """The message of the error that the body earns; afterwards the server must still answer."""
    content = body if isinstance(body, bytes) else body.encode()
    answer = httpx.post(server + path, content=content, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == status, (body[:100], answer.text[:200])
    error = answer.json()["error"]
    assert error["code"] == status and error["type"] == "invalid_request_error"
    assert httpx.get(f"{server}/health").status_code == 200
    return str(error["message"])


def _generate_with(name: str, value: str) -> str:
    return f'{{"input_ids":[5],"sampling_params":{{"max_new_tokens":1}},"{name}":{value}}}'


def _sampling(name: str, value: str) -> str:
    return f'{{"input_ids":[5],"sampling_params":{{"{name}":{value}}}}}'


def _chat(value: str) -> str:
    return f'{{"max_tokens":2,"messages":{value}}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", f'{{"text":{HALF}}}'),
        ("/generate", r'{"text":"tail \uDFFF and more"}'),
        ("/generate", b'{"text":"\xed\xa0\x80"}'),
        ("/generate", _generate_with("rid", HALF)),
        ("/generate", _sampling("stop", f"[{HALF}]")),
        ("/generate", f'{{"input_ids":[5],{HALF}:1}}'),
        *[("/v1/completions", f'{{"prompt":{value}}}') for value in (HALF, f"[{HALF}]")],
        *[("/v1/completions", f'{{"prompt":"a","{name}":{HALF}}}') for name in ("model", "stop", "user", "suffix")],
        ("/v1/chat/completions", _chat(f'[{{"role":{HALF},"content":"a"}}]')),
        ("/v1/chat/completions", _chat(f'[{{"role":"user","content":{HALF}}}]')),
        ("/v1/chat/completions", _chat(f'[{{"role":"user","content":[{{"type":"text","text":{HALF}}}]}}]')),
        ("/v1/chat/completions", _chat(f'[{{"role":"user","content":"a",{HALF}:1}}]')),
        ("/start_profile", f'{{"output_dir":{HALF}}}'),
    ],
)
def test_half_a_surrogate_pair(server: str, path: str, body: str | bytes) -> None:
    message = _refused(server, path, body)
    assert "surrogate" in message or "not UTF-8" in message


def test_a_whole_pair_is_a_character(server: str) -> None:
    body = rb'{"text":"\ud83d\ude00","sampling_params":{"max_new_tokens":1}}'
    answer = httpx.post(f"{server}/generate", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["meta_info"]["prompt_tokens"] == len("😀".encode())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"text":"\xff"}', "not UTF-8"),
        ('{"text":"a"}'.encode("utf-16"), "not UTF-8"),
        (b"", "Field required"),
        (b"null", "valid dictionary"),
        (b"[]", "valid dictionary"),
        (b'{"text":"a"} more', "JSON decode error"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text":' * 3000 + b"1" + b"}" * 3000, "nested too deeply"),
        (b"9" * 5000, "number that cannot be read"),
        (b'{"input_ids":' + b"[" * 200 + b"]" * 200 + b"}", "input_ids"),
    ],
)
def test_bodies_that_are_no_request(server: str, body: bytes, words: str) -> None:
    assert words in _refused(server, "/generate", body)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "true", '"1"', "{}", "[[]]", "-2"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "max_new_tokens", "sampling_seed", "n", "min_p"])
def test_numbers_that_are_none(server: str, name: str, value: str) -> None:
    _refused(server, "/generate", _sampling(name, value))


@pytest.mark.parametrize("value", ["NaN", "1e999", '"1"', "{}", "[1]"])
@pytest.mark.parametrize(
    "name", ["max_tokens", "temperature", "top_p", "top_k", "seed", "stream", "ignore_eos", "stop"]
)
def test_openai_fields_of_another_type(server: str, name: str, value: str) -> None:
    if (name, value) != ("stop", '"1"'):
        _refused(server, "/v1/completions", f'{{"prompt":"a","{name}":{value}}}')


@pytest.mark.parametrize(
    "body",
    [
        *[
            _generate_with(name, value)
            for name in ("stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
            for value in ('"yes"', "1.5", "null", "[1]")
        ],
        *[_generate_with("rid", value) for value in ("5", "[]")],
        *[_generate_with("sampling_params", value) for value in ("null", "[]", '"greedy"')],
        *[_sampling("stop_token_ids", value) for value in ("5", '["5"]', "[true]", "[1.0]")],
        *[_sampling("max_new_tokens", value) for value in (LONG, "1000", "null")],
        *[_generate_with("return_logprob", f'true,"logprob_start_len":{LONG}')],
        *[
            f'{{"input_ids":{value}}}'
            for value in (
                "[true]",
                '["5"]',
                "[5.0]",
                "[NaN]",
                "[1e999]",
                f"[{LONG}]",
                f"[-{LONG}]",
                "[[5]]",
                "5",
                "[5,null]",
            )
        ],
        json.dumps({"input_ids": [5] * 257}),
        json.dumps({"text": "a" * 1_000_000}),
    ],
)
def test_fields_of_generate(server: str, body: str) -> None:
    _refused(server, "/generate", body)


@pytest.mark.parametrize(
    "prompt", ["[]", '""', '[""]', '[5,"a"]', "[true]", f"[{LONG}]", "[260]", "[-1]", "{}", "null"]
)
def test_prompts_of_completions(server: str, prompt: str) -> None:
    _refused(server, "/v1/completions", f'{{"prompt":{prompt},"max_tokens":2}}')


@pytest.mark.parametrize("messages", ["[5]", "[[]]", "{}", "null", '[{"role":5}]', '[{"role":"user","content":5}]'])
def test_messages_of_chat(server: str, messages: str) -> None:
    _refused(server, "/v1/chat/completions", _chat(messages))


@pytest.mark.parametrize("tokens", ["0", "-1", LONG, "2.0", '"2"'])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_lengths_of_chat(server: str, name: str, tokens: str) -> None:
    _refused(server, "/v1/chat/completions", f'{{"messages":[{{"role":"user","content":"a"}}],"{name}":{tokens}}}')


@pytest.mark.parametrize("folder", [r'"\u0000"', '"/proc/nowhere"', json.dumps("a" * 5000), "5"])
def test_folders_that_no_profile_can_lie_in(server: str, folder: str) -> None:
    _refused(server, "/start_profile", f'{{"output_dir":{folder}}}')


def test_a_body_beyond_all_bounds(server: str) -> None:
    assert "larger than 32 MiB" in _refused(server, "/generate", b" " * (bodies.LARGEST + 1), 413)


def _raw(server: str, head: str, body: bytes = b"") -> bytes:
    """What comes back for a request written by hand, its end closed."""
    with socket.create_connection(("127.0.0.1", urlsplit(server).port), timeout=30) as wire:
        wire.sendall(
            f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n".encode() + body
        )
        wire.shutdown(socket.SHUT_WR)
        wire.settimeout(30)
        answer = b""
        while piece := wire.recv(4096):
            answer += piece
    return answer


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("10000", b""),
        ("5", b"400"),
        ("0", b"400"),
        ("-1", b"400"),
        ("many", b"400"),
        ("99999999999", b"413"),
        ("9\r\nContent-Length: 8", b"400"),
    ],
)
def test_lengths_that_lie(server: str, length: str, status: bytes) -> None:
    """Of a body that ends early nobody waits for the answer; any other lie is told."""
    said = _raw(server, f"Content-Length: {length}\r\n", b'{"input_ids":[5],"sampling_params":{"max_new_tokens":1}}')
    assert said[9:12] == status
    assert generate(server, input_ids=PROMPT, sampling_params=greedy(3)).status_code == 200


def test_a_body_that_tells_no_length_is_bounded_too() -> None:
    app = FastAPI()
    app.router.route_class = bodies.StrictRoute

    @app.post("/")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    with TestClient(app) as client:
        assert client.post("/", content=b'{"a":1}', headers={"content-type": "application/json"}).json() == {"a": 1}
        answer = client.post(
            "/", content=(b" " * (1 << 20) for _ in range(33)), headers={"content-type": "application/json"}
        )
    assert answer.status_code == 413


def test_a_template_that_trips_over_a_message(tmp_path: Path) -> None:
    """Real templates walk tool_calls and split contents; what they raise then is no jinja2.TemplateError."""
    folder = make_tiny_model(tmp_path / "t")
    (folder / "chat_template.jinja").write_text(
        "{% for call in messages[0].tool_calls %}{{ call.name + 1 }}{% endfor %}"
    )
    codec = TextCodec(folder)
    for calls in (5, [{"name": "f"}]):
        with pytest.raises(RequestError, match="refused these messages"):
            codec.chat([{"role": "user", "content": "a", "tool_calls": calls}])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_JSON, st.booleans())
def test_parse_reads_all_json_and_only_whole_characters(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert bodies.parse(text.encode()) == value
    broken = json.dumps([value, "\udc80"])
    with pytest.raises(HTTPException, match="surrogate"):
        bodies.parse(broken.encode())
