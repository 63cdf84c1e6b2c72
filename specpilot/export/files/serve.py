"""Serve one variant in the foreground: `serve.py VARIANT PORT [--host HOST]`.

The weights are held against their digests first. This process then becomes the engine's server; a small helper waits
beside it and says `serving` once the server answers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import layout  # type: ignore[import-not-found]

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on -> where this machine reaches them."""


def main() -> None:
    """Replaces this process by the engine's server."""
    info = layout.manifest()
    parser = argparse.ArgumentParser(
        prog="serve.sh", description="Serve this engine over HTTP (OpenAI and native API)."
    )
    parser.add_argument(
        "variant", nargs="?", default="final", help=f"one of: {', '.join(info['variants'])} (default final)"
    )
    parser.add_argument("port", nargs="?", type=int, default=30000, help="TCP port (default 30000)")
    parser.add_argument("--host", default=layout.HOST, help="address to listen on; the default is this machine only")
    options = parser.parse_args()
    if not 0 < options.port < 65536:
        layout.fail(layout.INVALID, f"{options.port} is not a TCP port", "give a number from 1 to 65535.")
    _need_port(options.host, options.port)
    command, folder, environment = layout.launch(info, options.variant, options.port, options.host)
    print(f"starting {options.variant}: checking the weights ...", flush=True)
    layout.check_weights(info)
    _announce(info, options.variant, options.host, options.port)
    os.chdir(folder)
    os.execvpe(command[0], command, environment)


def _need_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            layout.fail(layout.ENVIRONMENT, f"cannot listen on {host}:{port}: {error.strerror}", "choose another port.")


def _announce(info: dict[str, Any], variant: str, host: str, port: int) -> None:
    """A helper process that waits for this one, as the server, to answer. It is nobody's child, so it leaves no zombie."""
    server = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
        path, timeout_s = layout.readiness(variant, info)
        deadline = time.monotonic() + timeout_s
        while _alive(server):
            if _answers(ANY.get(host, host), port, path):
                print(f"serving {variant} on http://{host}:{port} (Ctrl-C ends it)", flush=True)
                break
            if time.monotonic() > deadline:
                print(f"warning: {variant} has not answered within {timeout_s:.0f} s", file=sys.stderr, flush=True)
                break
            time.sleep(0.2)
    os._exit(0)


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _answers(host: str, port: int, path: str) -> bool:
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=2)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


if __name__ == "__main__":
    main()
