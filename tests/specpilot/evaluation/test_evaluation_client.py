"""The client against a server that speaks the protocol, well and badly."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specpilot.evaluation.client import EngineClient
from specpilot.evaluation.errors import EngineCrash, EngineProtocol, EngineTimeout
from specpilot.evaluation.wire import (
    SseReader,
    count,
    finish_reason,
    flat_counters,
    meta_info,
    parse_object,
    positions_of,
    token_ids,
)
from tests.helpers.fake_server import EOS, Behaviour, build, predict

PROMPT = list(range(40, 60))
HANG_S = 60.0
"""Seconds after which a call counts as hanging: far above any deadline set here, however busy the machine."""


def greedy(prompt: list[int], n: int) -> list[int]:
    """The made-up model's continuation, computed here."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(predict(ids).top)
    return ids[len(prompt) :]


def test_generate_returns_the_models_tokens_and_our_times(talk) -> None:
    began = time.perf_counter()
    found = talk(prefill_s=0.02, round_s=0.01).generate(PROMPT, max_new_tokens=10, prompt_id="p")
    assert found.output_ids == greedy(PROMPT, 10)
    assert found.prompt_ids == PROMPT and found.prompt_id == "p"
    # prefill gives 1, rounds give 4 2 3: nine more tokens in three rounds
    assert (found.rounds, found.first_chunk_tokens, found.decoded) == (3, 1, 9)
    assert found.claimed_tokens == 10 and found.finish_reason == "length"
    assert began <= found.submitted_s < found.first_s < found.last_s <= time.perf_counter()
    assert found.first_s - found.submitted_s >= 0.02 and found.decode_s >= 0.025


def test_natural_stop(talk) -> None:
    client = talk()
    prompt = next(p for k in range(1000) if EOS in greedy(p := [*PROMPT, 7 + k], 30))
    found = client.generate(prompt, max_new_tokens=30, ignore_eos=False)
    expected = greedy(prompt, 30)
    assert found.output_ids == expected[: expected.index(EOS) + 1]
    assert found.finish_reason == "stop"
    assert client.generate(prompt, max_new_tokens=30).output_ids == expected


def test_sampling_follows_the_seed(talk) -> None:
    client = talk()
    first = client.generate(PROMPT, max_new_tokens=40, temperature=5.0, seed=1)
    assert first.output_ids != greedy(PROMPT, 40)


def test_tokens_are_counted_here_not_believed(talk) -> None:
    found = talk(claim_extra_tokens=7).generate(PROMPT, max_new_tokens=8)
    assert len(found.output_ids) == 8 and found.claimed_tokens == 15


def test_score_forces_every_position(talk) -> None:
    client = talk()
    ids = PROMPT + greedy(PROMPT, 6)
    ids[23] = 3 + (ids[23] + 11) % 500
    rows = client.score(ids, start=20)
    assert [row.index for row in rows] == list(range(20, 26))
    for row in rows:
        expected = predict(ids[: row.index])
        assert row.token == ids[row.index] and row.top_token == expected.top
        assert row.gap == pytest.approx(expected.logprob(expected.top) - expected.logprob(row.token))
        assert row.top[1][0] == expected.second
    assert rows[0].gap == 0.0 and rows[3].gap > 0.0


@pytest.mark.parametrize("start", [0, 20, 21])
def test_score_refuses_a_start_without_prediction(talk, start: int) -> None:
    with pytest.raises(ValueError, match="start"):
        talk().score(PROMPT, start=start)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"malformed": True}, EngineProtocol, "not JSON"),
        ({"no_done": True}, EngineCrash, "without \\[DONE\\]"),
        ({"extra_tokens": 2}, EngineProtocol, "more than"),
        ({"error_after_requests": 0}, EngineCrash, "HTTP 500"),
        ({"drop_after_requests": 0}, EngineCrash, "connection lost"),
    ],
)
def test_bad_answers_are_typed_errors(talk, how: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        talk(**how).generate(PROMPT, max_new_tokens=8)


def test_hanging_answer_times_out(talk) -> None:
    began = time.monotonic()
    with pytest.raises(EngineTimeout):
        talk(timeout_s=0.3, hang_after_tokens=3).generate(PROMPT, max_new_tokens=8)
    assert time.monotonic() - began < HANG_S


def test_trickling_answer_meets_the_whole_answers_deadline(talk) -> None:
    # A chunk every 50 ms never trips a per-read timeout of 1.5 s; the answer as a whole must, or it would come after 10 s.
    with pytest.raises(EngineTimeout, match="not complete"):
        talk(timeout_s=1.5, round_s=0.05).generate(PROMPT, max_new_tokens=600)


@pytest.mark.parametrize("line", [b"X-Pad: 1\r\n", b"\r\nHTTP/1.1 103 Early Hints\r\n"])
def test_endless_headers_meet_the_deadline(line: bytes) -> None:
    """One header line every 50 ms: no single read takes long, the answer never begins."""
    over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        while not over.is_set():
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 103 Early Hints\r\n")
                    while not over.wait(0.05):
                        connection.sendall(line)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        client = EngineClient(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.2)
        began = time.monotonic()
        with pytest.raises(EngineTimeout):
            client.generate(PROMPT, max_new_tokens=8)
        with pytest.raises(EngineTimeout):
            client.server_info(0.2)
        assert not client.healthy(0.2)
        assert time.monotonic() - began < HANG_S
        over.set()
        client.close()


def test_what_an_engine_says_of_itself_is_bounded() -> None:
    """It is kept for every leg: two million counters would fill our memory."""
    server = build(Behaviour(), 0, info={"pad": "x" * (1 << 20)})
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    client = EngineClient(f"http://127.0.0.1:{server.server_address[1]}", 5.0)
    with pytest.raises(EngineProtocol, match="/server_info: answer larger than 1048576 bytes"):
        client.server_info()
    client.close()
    server.shutdown()
    server.server_close()


def test_nobody_there() -> None:
    client = EngineClient("http://127.0.0.1:9", 1.0)
    assert not client.healthy(0.5)
    with pytest.raises(EngineCrash, match="connection lost"):
        client.server_info()


def test_no_request_depends_on_an_old_connection() -> None:
    """A server frozen past its keep-alive time closes idle connections as it wakes: a reused one would be reset."""

    class Forgetful(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        served = 0

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.served += 1
            if self.served > 1:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        client = EngineClient(f"http://127.0.0.1:{server.server_address[1]}", 2.0)
        for _ in range(3):
            assert client.server_info() == {}
        client.close()
        server.shutdown()


def test_counters_flush_profile(talk, tmp_path) -> None:
    client = talk(counters={"w12_calls": 2})
    assert client.healthy() and client.counters()["rounds"] == 0
    client.generate(PROMPT, max_new_tokens=10)
    assert client.counters()["w12_calls"] == 6
    client.flush_cache()
    client.start_profile(tmp_path)
    assert client.stop_profile().is_file()


def test_unknown_path_is_a_protocol_error(talk) -> None:
    with pytest.raises(EngineProtocol, match="HTTP 404"):
        talk()._json("GET", "/nothing", None, 1.0)


@pytest.mark.parametrize("value", [None, "12", [1, "2"], [True], [-1], [1.0], {"0": 1}, [2**31], [10**30]])
def test_token_ids_must_be_ids(value: object) -> None:
    with pytest.raises(EngineProtocol):
        token_ids(value)


def test_sse_reader_joins_pieces_and_bounds_memory() -> None:
    reader = SseReader(limit_bytes=100)
    assert list(reader.feed(b'data: {"output_')) == []
    assert list(reader.feed(b'ids": [1]}\r\n\r\n: comment\n')) == [{"output_ids": [1]}]
    assert list(reader.feed(b"data: [DONE]\n\n")) == [] and reader.done
    with pytest.raises(EngineProtocol, match="larger"):
        list(SseReader(limit_bytes=10).feed(b"x" * 11))


@pytest.mark.parametrize(
    "payload", [b"[" * 100_000, b'{"a":' * 100_000, b"[1]", b"nope", b'{"a": "\\ud800"}', b"{\xed\xa0\x80}"]
)
def test_what_cannot_be_read_or_stored_again_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(EngineProtocol):
        parse_object(payload, "answer")


def test_surrogate_pairs_are_characters() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', "answer") == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("meta", [[1], "x", 3])
def test_meta_info_is_an_object(meta: object) -> None:
    with pytest.raises(EngineProtocol, match="meta_info"):
        meta_info({"meta_info": meta})
    assert meta_info({}) == {} == meta_info({"meta_info": None})


def test_counts_are_counts() -> None:
    assert (count({"n": 3}, "n"), count({}, "n"), count({"n": True}, "n"), count({"n": "3"}, "n")) == (
        3,
        None,
        None,
        None,
    )
    for value in (-1, 2**31, 10**400):
        with pytest.raises(EngineProtocol, match="counts nothing"):
            count({"n": value}, "n")


def test_error_event_is_reported() -> None:
    with pytest.raises(EngineProtocol, match="out of memory"):
        list(SseReader(1000).feed(b'data: {"error": "out of memory"}\n'))


def test_positions_check_the_forced_tokens() -> None:
    meta = {"input_token_logprobs": [[None, 4, None], [-0.5, 5, None]], "input_top_logprobs": [None, [[-0.1, 9, None]]]}
    (row,) = positions_of({"meta_info": meta}, [4, 5], 1)
    assert (row.token, row.logprob, row.top) == (5, -0.5, [(9, -0.1)])
    with pytest.raises(EngineProtocol, match="is about token 5"):
        positions_of({"meta_info": meta}, [4, 6], 1)
    with pytest.raises(EngineProtocol, match="lacks"):
        positions_of({"meta_info": meta}, [1, 2, 4, 5], 1)


def test_counters_ignore_what_is_no_number() -> None:
    assert flat_counters({"counters": {"a": 1, "b": "x", "c": True, "d": 2.5}}) == {"a": 1.0, "d": 2.5}
    assert flat_counters({}) == {}
    assert flat_counters({"counters": {"a": float("nan"), "b": float("inf"), "c": 10**400, "d": 1}}) == {"d": 1.0}


def test_counters_and_words_are_bounded() -> None:
    assert len(flat_counters({"counters": {str(k): k for k in range(512)}})) == 512
    assert flat_counters({"counters": {"n" * 100: 1}}) == {"n" * 100: 1.0}
    for many in ({str(k): 0 for k in range(513)}, {"n" * 101: 0}):
        with pytest.raises(EngineProtocol, match="counters, the longest name has"):
            flat_counters({"counters": many})
    assert finish_reason({"finish_reason": {"type": "length" * 1000}}) == ("length" * 1000)[:40]
