"""`edge models`: which of today's models would run here or on another device, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edge.budget import format_bytes, format_joules
from edge.cli import options as o
from edge.cli.show import note, print_json, table
from edge.model.spec import format_count
from edge.options import Options
from edge.report.document import NONE

if TYPE_CHECKING:
    from edge.prediction.fits import Fit, Try
    from edge.prediction.predict import Guess

models = typer.Typer(help="Say which models would run on a device, and how.", invoke_without_command=True)


@models.callback()
@o.command
def show(
    context: typer.Context,
    *,
    fits: Annotated[
        bool, o.flag("--fits", help="Today's small models that fit a device and a budget, best first (estimated).")
    ] = False,
    device: Annotated[
        str, o.flag("--device", help="With --fits: a device by its name in edge devices list (default: this one).")
    ] = "host",
    tokens: Annotated[
        int | None, o.flag("--tokens", min=1, max=1 << 40, help="With --fits: of prompt and answer (default: 4096).")
    ] = None,
    options: Annotated[Options, o.only("memory", "energy", "backend", "threads")],
    json: o.Json = False,
) -> None:
    """Say which models would run on a device, and how."""
    if context.invoked_subcommand is None:
        _show_fits(options, device, tokens, json=json)


def _show_fits(options: Options, device: str, tokens: int | None, *, json: bool) -> None:
    from edge.prediction.fits import READABLE, TOKENS
    from edge.prediction.fits import fits as judge

    found = judge(options, device=device, expected_tokens=tokens)
    if json:
        print_json({"device": device, "tokens": tokens or TOKENS, "models": [asdict(each) for each in found]})
        return
    here = "this device" if device == "host" else device
    note(f"models for {here}, best first; {tokens or TOKENS} tokens of prompt and answer; all figures are estimated")
    fitting = [(each, each.best) for each in found if each.best]
    if fitting:
        print(_table(fitting, options))
    others = [each for each in found if each.best is None]
    if others:
        cells = [[each.name, format_count(each.parameters), each.reason or ""] for each in others]
        print("\n" + table(["does not run", "parameters", "because"], cells, left=3))
    note(f"order: those of at least {READABLE:g} tok/s by parameters, slower ones, those whose weights do not all fit")
    whole = [best for _, best in fitting if not best.streamed]
    for what in ("tok_s", "joules"):
        sources = dict.fromkeys(guess.source for best in whole if (guess := getattr(best, what)))
        if sources:
            note(f"{'tok/s' if what == 'tok_s' else 'joules'}: {', '.join(sources)}")
    for line in dict.fromkeys(line for best in whole for line in best.unknown):
        note(line)


def _table(fitting: Sequence[tuple[Fit, Try]], options: Options) -> str:
    energy = ["tokens for " + format_joules(options.energy)] if options.energy else []
    headings = ["model", "licence", "type", "why no better type", "parameters", "memory", "tok/s", "J/token", *energy]
    rows = []
    for fit, best in fitting:
        bought = [_figure(best.energy_tokens, ".0f")] if options.energy else []
        figures = [format_count(fit.parameters), format_bytes(best.memory or 0), _figure(best.tok_s, ".3g")]
        rows.append(
            [fit.name, fit.licence, best.type, fit.reason or "", *figures, _figure(best.joules, ".2g"), *bought]
        )
    return table(headings, rows, left=4)


def _figure(guess: Guess | None, form: str) -> str:
    return NONE if guess is None else format(guess.value, form)
