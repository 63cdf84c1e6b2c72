"""Engine processes: started, identified, frozen, stopped, and what is said when that fails."""

from __future__ import annotations

import os
import socket
import time

import psutil
import pytest

from specpilot.contracts import Reason
from specpilot.errors import EnvironmentProblem
from specpilot.evaluation.errors import (
    CandidateFailed,
    EngineCrash,
    EngineTimeout,
    LimitExceeded,
    StartFailed,
    WrongIdentity,
    blame_candidate,
)
from specpilot.evaluation.server import check_identity, free_port, port_is_free
from specpilot.sandbox import MIB, Limits

PROMPT = list(range(30))


def test_start_serve_stop(make_engine) -> None:
    recorded = []
    server = make_engine(commit="abc", options={"recorder": lambda *words: recorded.append(words)})
    with server:
        assert server.client.generate(PROMPT, max_new_tokens=5).output_ids
        assert server.identity["commit"] == "abc" and server.identity["variant"] == "stock"
        assert 0 < server.startup_s < 20
        pid = server.child.pid
        assert [words[0] for words in recorded] == [pid]
        assert not port_is_free(server.port)
    assert not psutil.pid_exists(pid) and port_is_free(server.port)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.client
    server.stop()


def test_a_dead_start_gives_the_logs_tail(make_engine) -> None:
    server = make_engine(fail_start="no weights here")
    with pytest.raises(StartFailed, match="no weights here") as caught:
        server.start()
    assert caught.value.reason is Reason.start_failed
    with pytest.raises(RuntimeError):
        _ = server.child


def test_never_ready_meets_the_deadline(make_engine) -> None:
    server = make_engine(never_ready=True)
    server.spec = server.spec.model_copy(
        update={"readiness": server.spec.readiness.model_copy(update={"timeout_s": 0.5})}
    )
    began = time.monotonic()
    with pytest.raises(StartFailed, match="not ready after"):
        server.start()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"claim_commit": "bb"}, "commit is 'bb', expected 'aa'"),
        ({"claim_variant": "ar"}, "variant is 'ar', expected 'stock'"),
        ({"claim_target_sha256": "00"}, "target sha256 is '00'"),
        ({"claim_drafter_sha256": "00"}, "drafter sha256 is '00'"),
    ],
)
def test_wrong_identity_is_refused_and_stopped(make_engine, how: dict, words: str) -> None:
    server = make_engine(**how)
    with pytest.raises(WrongIdentity, match=words):
        server.start()
    assert port_is_free(server.port)


def test_identity_needs_the_drafter_only_where_it_drafts(resolved) -> None:
    info = {
        "commit": "aa",
        "variant": "ar",
        "target": {"sha256": resolved.target_sha256},
        "drafter": {"method": "none"},
    }
    check_identity(info, "aa", "ar", resolved)
    with pytest.raises(WrongIdentity, match="drafter"):
        check_identity(info | {"variant": "final"}, "aa", "final", resolved)
    with pytest.raises(WrongIdentity, match="target"):
        check_identity({"commit": "aa", "variant": "ar", "target": "x"}, "aa", "ar", resolved)


def test_swapped_slots_are_detected(engine) -> None:
    base, candidate = engine(commit="aa"), engine(commit="bb")
    # Both run; the ports get swapped behind our back: each must be unmasked by what it states.
    for server, other in ((base, candidate), (candidate, base)):
        with pytest.raises(WrongIdentity, match="commit"):
            check_identity(other.client.server_info(), server.commit, server.variant, server.models)


def test_a_given_port_in_use_is_said_so(make_engine) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = make_engine(options={"port": holder.getsockname()[1]})
        with pytest.raises(EnvironmentProblem, match="in use"):
            server.start()


def test_a_free_port_lost_in_a_race_is_tried_again(make_engine, monkeypatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = iter([holder.getsockname()[1], free_port()])
        monkeypatch.setattr("specpilot.evaluation.server.free_port", lambda: next(ports))
        with make_engine() as server:
            assert server.port != holder.getsockname()[1]
            assert server.client.healthy()


def test_frozen_uses_no_cpu_and_gives_no_answer(engine) -> None:
    server = engine(idle_burn=True, options={"request_timeout_s": 2.0})
    client = server.client
    server.freeze()
    before = server.cpu_seconds()
    with pytest.raises(EngineTimeout):
        client.generate(PROMPT, max_new_tokens=4)
    assert server.cpu_seconds() == before > 0
    with pytest.raises(RuntimeError, match="frozen"):
        _ = server.client
    with server.active():
        time.sleep(0.1)
        assert server.client.generate(PROMPT, max_new_tokens=4).output_ids
    assert server.frozen and server.cpu_seconds() > before


def test_cpu_time_of_children_that_have_ended_counts(make_engine) -> None:
    """Else a candidate could burn time in them, have it taken for a stranger's, and so have its bad pairs measured again."""
    server = make_engine()
    code = (server.tree / "fake_server.py").read_text()
    burner = (
        'if __name__ == "__main__":\n'
        "    import subprocess\n"
        '    burn = "import time; end = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"\n'
        "    subprocess.run([sys.executable, '-S', '-c', burn], check=True)\n"
    )
    (server.tree / "fake_server.py").write_text(code.replace('if __name__ == "__main__":\n', burner))
    with server:
        assert server.cpu_seconds() >= 0.5


def test_a_long_lie_about_identity_is_cut(resolved) -> None:
    info = {"commit": "x" * 100_000, "variant": "ar", "target": {"sha256": resolved.target_sha256}}
    with pytest.raises(WrongIdentity) as caught:
        check_identity(info, "aa", "ar", resolved)
    assert len(caught.value.message) < 400


def test_a_frozen_engine_can_be_stopped(make_engine) -> None:
    server = make_engine()
    server.start()
    pid = server.child.pid
    server.freeze()
    server.stop()
    assert not psutil.pid_exists(pid) and not server.frozen


def test_death_in_mid_request_is_a_crash_with_its_log(engine) -> None:
    server = engine(die_after_requests=1)
    server.client.generate(PROMPT, max_new_tokens=4)
    with pytest.raises(EngineCrash, match="died .status 9"):
        server.client.generate(PROMPT, max_new_tokens=4)


def test_memory_limit_is_named(make_engine) -> None:
    server = make_engine(allocate_mb=200, start_delay_s=0.0, options={"limits": Limits(memory_bytes=60 * MIB)})
    with pytest.raises((LimitExceeded, CandidateFailed), match="memory") as caught, server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)
            server.client.generate(PROMPT, max_new_tokens=2)
    assert caught.value.reason is Reason.resource_limit


def test_no_secret_reaches_the_engine(engine, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = engine()
    environment = psutil.Process(server.child.pid).environ()
    assert "OPENAI_API_KEY" not in environment and environment["SPECPILOT_COMMIT"] == "aa"
    assert os.environ["OPENAI_API_KEY"] == "sk-secret"


def test_blame_turns_engine_errors_into_verdicts_and_nothing_else() -> None:
    with pytest.raises(CandidateFailed, match="start-failed") as caught, blame_candidate():
        raise StartFailed("it broke", "hint")
    assert caught.value.reason is Reason.start_failed and caught.value.detail == "it broke"
    with pytest.raises(OSError), blame_candidate():
        raise OSError("disk")
