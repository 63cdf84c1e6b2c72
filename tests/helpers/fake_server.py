"""A model server with a made-up language model that speaks the real engine protocol over real sockets.

The "model" is a hash of the last tokens: deterministic, different for every prompt, with near-ties and an EOS.
It serves as target, drafter and reference at once, in milliseconds, and misbehaves on request: every field of
`Behaviour` is one programmable fault or delay, read from `behaviour.json` in the working directory, so that a
commit that changes that file is a candidate engine. Standard library only; imports nothing of ours, because it
runs as an engine's process from a copied tree: one long file on purpose, so that the tree is this file and its
settings. `write_fake_tree` makes such a tree.

Run: python fake_server.py --port P [--host H] [--target DIR] [--drafter X] [--no-speculation] [--pace SHARE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCAB = 512
EOS = 2
NEAR_TIE = 0.02
"""Largest gap (nats) between the two best tokens that counts as a near-tie in the made-up model."""

FAR = 6.0
"""Nats below the best token where all but the two best tokens lie."""


@dataclass(frozen=True)
class Behaviour:
    """Speed and faults. The defaults are an honest engine that accepts about three tokens per round."""

    prefill_s: float = 0.002
    round_s: float = 0.006
    """Seconds per decode round."""
    token_s: float = 0.0
    """Further seconds per committed token."""
    jitter: float = 0.0
    """Relative standard deviation of every delay (seeded)."""
    busy: bool = False
    """Burn CPU instead of sleeping."""
    accepted: tuple[int, ...] = (4, 2, 3)
    """Committed tokens of successive rounds, repeated."""
    salt: str = ""
    """Another salt is another model."""
    counters: dict[str, float] = field(default_factory=dict)
    """Further counters and how much each grows per round."""
    # start
    start_delay_s: float = 0.0
    fail_start: str = ""
    """Print this and exit with status 3."""
    never_ready: bool = False
    # identity
    claim_commit: str = ""
    claim_variant: str = ""
    claim_target_sha256: str = ""
    claim_drafter_sha256: str = ""
    # accounting
    claim_extra_tokens: int = 0
    short_by: int = 0
    extra_tokens: int = 0
    one_chunk: bool = False
    """Send the whole answer as one chunk at the end."""
    hold_back: float = 0.0
    """Keep tokens back until this share of the time has passed, then release one by one in the rest."""
    # tokens
    wrong_every: int = 0
    """Every n-th token is neither of the two best."""
    wrong_after_requests: int = 0
    """Faults in tokens begin after so many requests (0: at once)."""
    wrong_first: bool = False
    flip_near_ties: float = 0.0
    """Take the second best token wherever its gap is at most this."""
    relaxed: float = 0.0
    """Take the second best token with gap at most this at every other opportunity (lossy acceptance)."""
    ignore_stop: bool = False
    no_trace: bool = False
    """Profiling ends without a trace."""
    stop_after: int = 0
    """Natural-stop answers end after so many tokens."""
    # transport
    drop_after_requests: int = -1
    die_after_requests: int = -1
    error_after_requests: int = -1
    hang_after_tokens: int = -1
    malformed: bool = False
    no_done: bool = False
    # cheating on time
    known: tuple[int, ...] = ()
    """Prompts that hold these ids in a row have their answers drafted beforehand: eight tokens a round are accepted."""
    replay: bool = False
    """Answers a prompt seen before at once."""
    replay_suffix: int = 0
    """Replays the stored answer of any prompt that ends in the same so many tokens, at once."""
    speculation_off: bool = False
    idle_burn: bool = False
    """A thread burns CPU all the time."""
    allocate_mb: int = 0


def load_behaviour(folder: Path) -> Behaviour:
    """From `behaviour.json`; unknown keys are refused."""
    path = folder / "behaviour.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    unknown = set(values) - {item.name for item in fields(Behaviour)}
    if unknown:
        raise SystemExit(f"unknown behaviour: {sorted(unknown)}")
    return Behaviour(**values)


@dataclass(frozen=True)
class Prediction:
    """The two best next tokens and the gap between them in nats."""

    top: int
    second: int
    gap: float

    def logprob(self, token: int) -> float:
        """Natural log-probability of `token` (not normalised exactly; monotone, which is all that is needed)."""
        if token == self.top:
            return -0.1
        if token == self.second:
            return -0.1 - self.gap
        return -0.1 - FAR - (token % 97) / 97


def predict(context: list[int], salt: str = "") -> Prediction:
    """The made-up model: depends on the last 24 tokens."""
    digest = hashlib.blake2b(f"{salt}:{context[-24:]}".encode(), digest_size=16).digest()
    top = 3 + int.from_bytes(digest[:4], "big") % (VOCAB - 3)
    if digest[12] < 4:
        top = EOS
    second = 3 + (top + 1 + int.from_bytes(digest[4:8], "big") % (VOCAB - 5)) % (VOCAB - 3)
    if second == top:
        second = 3 + (second - 2) % (VOCAB - 3)
    near = digest[8] < 8
    gap = NEAR_TIE * (1 + digest[9]) / 256 if near else 0.5 + digest[9] / 64
    return Prediction(top, second, gap)


class FakeModel:
    """Chooses tokens under a behaviour; holds counters and the cheats' memory."""

    def __init__(self, behaviour: Behaviour, speculative: bool, pace: float = 1.0) -> None:
        self.behaviour = behaviour
        self.pace = pace
        self.speculative = speculative and not behaviour.speculation_off
        self.lock = threading.Lock()
        self.requests = 0
        self.counters: dict[str, float] = dict.fromkeys(
            ("rounds", "target_forwards", "draft_forwards", "committed_tokens", "prefill_tokens"), 0.0
        ) | dict.fromkeys(behaviour.counters, 0.0)
        self.memory: dict[tuple[int, ...], list[int]] = {}
        self.random = random.Random(12345)

    def count(self, **growth: float) -> None:
        """Adds to counters."""
        with self.lock:
            for name, value in growth.items():
                self.counters[name] = self.counters.get(name, 0.0) + value

    def choose(self, context: list[int], place: int, sampling: dict[str, Any], number: int) -> int:
        """The next token: argmax or sampled, unless a fault applies."""
        found, how = predict(context, self.behaviour.salt), self.behaviour
        temperature = float(sampling.get("temperature", 0.0))
        if temperature > 0:
            rng = random.Random(f"{sampling.get('sampling_seed')}:{number}:{place}")
            return found.second if rng.random() < 1 / (1 + math.exp(found.gap / temperature)) else found.top
        if number > how.wrong_after_requests:
            if (how.wrong_every and place % how.wrong_every == how.wrong_every - 1) or (how.wrong_first and place == 0):
                return 3 + (max(found.top, found.second) + 7) % (VOCAB - 3)
            if found.gap <= how.flip_near_ties or (found.gap <= how.relaxed and place % 2):
                return found.second
        return found.top

    def answer(self, prompt: list[int], sampling: dict[str, Any], number: int) -> tuple[list[int], str]:
        """All tokens of one answer and why it ended."""
        wanted = int(sampling.get("max_new_tokens", 16))
        natural = not sampling.get("ignore_eos", False)
        key = self._key(prompt)
        if key in self.memory:
            return self.memory[key][:wanted], "length"
        tokens: list[int] = []
        reason = "length"
        limit = max(0, wanted - self.behaviour.short_by)
        while len(tokens) < limit:
            tokens.append(self.choose(prompt + tokens, len(tokens), sampling, number))
            stop = tokens[-1] == EOS and not self.behaviour.ignore_stop
            if natural and (stop or len(tokens) == self.behaviour.stop_after):
                reason = "stop"
                break
        tokens += [5] * self.behaviour.extra_tokens
        if key:
            self.memory[key] = tokens
        return tokens, reason

    def remembered(self, prompt: list[int]) -> bool:
        """Whether a cheat has an answer ready."""
        return self._key(prompt) in self.memory

    def _key(self, prompt: list[int]) -> tuple[int, ...]:
        if self.behaviour.replay:
            return tuple(prompt)
        return tuple(prompt[-self.behaviour.replay_suffix :]) if self.behaviour.replay_suffix else ()

    def wait(self, seconds: float) -> None:
        """Passes this variant's share of the time, asleep or busy, with the behaviour's jitter."""
        seconds *= self.pace
        if self.behaviour.jitter:
            with self.lock:
                seconds *= max(0.1, self.random.gauss(1.0, self.behaviour.jitter))
        if not self.behaviour.busy:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass


class Handler(BaseHTTPRequestHandler):
    """One connection. `server.model` and `server.info` are set by `serve`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    @property
    def model(self) -> FakeModel:
        return self.server.model  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        """`/health`, `/server_info`, `/v1/models`."""
        if self.path in ("/health", "/health_generate"):
            self._json(200 if not self.model.behaviour.never_ready else 503, {})
        elif self.path in ("/server_info", "/get_server_info"):
            with self.model.lock:
                counters = dict(self.model.counters)
            rounds = counters["rounds"]
            info = dict(self.server.info)  # type: ignore[attr-defined]
            accepted = counters["committed_tokens"] / rounds if rounds else None
            self._json(200, info | {"counters": counters, "accepted_length": accepted})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            self._json(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        """`/generate`, `/flush_cache`, `/start_profile`, `/stop_profile`."""
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") if length else {}
        if self.path == "/generate":
            self._generate(body)
        elif self.path == "/flush_cache":
            self._json(200, {"success": True})
        elif self.path == "/start_profile":
            self.server.profile_dir = body.get("output_dir", ".")  # type: ignore[attr-defined]
            self._json(200, {})
        elif self.path == "/stop_profile":
            self._json(200, {"trace": self._trace()})
        else:
            self._json(404, {"error": f"no {self.path}"})

    def _trace(self) -> str:
        folder = Path(getattr(self.server, "profile_dir", "."))
        if self.model.behaviour.no_trace:
            return str(folder / "none.json")
        folder.mkdir(parents=True, exist_ok=True)
        event = {
            "name": "round",
            "ph": "X",
            "ts": 0,
            "dur": 6000,
            "pid": 1,
            "tid": 1,
            "args": {"rows": 1, "committed": 3},
        }
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": [event]}))
        return str(path)

    def _generate(self, body: dict[str, Any]) -> None:
        model, how = self.model, self.model.behaviour
        if body.get("return_logprob"):
            self._score(body)
            return
        with model.lock:
            model.requests += 1
            number = model.requests
        if 0 <= how.die_after_requests < number:
            os._exit(9)
        if 0 <= how.error_after_requests < number:
            self._json(500, {"error": "made-up failure"})
            return
        if 0 <= how.drop_after_requests < number:
            self.close_connection = True
            self.connection.close()
            return
        ready = model.remembered(body["input_ids"])
        sampling = body.get("sampling_params", {})
        tokens, reason = model.answer(body["input_ids"], sampling, number)
        if body.get("stream"):
            self._stream(body["input_ids"], tokens, reason, ready)
        else:
            rounds = sum(1 for _ in self._rounds(body["input_ids"], tokens, ready))
            self._json(
                200,
                {"output_ids": tokens, "text": "", "meta_info": self._meta(body["input_ids"], tokens, rounds, reason)},
            )

    def _rounds(self, prompt: list[int], tokens: list[int], ready: bool) -> Any:
        """Chunks of new tokens, one per round (the first is the prefill's), after passing their time."""
        model, how = self.model, self.model.behaviour
        place, number = 0, 0
        here = range(len(prompt) - len(how.known) + 1) if how.known else ()
        known = any(prompt[k : k + len(how.known)] == list(how.known) for k in here)
        accepted = (8,) if known else how.accepted
        while place < len(tokens):
            first = place == 0
            step = 1 if first or not model.speculative else accepted[number % len(accepted)]
            chunk = tokens[place : place + step]
            if not ready:
                model.wait(how.prefill_s if first else how.round_s + how.token_s * len(chunk))
            if first:
                model.count(prefill_tokens=len(prompt), target_forwards=1)
            else:
                number += 1
                drafts = {"draft_forwards": 1.0} if model.speculative else {}
                model.count(rounds=1, target_forwards=1, committed_tokens=len(chunk), **drafts, **how.counters)
            place += len(chunk)
            yield chunk

    def _stream(self, prompt: list[int], tokens: list[int], reason: str, ready: bool) -> None:
        how = self.model.behaviour
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent, rounds = 0, -1
        held: list[int] = []
        start = time.perf_counter()
        for chunk in self._rounds(prompt, tokens, ready):
            rounds += 1
            if how.one_chunk or how.hold_back:
                held += chunk
                continue
            self._event(chunk, self._meta(prompt, tokens[: sent + len(chunk)], rounds, None))
            sent += len(chunk)
            if 0 <= how.hang_after_tokens <= sent:
                time.sleep(3600)
        if how.one_chunk and held:
            self._event(held, {})
        elif held:
            pause = (time.perf_counter() - start) * (1 - how.hold_back) / len(held)
            for token in held:
                self._event([token], {})
                time.sleep(pause)
        if how.malformed:
            self._raw(b"data: {not json\n\n")
        self._event([], self._meta(prompt, tokens, rounds, reason))
        if not how.no_done:
            self._raw(b"data: [DONE]\n\n")
        self._raw(b"")

    def _meta(self, prompt: list[int], tokens: list[int], rounds: int, reason: str | None) -> dict[str, Any]:
        claimed = len(tokens) + self.model.behaviour.claim_extra_tokens
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": claimed,
            "finish_reason": None if reason is None else {"type": reason},
        }
        if rounds > 0:
            meta |= {"spec_verify_ct": rounds, "spec_accept_length": claimed / rounds}
        return meta

    def _score(self, body: dict[str, Any]) -> None:
        ids, salt = body["input_ids"], self.model.behaviour.salt
        start = max(0, int(body.get("logprob_start_len", 0)))
        tokens: list[Any] = []
        tops: list[Any] = []
        for place in range(start, len(ids)):
            if place == start:
                tokens.append([None, ids[place], None])
                tops.append(None)
                continue
            found = predict(ids[:place], salt)
            tokens.append([found.logprob(ids[place]), ids[place], None])
            tops.append([[found.logprob(token), token, None] for token in (found.top, found.second)])
        meta = {"prompt_tokens": len(ids), "completion_tokens": 0, "finish_reason": {"type": "length"}}
        self._json(
            200,
            {
                "output_ids": [],
                "text": "",
                "meta_info": meta | {"input_token_logprobs": tokens, "input_top_logprobs": tops},
            },
        )

    def _event(self, chunk: list[int], meta: dict[str, Any]) -> None:
        self._raw(b"data: " + json.dumps({"output_ids": chunk, "meta_info": meta}).encode() + b"\n\n")

    def _raw(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def _json(self, status: int, answer: Any) -> None:
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class FakeHTTPServer(ThreadingHTTPServer):
    """Room for many connections; threads die with the process."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is nobody's error; anything else is told as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def build(
    behaviour: Behaviour,
    port: int,
    *,
    host: str = "127.0.0.1",
    speculative: bool = True,
    info: dict[str, Any] | None = None,
    pace: float = 1.0,
) -> FakeHTTPServer:
    """A bound, not yet serving server (port 0: any free one)."""
    server = FakeHTTPServer((host, port), Handler)
    server.model = FakeModel(behaviour, speculative, pace)  # type: ignore[attr-defined]
    server.info = info or {}  # type: ignore[attr-defined]
    return server


def digest_of(path: str, name: str) -> str | None:
    """SHA-256 of `name` inside a checkpoint folder, None when there is none."""
    file = Path(path) / name
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def describe(behaviour: Behaviour, target: str, drafter: str, speculative: bool) -> dict[str, Any]:
    """The identity part of `/server_info`."""
    method = drafter if drafter in ("ngram", "none") else "dflash"
    return {
        "engine": "fake",
        "version": "1",
        "commit": behaviour.claim_commit or os.environ.get("SPECPILOT_COMMIT", ""),
        "variant": behaviour.claim_variant or os.environ.get("SPECPILOT_VARIANT", ""),
        "threads": 1,
        "target": {"path": target, "sha256": behaviour.claim_target_sha256 or digest_of(target, "model.safetensors")},
        "drafter": {
            "method": method if speculative else "none",
            "path": drafter,
            "sha256": behaviour.claim_drafter_sha256 or digest_of(drafter, "model.safetensors"),
            "block_size": 8,
        },
        "tunables": {},
    }


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--target", default="")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--no-speculation", action="store_true")
    parser.add_argument("--pace", type=float, default=1.0, help="share of the behaviour's delays that pass")
    arguments = parser.parse_args()
    behaviour = load_behaviour(Path.cwd())
    if behaviour.fail_start:
        print(behaviour.fail_start, file=sys.stderr, flush=True)
        raise SystemExit(3)
    time.sleep(behaviour.start_delay_s)
    ballast = [os.urandom(1 << 20) for _ in range(behaviour.allocate_mb)]
    if behaviour.idle_burn:
        threading.Thread(target=_burn, daemon=True).start()
    speculative = not arguments.no_speculation
    info = describe(behaviour, arguments.target, arguments.drafter, speculative)
    server = build(
        behaviour, arguments.port, host=arguments.host, speculative=speculative, info=info, pace=arguments.pace
    )
    print(f"fake engine on {arguments.port}, {len(ballast)} MiB of ballast", flush=True)
    server.serve_forever()


def _burn() -> None:
    while True:
        sum(range(1000))


ENGINE_TOML = """# The made-up engine of the test suite.
name = "fake"
version = "1"
protocol = "sglang-native/1"

[launch]
command = ["{python}", "fake_server.py", "--port", "{port}", "--host", "{host}", "--target", "{target}", "--drafter", "{drafter}"]

[variants]
stock = []
ar = ["--no-speculation"]
reference = ["--no-speculation", "--pace", "0"]
final = []
final-ar = ["--no-speculation"]

[readiness]
path = "/health"
timeout_s = 20
interval_s = 0.02

[editable]
include = ["behaviour.json"]

[scopes]
"target.mlp" = "target.mlp"
host = "host"

[counters]
rounds = "Decode rounds."
"""


def write_fake_tree(folder: Path, behaviour: Behaviour | None = None, engine_toml: str | None = None) -> Path:
    """An engine tree (engine.toml, fake_server.py, behaviour.json) in `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__), folder / "fake_server.py")
    (folder / "engine.toml").write_text(ENGINE_TOML if engine_toml is None else engine_toml)
    set_behaviour(folder, behaviour or Behaviour())
    return folder


def set_behaviour(folder: Path, behaviour: Behaviour, **changes: Any) -> None:
    """Writes only what differs from the defaults."""
    chosen, plain = asdict(replace(behaviour, **changes)), asdict(Behaviour())
    values = {name: value for name, value in chosen.items() if value != plain[name]}
    (folder / "behaviour.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
