"""The SGLang-native subset: /generate, health, information, profile."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from slim_engine import profiling
from slim_engine.bodies import StrictRoute
from slim_engine.errors import RequestError
from slim_engine.protocol import GenerateBody, native_answer
from slim_engine.service import Generation, Service


class ProfileBody(BaseModel):
    output_dir: str | None = None


def native_routes(service: Service) -> APIRouter:
    """Routes bound to `service`."""
    router = APIRouter(route_class=StrictRoute)
    profile = _Profile(service)

    def token_text(token: int) -> str:
        return service.codec.decode([token], skip_special=False)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, http: HttpRequest) -> JSONResponse | StreamingResponse:
        ids = service.codec.encode(body.text) if body.text is not None else list(body.input_ids or [])
        generation = service.submit(ids, body.sampling_params.params(), body.logprobs(), body.rid)
        if body.stream:
            return StreamingResponse(stream(generation, body), media_type="text/event-stream")
        text = await generation.wait(http)
        meta = native_answer(generation.request, generation.output_logprobs, body, token_text)
        return JSONResponse({"text": text, "output_ids": generation.request.output_ids, "meta_info": meta})

    async def stream(generation: Generation, body: GenerateBody) -> AsyncIterator[str]:
        """Every event holds the new ids and the new text only; the last one the whole meta_info."""
        done = 0
        async for chunk in generation.chunks():
            done += len(chunk.token_ids)
            last = chunk.finish is not None
            meta: dict[str, Any] = {"id": generation.request.id, "finish_reason": None, "completion_tokens": done}
            if last:
                meta = native_answer(generation.request, generation.output_logprobs, body, token_text)
            yield sse(
                {"text": generation.text.push(chunk.token_ids, last), "output_ids": chunk.token_ids, "meta_info": meta}
            )
        yield "data: [DONE]\n\n"

    @router.get("/health")
    @router.get("/health_generate")
    async def health() -> JSONResponse:
        alive = service.thread.alive
        return JSONResponse({"status": "ok" if alive else "the engine thread ended"}, 200 if alive else 503)

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return service.identity.server_info()

    @router.post("/flush_cache")
    @router.get("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        return {"success": True, "message": "nothing is cached between requests"}

    @router.post("/start_profile")
    async def start_profile(body: ProfileBody | None = None) -> dict[str, str]:
        return await profile.start(body.output_dir if body else None)

    @router.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        return await profile.stop()

    return router


class _Profile:
    """Starts and stops the trace between two steps of the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._folder: Path | None = None
        self._number = itertools.count()

    async def start(self, folder: str | None) -> dict[str, str]:
        path = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="slim-profile-"))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            raise RequestError(f"output_dir {path}: {error}") from error
        await self._run(profiling.start)
        self._folder = path
        return {"output_dir": str(path)}

    async def stop(self) -> dict[str, str]:
        folder = self._folder or Path(tempfile.gettempdir())
        trace = folder / f"slim-{os.getpid()}-{next(self._number)}.trace.json"
        await self._run(lambda: profiling.stop(trace))
        return {"trace": str(trace)}

    async def _run(self, work: Any) -> None:
        try:
            await asyncio.wrap_future(self._service.thread.call(work))
        except (ValueError, OSError) as error:
            raise RequestError(str(error)) from error


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
