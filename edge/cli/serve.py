"""`edge serve`: models for programs that speak OpenAI's protocol and others, inside the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import note, print_json
from edge.options import Options
from edge.server.settings import Settings


@o.command
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Models as edge run takes them; the first is loaded at the start.",
            show_default=False,
        ),
    ],
    *,
    answer: Annotated[o.AnswerOptions, o.only("max_tokens", max_tokens=-1)],
    settings: Settings,
    options: Annotated[Options, o.without("keep", "sinks", "prompt_cache", "prompt_cache_size")],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Answer programs over HTTP: OpenAI's protocol and others. Ctrl-C ends it.

    \b
      edge serve smollm2-135m gemma3-270m --memory 1GiB --power 5W
      curl http://127.0.0.1:8080/v1/models

    Models are loaded when they are asked for, and unloaded when another needs their memory. Budgets hold for the
    process; --time and --energy for each answer, --max-tokens for those whose requests state no limit.
    """
    try:
        from edge.server.running import run
    except ModuleNotFoundError as error:
        from edge.errors import MissingExtraError

        raise MissingExtraError(f"the package {error.name}", "serve") from None

    def ready(address: str) -> None:
        if json:
            print_json({"url": address})
        else:
            print(f"{address}  (Ctrl-C ends it)", flush=True)
        if not quiet and settings.loopback and not settings.api_key:
            note("any program on this machine may use it: --api-key limits that")

    run(models, options, replace(settings, max_tokens=answer.max_tokens), ready)
