"""Engine servers as child processes, and a small client that counts and times tokens itself. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import layout  # type: ignore[import-not-found]

REQUEST_TIMEOUT_S = 300.0


class Answer(NamedTuple):
    """One streamed answer; `decode_s` runs from the first chunk to the end and yields `decoded` tokens."""

    ids: list[int]
    decode_s: float
    decoded: int


class Engine:
    """One variant in its own process group. A frozen engine (SIGSTOP) takes no CPU time."""

    def __init__(self, info: dict[str, Any], variant: str) -> None:
        self.variant = variant
        with socket.socket() as probe:
            probe.bind((layout.HOST, 0))
            self.port = int(probe.getsockname()[1])
        command, folder, environment = layout.launch(info, variant, self.port)
        logs = Path(os.environ.get("ENGINE_CACHE") or layout.HOME / ".cache") / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{variant}-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready(*layout.readiness(variant, info))
            self._check_identity(info)
        except BaseException:
            self.stop()
            raise

    def ask_to_end(self) -> None:
        """Tell it to end, without waiting."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the process group: asked first, forced after a few seconds."""
        self.ask_to_end()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        """Stop it by signal."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """One JSON request."""
        with contextlib.closing(self._connect()) as connection:
            connection.request(method, path, json.dumps(body).encode() if body is not None else None, _JSON)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                layout.fail(layout.ENVIRONMENT, f"{self.variant}: {path} answered {response.status}: {text[:300]!r}")
            return json.loads(text) if text.strip() else {}

    def generate(self, ids: list[int], tokens: int) -> Answer:
        """Greedy continuation of exactly `tokens` tokens."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        output: list[int] = []
        first_s, first_count = 0.0, 0
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", "/generate", json.dumps(body).encode(), _JSON)
            for event in self._events(connection.getresponse()):
                new = event.get("output_ids") or []
                if new and not output:
                    first_s, first_count = time.perf_counter(), len(new)
                output += new
        if len(output) != tokens:
            layout.fail(layout.DIFFERS, f"{self.variant} answered {len(output)} tokens of {tokens}", f"log: {self.log}")
        return Answer(output, time.perf_counter() - first_s, len(output) - first_count)

    def score(self, ids: list[int], start: int) -> list[tuple[int, int, float]]:
        """(forced token, best token, gap in nats) for each position from `start`, teacher-forced."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": 2,
        }
        meta = self.request("POST", "/generate", body)["meta_info"]
        wanted = len(ids) - start  # both lists end with the last token; only what stands before may be null
        given, best = meta["input_token_logprobs"][-wanted:], meta["input_top_logprobs"][-wanted:]
        rows = []
        for (logprob, token, *_), top in zip(given, best, strict=True):
            gap = 0.0 if top[0][1] == token else top[0][0] - logprob
            rows.append((int(token), int(top[0][1]), float(gap)))
        if [row[0] for row in rows] != ids[start:]:
            layout.fail(layout.ENVIRONMENT, "the reference scored other tokens than it was given", f"log: {self.log}")
        return rows

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        if response.status != 200:
            layout.fail(
                layout.ENVIRONMENT, f"{self.variant}: /generate answered {response.status}: {response.read()[:300]!r}"
            )
        for line in response:
            text = line.strip()
            if text == b"data: [DONE]":
                return
            if text.startswith(b"data: "):
                yield json.loads(text[6:])
        layout.fail(layout.ENVIRONMENT, f"{self.variant} broke off in mid-answer", f"log: {self.log}")

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(layout.HOST, self.port, timeout=REQUEST_TIMEOUT_S)

    def _wait_ready(self, path: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                tail = self.log.read_text(errors="replace")[-1500:]
                layout.fail(layout.ENVIRONMENT, f"{self.variant} ended while starting:\n{tail}", f"log: {self.log}")
            try:
                with contextlib.closing(http.client.HTTPConnection(layout.HOST, self.port, timeout=2)) as connection:
                    connection.request("GET", path)
                    if connection.getresponse().status == 200:
                        return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.2)
        layout.fail(layout.ENVIRONMENT, f"{self.variant} was not ready after {timeout_s:.0f} s", f"log: {self.log}")

    def _check_identity(self, info: dict[str, Any]) -> None:
        """The process must serve the commit and the target that we asked for."""
        told = self.request("GET", "/server_info")
        wanted = info["variants"][self.variant]["commit"]
        if told.get("commit") != wanted:
            layout.fail(layout.ENVIRONMENT, f"the server on port {self.port} serves {told.get('commit')}, not {wanted}")
        digest, pinned = (told.get("target") or {}).get("sha256"), info["target"]["sha256"]
        if digest != pinned:
            layout.fail(layout.MODEL, f"the target's weights are {digest}, this engine was found for {pinned}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


_JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def started(info: dict[str, Any], variants: list[str]) -> Iterator[list[Engine]]:
    """All `variants`, frozen; ended when the block is left, also by Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    layout.check_weights(info)  # by reading them: what a server says of itself is compared as well, later
    running: list[Engine] = []
    try:
        for variant in variants:
            print(f"starting {variant} ...", flush=True)
            engine = Engine(info, variant)
            running.append(engine)
            engine.freeze()
        yield running
    finally:
        for engine in running:
            engine.ask_to_end()
        for engine in running:
            engine.stop()


def load_prompts(info: dict[str, Any], which: str, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of the tuning or hidden set, evenly over the file."""
    layout.need_packages()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(layout.need_target(info) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts: list[str] = []
    for name in info["prompts"][which]:
        for line in (layout.HOME / name).read_text(encoding="utf-8").splitlines():
            if line.strip():
                texts.append(json.loads(line)["text"])
    every = [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    fitting = [ids for ids in every if 0 < len(ids) <= info["input_tokens"]]
    if not fitting:
        layout.fail(layout.INVALID, f"no {which} prompt is short enough ({info['input_tokens']} tokens)")
    step = max(1, len(fitting) // count)
    return (fitting[::step] * count)[:count]
