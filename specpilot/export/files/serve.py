"""Serve one variant in the foreground: `serve.py VARIANT PORT [--host HOST]`."""

from __future__ import annotations

import argparse
import os
import socket

import layout  # type: ignore[import-not-found]


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
    print(f"serving {options.variant} on http://{options.host}:{options.port} (Ctrl-C ends it)", flush=True)
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


if __name__ == "__main__":
    main()
