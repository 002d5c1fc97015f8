"""`edge models`: models on this device, their removal, and which of today's would run here or on another device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from edge.budget import format_bytes, format_joules
from edge.cli import options as o
from edge.cli.terminal.help import Group
from edge.cli.terminal.show import note, print_json, printable, progress, table
from edge.errors import InputError
from edge.lab.report.document import NONE
from edge.model.structure.spec import format_count
from edge.options import Options

if TYPE_CHECKING:
    from edge.lab.inventory import LocalModel
    from edge.lab.prediction.fits import Fit, Try
    from edge.lab.prediction.predict import Guess

_ABOUT = "List the models on this device, remove one, or say which of today's would run on a device."

_LONGEST_REASON = 80  # characters of a cell

models = typer.Typer(cls=Group, help=_ABOUT, invoke_without_command=True)


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
    options: Annotated[Options, o.only("memory", "energy", "backend", "provider", "threads")],
    json: o.Json = False,
) -> None:
    """List the models on this device, remove one, or say which of today's would run on a device."""
    if context.invoked_subcommand is not None:
        return
    if not fits and (stated := o.stated(context, but=("fits", "json"))):
        raise InputError(f"{stated} is for --fits: state that, too, or leave it out")
    if fits:
        _show_fits(options, device, tokens, json=json)
    else:
        _list(json=json)


@models.command("list")
def list_models(json: o.Json = False) -> None:
    """List models in installed packages, the Hub's cache folder and edge's own, last used first."""
    _list(json=json)


@models.command("rm")
def remove_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name or a path that edge models lists.")],
    yes: Annotated[bool, o.flag("-y", "--yes", help="Do not ask.")] = False,
    json: o.Json = False,
) -> None:
    """Remove a downloaded model, and what edge derived from it."""
    from edge.lab.inventory import find, remove

    model = find(name)
    if not yes and model.place != "package":
        if not sys.stdin.isatty():
            raise InputError(f"{model.name} is removed only with --yes: there is no terminal to ask")
        if not typer.confirm(f"Remove {model.name} ({format_bytes(model.bytes)})?", err=True):
            note("nothing was removed")
            return
    removed = remove(model)
    if json:
        files = [str(path) for path in removed.files]
        print_json({"name": removed.name, "files": files, "bytes": removed.bytes})
    else:
        print(f"removed {removed.name}: {format_bytes(removed.bytes)} freed")


def _list(*, json: bool) -> None:
    from edge.lab.inventory import models as local_models

    found = local_models()
    if json:
        print_json({"models": [_plain(each) for each in found]})
        return
    if not found:
        note("no models here: edge models --fits shows which would run, edge pull downloads one")
        return
    rows = [
        [printable(each.name), _place(each), _runs_on(each), _abilities(each), _moment(each), _kind(each),
         format_bytes(each.bytes), format_bytes(each.packed) if each.packed else NONE]
        for each in found
    ]  # fmt: skip
    print(table(["model", "where", "runs on", "can do", "last used", "what", "size", "packed"], rows, left=6))


def _plain(model: LocalModel) -> dict[str, object]:
    used = datetime.fromtimestamp(model.last_used, timezone.utc).isoformat()
    return {**asdict(model), "path": None if model.path is None else str(model.path), "last_used": used}


def _kind(model: LocalModel) -> str:
    known = model.summary
    size = format_count(known.parameters) if known.parameters else ""
    return " ".join(filter(None, [printable(known.architecture), size, known.type]))


def _place(model: LocalModel) -> str:
    return model.place if model.path else f"{model.place}, in parts"  # which the first run joins


def _runs_on(model: LocalModel) -> str:
    reason = printable(model.summary.reason or "nothing", but="")
    short = reason if len(reason) <= _LONGEST_REASON else "nothing: edge inspect says why"
    return ", ".join(model.summary.engines) or short


def _abilities(model: LocalModel) -> str:
    from edge.model.reader import HEARS

    known = model.summary
    able = (
        (["hears"] if known.architecture == HEARS else [])
        + (["chat"] if known.chat else [])
        + (["thinking"] if known.thinks else [])
    )
    return ", ".join([*able, *([f"{known.context:,} tokens"] if known.context else [])])


def _moment(model: LocalModel) -> str:
    return f"{datetime.fromtimestamp(model.last_used):%Y-%m-%d %H:%M} ({model.by})"


def _show_fits(options: Options, device: str, tokens: int | None, *, json: bool) -> None:
    from edge.devices.memory.beyond import beyond_a_run, beyond_the_first
    from edge.devices.profiles import find_profile
    from edge.plan.device import assumed_memory

    with beyond_a_run():
        from edge.lab.prediction.fits import READABLE, TOKENS
        from edge.lab.prediction.fits import fits as judge

    with progress(enabled=not json) as shown, beyond_the_first():
        found = judge(options, device=device, expected_tokens=tokens, progress=shown.step("planning models"))
    if json:
        print_json({"device": device, "tokens": tokens or TOKENS, "models": [asdict(each) for each in found]})
        return
    here = assumed_memory(find_profile(device), options)
    note(f"models for {here}, best first; {tokens or TOKENS:,} tokens of prompt and answer; all figures are estimated")
    fitting = [(each, each.best) for each in found if each.best]
    if fitting:
        print(_table(fitting, options))
    others = [each for each in found if each.best is None]
    if others:
        cells = [[each.name, format_count(each.parameters), each.why or ""] for each in others]
        print("\n" + table(["does not run", "params", "because"], cells, left=3))
    note(f"order: those of at least {READABLE:g} tok/s by parameters, slower ones, those whose weights do not all fit")
    for fit, best in fitting:
        if best.on_disk:
            stays = format_bytes(best.on_disk)
            note(f"{fit.name}: {stays} of its file stay on the disk, a table of which a token reads a row")
    whole = [best for _, best in fitting if not best.streamed]
    for what in ("tok_s", "joules"):
        speed = what == "tok_s"
        sources = dict.fromkeys(
            f"{guess.source}, {guess.known}" if speed and guess.known else guess.source
            for best in whole if (guess := getattr(best, what))
        )  # fmt: skip
        if sources:
            note(f"{'tok/s' if speed else 'joules'}: {'; '.join(sources)}")
    if lasting := [best.sustained for best in whole if best.sustained]:
        sources = dict.fromkeys(f"{each.tok_s.source}, {each.tok_s.known}" for each in lasting)
        note(f"tok/s of a long run, by which they rank: {'; '.join(sources)}")
    for line in dict.fromkeys(line for best in whole for line in best.unknown):
        note(line)


def _table(fitting: Sequence[tuple[Fit, Try]], options: Options) -> str:
    energy = ["tokens for " + format_joules(options.energy)] if options.energy else []
    throttles = any(best.sustained for _, best in fitting)
    speeds = ["tok/s", "long run tok/s"] if throttles else ["tok/s"]
    headings = ["model", "licence", "type", "why no better type", "params", "memory", *speeds, "J/token", *energy]
    rows = []
    for fit, best in fitting:
        bought = [_figure(best.energy_tokens, ".0f")] if options.energy else []
        figures = [format_count(fit.parameters), format_bytes(best.memory or 0), _figure(best.tok_s, ".3g")]
        figures += [_figure(best.ranking_tok_s, ".3g")] if throttles else []
        rows.append([fit.name, fit.licence, best.type, fit.why or "", *figures, _figure(best.joules, ".2g"), *bought])
    return table(headings, rows, left=4)


def _figure(guess: Guess | None, form: str) -> str:
    return NONE if guess is None else format(guess.value, form)
