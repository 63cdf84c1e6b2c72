"""The server process: options, models, HTTP, and an orderly end.

Exit codes: 0 after SIGTERM or SIGINT, 1 after either if the engine thread had ended before, 2 for options or checkpoints that cannot be
served, 3 for an address that cannot be bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as HttpError

from slim_engine.agreement import checked
from slim_engine.errors import RequestError, SlimError
from slim_engine.identity import Identity
from slim_engine.loading import EngineOptions, load
from slim_engine.routes_native import native_routes
from slim_engine.routes_openai import openai_routes
from slim_engine.scheduler import EngineThread, Scheduler
from slim_engine.service import EngineFault, Service
from slim_engine.text import TextCodec


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        listener = _bind(args.host, args.port)
    except OSError as error:
        print(
            f"slim: cannot listen on {args.host}:{args.port}: {error.strerror or error}; choose another --port",
            file=sys.stderr,
        )
        return 3
    options = EngineOptions(
        args.target, args.drafter, args.compute, not args.no_speculation, args.max_len, args.max_requests
    )
    thread = EngineThread(lambda: Scheduler(load(checked(options))), args.threads)
    try:
        scheduler = thread.start()
        service = Service(
            thread,
            scheduler.loaded,
            TextCodec(options.target),
            Identity(scheduler.loaded, args.variant, thread.threads),
            args.name or options.target.name,
        )
    except SlimError as error:
        print(f"slim: {error}", file=sys.stderr)
        listener.close()
        thread.stop()
        return 2
    except BaseException:
        listener.close()
        raise
    print(
        f"slim: {service.model_name} ({options.method}) on http://{args.host}:{listener.getsockname()[1]}", flush=True
    )
    try:
        asyncio.run(_serve(build_app(service), listener, thread))
    finally:
        thread.stop()
    return 1 if thread.broken else 0


def build_app(service: Service) -> FastAPI:
    """The HTTP application: both APIs, errors as JSON."""
    app = FastAPI(title="slim", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(native_routes(service))
    app.include_router(openai_routes(service))

    @app.exception_handler(RequestError)
    async def bad_request(_: HttpRequest, error: RequestError) -> JSONResponse:
        return _error(400, str(error), "invalid_request_error")

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors()]
        return _error(400, "; ".join(problems), "invalid_request_error")

    @app.exception_handler(HttpError)
    async def no_such_route(http: HttpRequest, error: HttpError) -> JSONResponse:
        return _error(error.status_code, f"{http.method} {http.url.path}: {error.detail}", "invalid_request_error")

    @app.exception_handler(EngineFault)
    async def fault(_: HttpRequest, error: EngineFault) -> JSONResponse:
        return _error(500 if service.thread.alive else 503, str(error), "server_error")

    @app.exception_handler(Exception)
    async def defect(_: HttpRequest, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {error}", "server_error")

    return app


class _Uvicorn(uvicorn.Server):
    """uvicorn, with the signals left to `_serve`: its own handling ends the process by the signal, which hides the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, listener: socket.socket, thread: EngineThread) -> None:
    server = _Uvicorn(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off")
    )
    loop = asyncio.get_running_loop()

    def end() -> None:
        thread.halt()  # running streams end with an abort, so that uvicorn has no connection to cut
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await server.serve(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port before the models are loaded, so that a clash is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _error(status: int, message: str, kind: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status_code=status
    )


class _Parser(argparse.ArgumentParser):
    """argparse, with wrong options told in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slim: {message}; --help lists the options\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535; 0: any free one)")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m slim_engine.server", description="Serve a target with a block drafter on the CPU."
    )
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder of the target")
    parser.add_argument("--drafter", default="none", help="checkpoint folder of a DFlash drafter, `ngram` or `none`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument(
        "--no-speculation", action="store_true", help="decode autoregressively; the drafter is not loaded"
    )
    parser.add_argument(
        "--compute", choices=["float32", "bfloat16"], default="float32", help="arithmetic of the weight products"
    )
    parser.add_argument("--threads", type=_positive, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--max-requests", type=_positive, default=8, help="requests decoded at once; more wait")
    parser.add_argument("--max-len", type=_positive, default=2048, help="prompt plus new tokens of one request")
    parser.add_argument("--variant", default="unnamed", help="name shown in /server_info")
    parser.add_argument(
        "--name", default=None, help="model name of the OpenAI endpoints (default: the target folder's name)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
