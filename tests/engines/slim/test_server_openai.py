"""The server's OpenAI API, by the official client: answers, streams, log-probabilities, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines.slim.support import PROMPT, generate, greedy
from tests.helpers.tiny_model import SPECIALS, VOCAB


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_openai_completions(client: openai.OpenAI, server: str, truth: list[int]) -> None:
    extra = {"ignore_eos": True}
    want = generate(server, input_ids=PROMPT, sampling_params=greedy(30)).json()["text"]
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
    ids = generate(server, input_ids=PROMPT, sampling_params=greedy(30)).json()["output_ids"]
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
    ids = generate(server, input_ids=prompt, sampling_params=greedy(20)).json()["output_ids"]
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
