"""Request bodies and answers of both APIs, as data. No HTTP, no tensors."""

from __future__ import annotations

import json
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slim_engine.errors import RequestError
from slim_engine.request import LogprobOptions, Request, TokenLogprob
from slim_engine.sampling import SamplingParams

_EXACT = ConfigDict(strict=True, allow_inf_nan=False)
"""true is no number, "5" no 5, and 1e999 none at all: a field of another type is a mistake of the client, who should hear of it."""

_NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_new_tokens": 0,
    "n": 1,
}


class NativeSampling(BaseModel):
    """`sampling_params` of /generate. Penalties, min_p and n are known, and refused unless neutral."""

    model_config = ConfigDict(extra="forbid", **_EXACT)

    max_new_tokens: int = Field(128, ge=0)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = Field(None, ge=0, lt=2**63)
    frequency_penalty: float = 0
    presence_penalty: float = 0
    repetition_penalty: float = 1
    min_p: float = 0
    min_new_tokens: int = 0
    n: int = 1

    @model_validator(mode="after")
    def _supported(self) -> NativeSampling:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) != neutral:
                raise ValueError(f"{name} is not supported (only {neutral})")
        return self

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=self.sampling_seed,
            ignore_eos=self.ignore_eos,
            stop=_stops(self.stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            skip_special_tokens=self.skip_special_tokens,
        )


class GenerateBody(BaseModel):
    """POST /generate, one prompt. logprob_start_len -1: output tokens only."""

    model_config = ConfigDict(extra="forbid", **_EXACT)

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: NativeSampling = Field(default_factory=lambda: NativeSampling())
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0, le=100)
    return_text_in_logprobs: bool = False
    rid: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        return self

    def logprobs(self) -> LogprobOptions | None:
        if not self.return_logprob:
            return None
        return LogprobOptions(None if self.logprob_start_len < 0 else self.logprob_start_len, self.top_logprobs_num)


class StreamOptions(BaseModel):
    model_config = _EXACT

    include_usage: bool = False


_OPENAI_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's own
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    # what vLLM and SGLang take besides
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that would change the answer and are not supported -> values, besides null, that ask for nothing."""


class OpenAIBody(BaseModel):
    """What both OpenAI endpoints share. A field of `_OPENAI_NEUTRAL` is refused by name unless it asks for nothing; unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", **_EXACT)

    model: str | None = None
    temperature: float | None = Field(1.0, ge=0.0, le=2.0)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool | None = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, body: Any) -> Any:
        for name, neutral in _OPENAI_NEUTRAL.items() if isinstance(body, dict) else ():
            value = body.get(name)
            if value is not None and value not in neutral:
                only = f" (only {' or '.join(json.dumps(v) for v in neutral)})" if neutral else ""
                raise ValueError(f"{name} is not supported{only}")
        return body

    def params(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=None if self.seed is None else self.seed % 2**63,
            ignore_eos=self.ignore_eos,
            stop=_stops(self.stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class CompletionBody(OpenAIBody):
    """POST /v1/completions, one prompt: text or token ids."""

    prompt: str | list[int] | list[str]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)

    @model_validator(mode="after")
    def _plain(self) -> CompletionBody:
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str) and len(self.prompt) != 1:
            raise ValueError("one prompt per request")
        return self


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _plain(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        for message in self.messages:
            if not isinstance(message.get("role"), str):
                raise ValueError("every message needs a role")
        return self

    def flat_messages(self) -> list[dict[str, Any]]:
        """Messages with lists of text parts joined. Raises RequestError for any other part."""
        return [{**m, "content": _flat(m.get("content"))} for m in self.messages]


def check_prompt(ids: list[int], params: SamplingParams, vocab_size: int, max_len: int) -> None:
    """Raises RequestError for a prompt that cannot be run."""
    if not ids:
        raise RequestError("the prompt is empty: it must have at least one token")
    if not all(0 <= t < vocab_size for t in ids):
        raise RequestError(f"token ids must be from 0 to {vocab_size - 1}")
    if len(ids) + params.max_new_tokens > max_len:
        raise RequestError(
            f"{len(ids)} prompt tokens and {params.max_new_tokens} new tokens exceed this server's length {max_len} (--max-len)"
        )


def native_answer(request: Request, output: list[TokenLogprob], body: GenerateBody, text_of: Any) -> dict[str, Any]:
    """meta_info of /generate. text_of: token id -> text, used where the body asks for text in logprobs."""
    meta: dict[str, Any] = {
        "id": request.id,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": 0,
        "e2e_latency": time.perf_counter() - request.created,
        "spec_verify_ct": request.rounds,
        "spec_accept_length": request.committed / request.rounds if request.rounds else None,
    }
    if body.return_logprob:
        text = text_of if body.return_text_in_logprobs else lambda _: None
        scored = request.input_logprobs
        start = body.logprob_start_len
        if 0 <= start < len(request.prompt_ids):  # the first position has nothing before it that was scored
            scored = [TokenLogprob(request.prompt_ids[start], None), *scored]
        meta["input_token_logprobs"] = [(e.logprob, e.token_id, text(e.token_id)) for e in scored]
        meta["output_token_logprobs"] = [(e.logprob, e.token_id, text(e.token_id)) for e in output]
        if body.top_logprobs_num:
            meta["input_top_logprobs"] = [_top(e, text) for e in scored]
            meta["output_top_logprobs"] = [_top(e, text) for e in output]
    return meta


def usage(request: Request) -> dict[str, int]:
    """Token counts in OpenAI's words."""
    prompt, completion = len(request.prompt_ids), len(request.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def openai_finish(finish: dict[str, Any] | None) -> str | None:
    """stop, length, or None while running."""
    return None if finish is None else {"stop": "stop", "length": "length"}.get(finish["type"], "stop")


def _top(entry: TokenLogprob, text: Any) -> list[tuple[float, int, Any]] | None:
    return None if entry.logprob is None else [(value, token, text(token)) for value, token in entry.top]


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > 16 or not all(stops):
        raise RequestError("stop: at most 16 strings, none of them empty")
    return tuple(stops)


def _flat(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError("message content must be a string or a list of text parts")
        parts.append(part["text"])
    return "".join(parts)
