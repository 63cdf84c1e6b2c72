"""Reading the protocol's answers with suspicion: every field of an engine under test is checked before use.

Pure functions on parsed JSON and bytes; no sockets, no clocks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specpilot.evaluation.errors import EngineProtocol

_HINT = "the engine breaks the protocol; see docs/architecture.md"

MOST = 2**31 - 1
"""Largest token id and largest count that is believed: more overflows somewhere behind us, in floats or in the reference."""

COUNTERS, NAME_LENGTH = 512, 100
"""Most counters that an engine may state, and the longest name of one: they are kept for every leg."""

LARGEST = 2.0**63
"""Largest believed counter (bytes, nanoseconds)."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What a lone surrogate needs in JSON; pairs, which are fine, have it too."""


def parse_object(payload: bytes, what: str) -> dict[str, Any]:
    """A JSON object that can be stored again, or EngineProtocol: too deep a nesting and half characters are refused too."""
    try:
        value = json.loads(payload)
        if _SURROGATE.search(payload):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise EngineProtocol(f"{what} is not JSON: {payload[:200]!r}", _HINT) from None
    if not isinstance(value, dict):
        raise EngineProtocol(f"{what} is not an object: {payload[:200]!r}", _HINT)
    return value


class SseReader:
    """Server-sent events of a `/generate` stream: feed bytes, get JSON objects; `done` after `[DONE]`."""

    def __init__(self, limit_bytes: int) -> None:
        self.done = False
        self._limit = limit_bytes
        self._seen = 0
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Events completed by `chunk`. Raises EngineProtocol on a line that is no event, or on too many bytes."""
        self._seen += len(chunk)
        if self._seen > self._limit:
            raise EngineProtocol(f"stream larger than {self._limit} bytes", _HINT)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            line = line.strip()
            if not line or line.startswith(b":"):
                continue
            if not line.startswith(b"data:"):
                raise EngineProtocol(f"not a server-sent event: {line[:200]!r}", _HINT)
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                return
            yield self._event(payload)

    @staticmethod
    def _event(payload: bytes) -> dict[str, Any]:
        event = parse_object(payload, "event")
        if "error" in event:
            raise EngineProtocol(f"engine reports an error: {str(event['error'])[:500]}", _HINT)
        return event


def token_ids(value: Any) -> list[int]:
    """A list of integers from 0 to `MOST`, or EngineProtocol."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MOST for item in value):
        raise EngineProtocol(f"output_ids is not a list of token ids: {str(value)[:200]}", _HINT)
    return value


def meta_info(event: dict[str, Any]) -> dict[str, Any]:
    """The event's `meta_info`; empty if it has none. Raises EngineProtocol if that is no object."""
    meta = event.get("meta_info")
    if meta is not None and not isinstance(meta, dict):
        raise EngineProtocol(f"meta_info is not an object: {str(meta)[:200]}", _HINT)
    return meta or {}


def count(meta: dict[str, Any], key: str) -> int | None:
    """A whole number that the engine states; None if it states none. Raises EngineProtocol outside 0 to `MOST`."""
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if not 0 <= value <= MOST:
        raise EngineProtocol(f"{key} is {str(value)[:40]}, which counts nothing", _HINT)
    return value


def finish_reason(meta: dict[str, Any]) -> str:
    """`length`, `stop` or `abort`; SGLang sends an object with a `type`, OpenAI style a string. Empty if absent."""
    value = meta.get("finish_reason")
    if isinstance(value, dict):
        value = value.get("type")
    return value[:40] if isinstance(value, str) else ""


def flat_counters(info: dict[str, Any]) -> dict[str, float]:
    """Finite numeric counters of `/server_info`; anything else under `counters` is ignored.

    Raises EngineProtocol for more than `COUNTERS` of them or a name longer than `NAME_LENGTH`.
    """
    counters = info.get("counters")
    if not isinstance(counters, dict):
        return {}
    if len(counters) > COUNTERS or max(map(len, counters), default=0) > NAME_LENGTH:
        raise EngineProtocol(
            f"{len(counters)} counters, the longest name has {max(map(len, counters))} characters; "
            f"at most {COUNTERS} of {NAME_LENGTH} are read",
            _HINT,
        )
    return {
        str(name): float(value)
        for name, value in counters.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    }


@dataclass(frozen=True)
class Scored:
    """One forced position as it came over the wire."""

    index: int
    token: int
    logprob: float
    top: list[tuple[int, float]]


def positions_of(answer: dict[str, Any], ids: list[int], start: int) -> list[Scored]:
    """Positions `start..len(ids)-1` of a scoring answer.

    `input_token_logprobs` holds (logprob, token, text) and `input_top_logprobs` a list of the same per position;
    both end with the last token of `ids`, and the first entry may be null (SGLang returns one entry per
    position from logprob_start_len on). Each token must be the forced one. Raises EngineProtocol otherwise.
    """
    meta = answer.get("meta_info", {})
    tokens, tops = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    wanted = len(ids) - start
    if not isinstance(tokens, list) or not isinstance(tops, list) or min(len(tokens), len(tops)) < wanted:
        raise EngineProtocol(f"scoring answer lacks log-probabilities for {wanted} positions", _HINT)
    result = []
    for index, entry, best in zip(
        range(start, len(ids)), tokens[len(tokens) - wanted :], tops[len(tops) - wanted :], strict=True
    ):
        logprob, token = _pair(entry)
        if token != ids[index]:
            raise EngineProtocol(f"scoring answer is about token {token} at {index}, asked {ids[index]}", _HINT)
        if not isinstance(best, list) or not best:
            raise EngineProtocol(f"scoring answer has no top tokens at {index}", _HINT)
        top = [(tok, value) for value, tok in (_pair(item) for item in best)]
        result.append(Scored(index, token, logprob, top))
    return result


def _pair(entry: Any) -> tuple[float, int]:
    if not isinstance(entry, (list, tuple)) or len(entry) < 2:
        raise EngineProtocol(f"not a (logprob, token) entry: {str(entry)[:100]}", _HINT)
    logprob, token = entry[0], entry[1]
    if not isinstance(logprob, (int, float)) or math.isnan(logprob) or type(token) is not int:
        raise EngineProtocol(f"not a (logprob, token) entry: {str(entry)[:100]}", _HINT)
    return float(logprob), token
