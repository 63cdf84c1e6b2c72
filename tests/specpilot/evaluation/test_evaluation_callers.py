"""Strangers' connections at a stopped engine: rows of the kernel's table by hand, and real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from specpilot.contracts import Reason
from specpilot.deployment import Deployment, MeasurementSettings, Regime
from specpilot.evaluation.baselines import measure_variants
from specpilot.evaluation.callers import Call, calls_at, require_uncalled, strangers
from specpilot.evaluation.compare import PairEvent, compare
from specpilot.evaluation.errors import CandidateFailed, LimitExceeded
from specpilot.evaluation.prompts import Prompt, PromptPool

REGIME = Regime(concurrency=1, output_tokens=19)

# Rows as Linux writes them (proc(5)): near end, far end, state, bytes to send : bytes to read. 0x1F90 is 8080.
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C001 01 00000000:00000100 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   2: 0100007F:C001 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1
   3: 0100007F:1F90 0100007F:C002 08 00000000:00000001 00:00000000 00000000     0        0 4 1 0 20 4 30 10 -1
   4: 0100007F:1F90 0100007F:C003 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0
   5: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:C004 03 00000000:00000000 00:0 0 0 0 5
"""


@pytest.fixture
def stream(deployment: Deployment) -> Iterator[Prompt]:
    return PromptPool(deployment, deployment.folder / "target", "secret").stream("tuning")


def test_the_kernels_table_by_hand() -> None:
    calls = calls_at(0x1F90, TABLE)
    assert calls == [Call(0xC001, "01", 256), Call(0xC002, "08", 1), Call(0xC004, "03", 0)]
    assert calls_at(80, TABLE) == [] == calls_at(0x1F90, "")
    assert strangers(calls, set()) == calls
    # Ours are closed from our side: an open one has been taken over, and so has one that is full.
    assert strangers(calls, {0xC001, 0xC002, 0xC004}) == [calls[0]]
    assert strangers([Call(0xC002, "08", 4096)], {0xC002}) == []
    assert strangers([Call(0xC002, "08", 4097)], {0xC002}) == [Call(0xC002, "08", 4097)]


def test_our_own_requests_are_no_strangers(engine) -> None:
    server = engine()
    for _ in range(3):
        server.client.generate([1, 2, 3], max_new_tokens=4)
        server.freeze()
        require_uncalled(server)
        server.thaw()


@pytest.mark.parametrize("closed", [False, True])
def test_a_flood_at_a_stopped_engine_is_seen(engine, closed: bool) -> None:
    server = engine()
    server.freeze()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        if closed:
            stranger.close()
        with pytest.raises(LimitExceeded, match="1 connections of a stranger wait at the stock engine of aa"):
            require_uncalled(server)


def test_a_candidate_that_floods_the_base_is_rejected(engine, stream) -> None:
    """Without this, forty thousand cheap requests for the base to work off made an unchanged engine seven times as fast."""
    base, candidate = engine(commit="aa", round_s=0.01), engine(commit="bb", round_s=0.01)
    opened = []

    def call(event: PairEvent) -> None:
        opened.append(socket.create_connection(("127.0.0.1", base.port)))
        opened[-1].sendall(b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)

    settings = MeasurementSettings(max_pairs=4, min_pairs=4)
    try:
        with pytest.raises(CandidateFailed, match="of a stranger wait at the stock engine of aa") as caught:
            compare(base, candidate, stream, settings, 0.02, regime=REGIME, on_pair=call)
    finally:
        for connection in opened:
            connection.close()
    assert caught.value.reason is Reason.resource_limit


def test_no_figures_where_a_stranger_called(engine, stream) -> None:
    servers = [("ar", engine(commit="aa")), ("stock", engine(commit="bb"))]
    prompts = [next(stream) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", servers[0][1].port)):
        time.sleep(0.05)
        with pytest.raises(LimitExceeded, match="of a stranger wait at the stock engine of aa"):
            measure_variants(servers, prompts, settings=MeasurementSettings(), regime=REGIME)
