"""OpenAI's /v1/models, /v1/completions and /v1/chat/completions, with streaming."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

from slim_engine.bodies import StrictRoute
from slim_engine.errors import RequestError
from slim_engine.protocol import ChatBody, CompletionBody, OpenAIBody, openai_finish, usage
from slim_engine.request import LogprobOptions, TokenLogprob
from slim_engine.routes_native import sse
from slim_engine.service import Generation, Service
from slim_engine.text import Detokenizer

Choice = Callable[[str, Sequence[TokenLogprob], str | None], dict[str, Any]]


def openai_routes(service: Service) -> APIRouter:
    """Routes bound to `service`."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": service.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "slim",
            "max_model_len": service.loaded.max_len,
        }
        return {"object": "list", "data": [card]}

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: HttpRequest) -> JSONResponse | StreamingResponse:
        _check_model(body, service)
        ids = _prompt(body, service)
        params = body.params(16 if body.max_tokens is None else body.max_tokens)
        logprobs = None if body.logprobs is None else LogprobOptions(None, body.logprobs)
        generation = service.submit(ids, params, logprobs, _id("cmpl"))

        offsets = _Offsets(service)

        def choice(text: str, scored: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
            shown = None if logprobs is None else _completion_logprobs(scored, service, offsets)
            return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish}

        return await _answer(service, generation, body, http, "text_completion", "text_completion", choice, choice)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, http: HttpRequest) -> JSONResponse | StreamingResponse:
        _check_model(body, service)
        ids = service.codec.chat(body.flat_messages())
        room = service.loaded.max_len - len(ids)
        params = body.params(body.max_completion_tokens or body.max_tokens or max(room, 1))
        logprobs = LogprobOptions(None, body.top_logprobs or 0) if body.logprobs else None
        generation = service.submit(ids, params, logprobs, _id("chatcmpl"))

        def whole(text: str, scored: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
            shown = None if logprobs is None else _chat_logprobs(scored, service)
            return {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": shown,
                "finish_reason": finish,
            }

        first = True

        def delta(text: str, scored: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
            nonlocal first
            piece: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
            first = False
            shown = None if logprobs is None else _chat_logprobs(scored, service)
            return {"index": 0, "delta": piece, "logprobs": shown, "finish_reason": finish}

        return await _answer(service, generation, body, http, "chat.completion", "chat.completion.chunk", whole, delta)

    return router


async def _answer(
    service: Service,
    generation: Generation,
    body: OpenAIBody,
    http: HttpRequest,
    kind: str,
    chunk_kind: str,
    whole: Choice,
    delta: Choice,
) -> JSONResponse | StreamingResponse:
    """The whole answer, or a stream of its pieces, one per round."""
    frame: dict[str, Any] = {"id": generation.request.id, "created": int(time.time()), "model": service.model_name}
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(
            _stream(generation, {**frame, "object": chunk_kind}, delta, include_usage), media_type="text/event-stream"
        )
    text = await generation.wait(http)
    choice = whole(text, generation.output_logprobs, openai_finish(generation.request.finish))
    return JSONResponse({**frame, "object": kind, "choices": [choice], "usage": usage(generation.request)})


async def _stream(
    generation: Generation, frame: dict[str, Any], delta: Choice, include_usage: bool
) -> AsyncIterator[str]:
    async for chunk in generation.chunks():
        if chunk.finish is not None and chunk.finish["type"] == "abort":
            yield sse({"error": {"message": chunk.finish["message"], "type": "server_error", "code": 500}})
            break
        text = generation.text.push(chunk.token_ids, last=chunk.finish is not None)
        yield sse({**frame, "choices": [delta(text, chunk.logprobs, openai_finish(chunk.finish))]})
    if include_usage:
        yield sse({**frame, "choices": [], "usage": usage(generation.request)})
    yield "data: [DONE]\n\n"


def _prompt(body: CompletionBody, service: Service) -> list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return service.codec.encode(prompt)
    return [t for t in prompt if isinstance(t, int)]


def _check_model(body: OpenAIBody, service: Service) -> None:
    if body.model not in (None, "", service.model_name):
        raise RequestError(f"model {body.model!r} is not served here; served: {service.model_name!r}")


class _Offsets:
    """Where each token's text begins in the answer so far, over all chunks of a stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._detokenizer = Detokenizer(service.codec)
        self._at = 0

    def of(self, token: int) -> int:
        """The offset of the next token. One that is part of a character shows nothing until the character, or another, follows."""
        before = self._at
        piece = self._detokenizer.push([token])
        self._at += len(piece)
        own = _token(token, self._service)
        return self._at - len(own) if piece.endswith(own) else before


def _completion_logprobs(scored: Sequence[TokenLogprob], service: Service, offsets: _Offsets) -> dict[str, Any]:
    """The four lists of /v1/completions."""
    return {
        "tokens": [_token(e.token_id, service, "bytes:") for e in scored],
        "token_logprobs": [e.logprob for e in scored],
        "top_logprobs": [{_token(t, service, "bytes:"): v for v, t in e.top} for e in scored],
        "text_offset": [offsets.of(e.token_id) for e in scored],
    }


def _chat_logprobs(scored: Sequence[TokenLogprob], service: Service) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(e.token_id, e.logprob, service),
                "top_logprobs": [_entry(token, value, service) for value, token in e.top],
            }
            for e in scored
        ]
    }


def _entry(token: int, logprob: float | None, service: Service) -> dict[str, Any]:
    return {"token": _token(token, service), "logprob": logprob, "bytes": list(service.codec.token_bytes(token))}


def _token(token: int, service: Service, mark: str = "") -> str:
    """A token's text; where it is no whole character its bytes, written `\\xe2\\x82` behind `mark`, so that no two look alike."""
    data = service.codec.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)


def _id(prefix: str) -> str:
    return f"{prefix}-{time.time_ns():x}"
