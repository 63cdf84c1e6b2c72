"""`specpilot memory ...`: the commands live in `specpilot.memory.cli`; this only passes the arguments on."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command group. It is loaded when used: the store's libraries take a third of a second."""
    app.command(
        "memory",
        help="Mechanisms that earlier runs verified or refuted; `specpilot memory --help` lists the commands.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(memory)


def memory(context: typer.Context) -> None:
    """Pass everything on."""
    from specpilot.loop.replay import LoopReplay
    from specpilot.memory.cli import make_app

    make_app(LoopReplay())(args=list(context.args), prog_name="specpilot memory")
