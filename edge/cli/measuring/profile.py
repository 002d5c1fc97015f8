"""`edge profile`: measures a model on this device, and compares two such profiles."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.cli import options as o
from edge.cli.options import parse_numbers
from edge.cli.terminal.help import Command
from edge.cli.terminal.show import note, print_json, progress, width
from edge.errors import InputError
from edge.options import Options

if TYPE_CHECKING:
    from edge.lab.profiling.profile import Profile, Settings
    from edge.model.model import Model

_COMPARE = "compare"
_KIT, _PAGE = "kit:", "web:"
_CONTEXTS = (128, 512, 1024, 2048, 4096)
_QUICK_CONTEXTS = (128, 512)
_LEAST_SUSTAINED_S = 5


class _Group(typer.core.TyperGroup):
    """`edge profile MODEL` is `edge profile of MODEL`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.obj = shlex.join(["edge", "profile", *args])  # the command, for the report
        return super().parse_args(ctx, args if args[:1] == [_COMPARE] else ["of", *args])


class _Of(Command):
    """Shows its usage as users type it, without the hidden command's name."""

    def format_usage(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        formatter.write_usage(ctx.command_path.removesuffix(" of"), " ".join(self.collect_usage_pieces(ctx)))


profile = typer.Typer(
    cls=_Group, help="Measure this device with a model: speed, memory, joules, heat, and what limits it."
)

Output = Annotated[
    list[Path] | None, o.flag("-o", "--output", help="Write a report there: .html, .md or .json; may be repeated.")
]


@profile.command("of", cls=_Of)
@o.command
def of(
    context: typer.Context,
    model: o.OptionalModelArgument = None,
    output: Output = None,
    on: Annotated[
        str | None,
        o.flag(
            "--on",
            help="Measure another machine: ssh:user@host[:port], adb[:serial]; kit:DIR writes a folder for it, "
            "web:DIR a page for its browser.",
        ),
    ] = None,
    device: Annotated[
        str | None, o.flag("--device", help="With --on kit:DIR, the machine, by its name in edge devices list.")
    ] = None,
    read: Annotated[Path | None, o.flag("--read", help="Report on a kit's result.json instead of measuring.")] = None,
    force: Annotated[bool, o.flag("--force", help="With --on kit:DIR or web:DIR, replace an older folder.")] = False,
    quick: Annotated[bool, o.flag("--quick", help="Fewer and shorter measurements.")] = False,
    sustained: Annotated[
        str | None,
        o.flag("--sustained", help="Also answer for this long on each engine, such as 5m, and compare the minutes."),
    ] = None,
    power: Annotated[
        str | None, o.flag("--power", help="With --sustained, the most watts on average, such as 5W; held by pauses.")
    ] = None,
    prompt: Annotated[
        int | None, o.flag("-p", "--n-prompt", min=1, max=1 << 20, help="Tokens of the prompt (default: 512).")
    ] = None,
    generate: Annotated[
        int | None, o.flag("-n", "--n-gen", min=2, max=1 << 16, help="Tokens of the answer (default: 48).")
    ] = None,
    contexts: Annotated[
        str | None, o.flag("-d", "--n-depth", help="Contexts of the curve, such as 512,4096 (default: 128 to 4096).")
    ] = None,
    repetitions: Annotated[
        int | None, o.flag("-r", "--repetitions", min=1, max=1000, help="Prompts and answers (default: 5).")
    ] = None,
    backend: Annotated[
        str, o.flag("--backend", help="Engines, with commas between (default: all that are installed).")
    ] = "auto",
    *,
    options: Annotated[Options, o.without(*o.LIMITS, "backend", "lora", "chat_template")],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure a model on this device, or another: load, prompts, answers, contexts, operators, memory, joules, heat.

    Every engine in a process of its own, one after the other: a minute or so for all; --sustained 5m adds 5 minutes for
    each, --backend says which. Ends with what limits this device, and what to try. --power holds only the long run,
    and there is no --energy or --max-temp, which would distort the measurements. With `compare A.json B.json` instead
    of MODEL: two profiles side by side. With --on, another machine measures itself, with the cpu engine and without
    edge or Python.
    """
    from edge.lab.profiling.collect import choose_engines, collect
    from edge.lab.profiling.profile import Settings, recorded
    from edge.run.starting.opening import open_model

    writers = [_writer(path) for path in output or []]
    if read is not None:
        if o.stated(context, but=("read", "output", "json", "quiet")):
            raise InputError("--read measures nothing: leave MODEL and the options of measuring out")
        _show(_read(read), writers, json=json, quiet=quiet)
        return
    if model is None:
        raise InputError("no MODEL: give one, or --read FILE for the result of a kit")
    _check_on(on, device, backend, force=force)
    long_run, watts = _seconds(sustained), _watts(power, sustained, on)
    opened = open_model(model)
    rows = min(opened.spec.context, options.max_kv_size or opened.spec.context)
    answer = generate or max(2, min(16 if quick else 48, rows // 2))
    most = max(1, min(opened.spec.context // 2, rows - answer))  # of default contexts: it leaves room for an answer
    settings = Settings(
        prompt=prompt or min(256 if quick else 512, most),
        answer=answer,
        contexts=_contexts(contexts, most, quick=quick),
        repetitions=repetitions or (2 if quick else 5),
        speed_s=3.0 if quick else 10.0,
        curve_s=5.0 if quick else 20.0,
        sustained_s=long_run,
        operators_s=2.0 if quick else 6.0,
        watts=watts,
        **recorded(options),
    )
    _check(settings, opened.spec.context)
    if on is not None and on.startswith((_KIT, _PAGE)):
        _write_kit(opened, model, on, device, settings, quick=quick, force=force, json=json, quiet=quiet)
        return
    if on is not None:
        _show(_remotely(opened, model, on, settings, quick, context.obj, quiet), writers, json=json, quiet=quiet)
        return
    names = [] if backend == "auto" else [each.strip() for each in backend.split(",")]
    engines = choose_engines(opened, names, options.kv_dtype)
    if long_run and not quiet:
        note(_expected(engines.names, settings))
    try:
        with progress(enabled=not quiet) as shown:
            made = collect(
                opened, model, engines, settings, quick=quick, again=context.obj,
                on_step=lambda what, share: shown.step(what)(share, 1.0),
            )  # fmt: skip
    except KeyboardInterrupt:
        note("interrupted: nothing was written; --quick takes less time, and --backend fewer engines")
        raise
    _show(made, writers, json=json, quiet=quiet)


def _show(made: Profile, writers: Sequence[Callable[[Profile], None]], *, json: bool, quiet: bool) -> None:
    try:
        for write in writers:
            write(made)
    finally:  # even on a full disk, the figures are printed
        if json:
            print_json(made.to_dict())
        elif not (writers and quiet):
            from edge.lab.report.document import terminal
            from edge.lab.report.profile import profile_summary

            print(terminal(profile_summary(made), width()), end="")


def _check_on(on: str | None, device: str | None, backend: str, *, force: bool) -> None:
    """Raises InputError for options that do not go together."""
    for flag, given, places in (("--device", device is not None, (_KIT,)), ("--force", force, (_KIT, _PAGE))):
        if given and not (on or "").startswith(places):
            raise InputError(f"{flag} goes with --on {' or '.join(each + 'DIR' for each in places)}")
    if on is not None:
        from edge.lab.profiling.kit.run import check_place

        check_place(on)
        if backend not in ("auto", "cpu"):
            raise InputError(f"--backend {backend}: other machines are measured with the cpu engine, in a kit")


def _read(path: Path) -> Profile:
    from edge.lab.profiling.kit.result import profile_of, read_result

    result = read_result(path)
    return profile_of(result, "Measure in the page" if result.in_page else "./edge-profile > result.json")


def _write_kit(
    opened: Model, called: str, on: str, device: str | None, settings: Settings, *, quick: bool, force: bool,
    json: bool, quiet: bool,
) -> None:  # fmt: skip
    from edge.budget import format_bytes
    from edge.devices.profiles import HOST
    from edge.lab.profiling.kit.make import PROGRAM, make_kit
    from edge.lab.profiling.kit.page import make_page

    place, _, name = on.partition(":")
    folder, in_page = Path(name), place + ":" == _PAGE
    with progress(enabled=not quiet) as shown:
        make = make_page if in_page else partial(make_kit, device=device or HOST)
        kit = make(
            opened, called, folder, settings=settings, quick=quick, force=force,
            progress=lambda step, part: shown.step(step)(part, 1.0),
        )  # fmt: skip
    if json:
        print_json({"folder": str(folder), **asdict(kit)})
    elif not quiet:
        size = format_bytes(sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()))
        how = f"open the page of edge serve-site {folder}" if in_page else f"run ./{PROGRAM} > result.json in it"
        print(f"{folder}: {size}, {kit.model.label} for {kit.device} ({', '.join(kit.isas)})")
        print(f"{how} there, then here: edge profile --read result.json")


def _remotely(
    opened: Model, called: str, on: str, settings: Settings, quick: bool, again: str, quiet: bool
) -> Profile:  # fmt: skip
    from edge.lab.profiling.kit.result import profile_of
    from edge.lab.profiling.kit.run import profile_remotely

    with progress(enabled=not quiet) as shown:
        result = profile_remotely(
            opened, called, on, settings, quick=quick,
            on_step=lambda what, share: shown.step(what)(share, 1.0),
        )  # fmt: skip
    return profile_of(result, again)


@profile.command(_COMPARE)
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="The baseline profile.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The profile to compare with it.")],
    output: Output = None,
    json: o.Json = False,
) -> None:
    """Compare two profiles of edge profile -o FILE.json, B against A."""
    from edge.devices.output import write_whole
    from edge.lab.profiling.compare import compare_profiles
    from edge.lab.profiling.profile import read_profile
    from edge.lab.report.comparison import comparison_json, comparison_report
    from edge.lab.report.document import check_place, terminal
    from edge.lab.report.page import render

    for path in output or []:
        check_place(path)
    found = compare_profiles(read_profile(first), read_profile(second), first.stem, second.stem)
    report, data = comparison_report(found), comparison_json(found)
    for path in output or []:
        write_whole(path, render(path.suffix, report, data))
    print(render(".json", report, data) if json else terminal(report, width()), end="")


def _writer(path: Path) -> Callable[[Profile], None]:
    """A function that writes a report of the path's kind. Raises InputError now rather than after all measurements."""
    from edge.devices.output import write_whole
    from edge.lab.report.document import check_place
    from edge.lab.report.page import render
    from edge.lab.report.profile import profile_report

    check_place(path)
    return lambda made: write_whole(path, render(path.suffix, profile_report(made), made.to_dict()))


def _seconds(sustained: str | None) -> float:
    from edge.budget import parse_seconds

    seconds = 0.0 if sustained is None else parse_seconds(sustained, "--sustained")
    if sustained is not None and seconds < _LEAST_SUSTAINED_S:
        raise InputError(f"--sustained {sustained} is too short to compare its parts: at least {_LEAST_SUSTAINED_S} s")
    return seconds


def _watts(power: str | None, sustained: str | None, on: str | None) -> float | None:
    from edge.budget import parse_watts

    if power is not None and sustained is None:
        raise InputError("--power holds the long run only: add its length, such as --sustained 5m")
    if power is not None and (on or "").startswith(_PAGE):
        raise InputError("--power cannot be held in a page, which sees no watts: measure with ssh:, adb or kit:DIR")
    return None if power is None else parse_watts(power, "--power")


def _contexts(text: str | None, most: int, *, quick: bool) -> list[int]:
    """Contexts in ascending order; the defaults end at `most`."""
    if text is None:
        return [each for each in (_QUICK_CONTEXTS if quick else _CONTEXTS) if each <= most] or [most]
    return sorted(parse_numbers("-d", text, least=1))


def _check(settings: Settings, context: int) -> None:
    needed, most = settings.rows, settings.max_kv_size
    if needed > context:
        raise InputError(f"this needs {needed} positions, the model knows {context}: lower -d, -p or -n")
    if most is not None and needed > most:
        raise InputError(f"this needs {needed} KV rows: lower -d, -p or -n, or raise --max-kv-size {most}")


def _expected(engines: Sequence[str], settings: Settings) -> str:
    """The expected duration, and how to shorten it."""
    minutes = max(1, round(len(engines) * settings.engine_s / 60))
    fewer = f"; --backend {engines[0]} measures one" if len(engines) > 1 else ""
    return f"this takes about {minutes} min, one after the other: {', '.join(engines)}{fewer}"
