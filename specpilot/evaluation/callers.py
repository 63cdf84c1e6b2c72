"""Who is connected to an engine: nobody but the evaluator has any business there.

Candidates share the machine's network, also inside bubblewrap. A stopped engine's connections fill with a stranger's requests,
which it must work off when it goes on, just while it is timed. Reads the kernel's table of connections; nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from specpilot.evaluation.errors import LimitExceeded
from specpilot.evaluation.server import EngineServer

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED, TIME_WAIT, LISTENING = "01", "06", "0A"

UNREAD_BYTES = 4096
"""Bytes that a closed connection of ours may have left unread: a readiness request that an engine was too slow to answer."""


@dataclass(frozen=True)
class Call:
    """One connection at a listening port."""

    peer: int
    """The caller's port."""
    state: str
    """The kernel's two hexadecimal digits."""
    unread: int
    """Bytes that the server has not read yet."""


def calls_at(port: int, table: str) -> list[Call]:
    """Connections whose near end is `port`, in a table of the form of `/proc/net/tcp`; ended and listening sockets are left out."""
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 5 or words[3] in (TIME_WAIT, LISTENING):
            continue
        near, far = (int(end.rpartition(":")[2], 16) for end in words[1:3])
        if near == port:
            found.append(Call(far, words[3], int(words[4].rpartition(":")[2], 16)))
    return found


def strangers(calls: list[Call], ours: Set[int]) -> list[Call]:
    """Those that are not the closed ends of our own, `ours` being the ports that we have called from."""
    return [call for call in calls if call.peer not in ours or call.state == ESTABLISHED or call.unread > UNREAD_BYTES]


def require_uncalled(idle: EngineServer) -> None:
    """Raises LimitExceeded if anybody but us is connected to this stopped engine, to which no request of ours is under way."""
    calls = [call for path in TABLES if path.is_file() for call in calls_at(idle.port, path.read_text())]
    found = strangers(calls, idle.called_from)
    if found:
        raise LimitExceeded(
            f"{len(found)} connections of a stranger wait at the {idle} while it is stopped, "
            f"with {sum(call.unread for call in found)} bytes to be read",
            "an engine may not talk to another",
        )
