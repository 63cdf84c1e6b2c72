"""Request bodies as they come off the wire: bounded, UTF-8, strict JSON. What a body may say is `protocol`'s; no tensors here.

Python's json reads NaN, UTF-16 and half of a surrogate pair. None of them is JSON that others would read the same way, and text with half a
pair can be neither tokenised nor sent back: such a body is refused here, once, whatever field it hides in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

LARGEST = 32 << 20
"""Bytes: more than the longest context of any target written in tokens or as text."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose body is bounded and whose JSON is strict. Raises HTTPException (400, 413) where it is not."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            chunks, size = [], _declared(self.headers.get("content-length", "0"))
            if size <= LARGEST:
                size = 0
                async for chunk in self.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > LARGEST:
                        break
            if size > LARGEST:
                raise HTTPException(413, f"the body is larger than {LARGEST >> 20} MiB")
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body through StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def parse(body: bytes) -> Any:
    """The JSON value in `body`. Raises HTTPException for what only Python would read, json.JSONDecodeError for what nobody would."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_number)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise HTTPException(400, "the body holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise HTTPException(400, "the body is nested too deeply") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # a whole number of thousands of digits
        raise HTTPException(400, f"the body holds a number that cannot be read: {error}") from error
    return value


def _declared(length: str) -> int:
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _no_number(word: str) -> NoReturn:
    raise HTTPException(400, f"the body holds {word}, which JSON does not have")
