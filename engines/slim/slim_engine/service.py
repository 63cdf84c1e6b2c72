"""Between HTTP and the engine thread: submits requests and hands their chunks to the event loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request as HttpRequest

from slim_engine.errors import RequestError
from slim_engine.identity import Identity
from slim_engine.loading import Loaded
from slim_engine.protocol import check_prompt
from slim_engine.request import Chunk, LogprobOptions, Request, TokenLogprob
from slim_engine.sampling import SamplingParams
from slim_engine.scheduler import EngineThread
from slim_engine.text import Detokenizer, TextCodec, TextStream

_POLL_S = 1.0  # how often a waiting request looks whether the engine, and a non-streaming one whether its client, is still there


class EngineFault(Exception):
    """The engine ended a request by itself (HTTP 500)."""


@dataclass
class Generation:
    """One request on its way, seen from the event loop."""

    request: Request
    queue: asyncio.Queue[Chunk]
    text: TextStream
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    thread: EngineThread | None = None

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Chunks as they come. Closing the iterator early cancels the request."""
        try:
            while True:
                chunk = await self._next()
                if chunk is None:
                    continue
                self.output_logprobs += chunk.logprobs
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self.request.cancelled = True  # no effect on a finished request

    async def wait(self, http: HttpRequest) -> str:
        """Runs to the end and returns the text; cancels if the client goes away. Raises EngineFault."""
        pieces: list[str] = []
        look_at = time.monotonic() + _POLL_S
        while True:
            chunk = await self._next()
            if time.monotonic() >= look_at:  # also where chunks never stop coming
                self.request.cancelled = self.request.cancelled or await http.is_disconnected()
                look_at = time.monotonic() + _POLL_S
            if chunk is None:
                continue
            self.output_logprobs += chunk.logprobs
            pieces.append(self.text.push(chunk.token_ids, last=chunk.finish is not None))
            if chunk.finish is not None:
                if chunk.finish["type"] == "abort":
                    raise EngineFault(chunk.finish["message"])
                return "".join(pieces)

    async def _next(self) -> Chunk | None:
        """The next chunk, or None if none came for a while. The last one, if the engine thread ended and has told nobody."""
        try:
            async with asyncio.timeout(_POLL_S):
                return await self.queue.get()
        except TimeoutError:
            if self.thread is None or self.thread.alive:
                return None
        await asyncio.sleep(0)  # what it delivered at its end is in the queue now
        if not self.queue.empty():
            return self.queue.get_nowait()
        self.request.finish = {"type": "abort", "message": self.thread.farewell}
        return Chunk([], [], self.request.finish)


class Service:
    """What the routes share."""

    def __init__(
        self, thread: EngineThread, loaded: Loaded, codec: TextCodec, identity: Identity, model_name: str
    ) -> None:
        self.thread = thread
        self.loaded = loaded
        self.codec = codec
        self.identity = identity
        self.model_name = model_name

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        logprobs: LogprobOptions | None = None,
        rid: str | None = None,
    ) -> Generation:
        """Checks and starts a request. Raises RequestError."""
        check_prompt(prompt_ids, params, self.loaded.config.vocab_size, self.loaded.max_len)
        if logprobs is not None and logprobs.start is not None and logprobs.start > len(prompt_ids):
            raise RequestError(f"logprob_start_len {logprobs.start} is beyond the {len(prompt_ids)} prompt tokens")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        request = Request(
            id=rid or uuid.uuid4().hex,
            prompt_ids=prompt_ids,
            params=params,
            eos_token_ids=self.loaded.config.eos_token_ids,
            emit=lambda chunk: _deliver(loop, queue, chunk),
            logprobs=logprobs,
            detokenizer=Detokenizer(self.codec, params.skip_special_tokens) if params.stop else None,
        )
        text = TextStream(self.codec, params.stop, params.skip_special_tokens)
        generation = Generation(request, queue, text, thread=self.thread)
        self.thread.submit(request)
        return generation


def _deliver(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Chunk], chunk: Chunk) -> None:
    try:
        loop.call_soon_threadsafe(queue.put_nowait, chunk)
    except RuntimeError:
        pass  # the loop is closed: the server is going down and nobody waits
