"""`edge pull`: downloads a model by its name, if it fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import ProgressLine, note, print_json, progress
from edge.errors import DownloadError, InputError
from edge.options import Options

_EVENT_S = 1.0  # between two events of progress


@o.command
def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name such as qwen3:0.6b, hf.co/USER/REPO or hf.co/USER/REPO:Q4_K_M."),
    ],
    quant: Annotated[
        str | None, o.flag("--quant", help="Such as Q4_K_M (default: the best from 8 to 4 bits whose plan fits).")
    ] = None,
    convert: Annotated[
        str | None,
        o.flag("--convert", help="Convert the repository's safetensors to GGUF, in this type (q4_0, q8_0 …)."),
    ] = None,
    device: Annotated[
        str, o.flag("--device", help="The device that it is to fit, by its name in edge devices list.")
    ] = "host",
    *,
    options: Annotated[Options, o.only("memory", "backend", "kv_policy", "kv_dtype", "max_kv_size", "threads")],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Download a model from the Hugging Face Hub, once its header shows that a plan fits.

    \b
      edge pull qwen3:0.6b
      edge pull hf.co/unsloth/gemma-3-270m-it-GGUF --memory 512MiB
      edge pull Qwen/Qwen3-4B-GGUF --quant Q4_K_M --device raspberry-pi-5
      edge pull LiquidAI/LFM2-350M --convert q4_0

    Interrupted, it goes on from where it was. With --json, one object a line says what happens.
    """
    from edge.pulling import offer, take

    if convert is not None:
        _pull_checkpoint(model, convert, quant, json=json, quiet=quiet)
        return
    with _names_of_models_here():
        chosen = offer(model, options, quant=quant, device=device)
    was_here = chosen.is_here
    if json:
        plan = {"predicted_peak": chosen.plan.predicted_peak, "limit": chosen.plan.limit}
        print_json({"event": "chosen", **chosen.about(), "plan": plan})
    elif not quiet:
        note(str(chosen))
    with progress(enabled=not (quiet or json)) as shown:
        tell = _events() if json else transfer(shown, chosen.file.path)
        path = take(chosen, progress=tell, notice=note if not (quiet or json) else lambda line: None)
    if json:
        print_json({"event": "done", "path": str(path), "downloaded": not was_here})
    else:
        print(path)


def _pull_checkpoint(model: str, kind: str, quant: str | None, *, json: bool, quiet: bool) -> None:
    from edge.converters.hub_checkpoint import pull_checkpoint

    if quant is not None:
        raise InputError("--quant chooses a GGUF file, and --convert makes one: state one of them")
    with _names_of_models_here(), progress(enabled=not (quiet or json)) as shown:
        tell = _events() if json else transfer(shown, model)
        path = pull_checkpoint(model, kind, progress=tell, notice=note if not (quiet or json) else lambda line: None)
    if json:
        print_json({"event": "done", "path": str(path)})
    else:
        print(path)


def fetch_missing(model: str, options: Options, shown: ProgressLine, *, quiet: bool) -> None:
    """Download MODEL if it is on the Hub and not here. Raises as `edge.pulling.ensure`."""
    from edge.model.catalog import find_local

    if find_local(model) is None:
        from edge.pulling import ensure

        with _names_of_models_here():
            ensure(model, options, progress=transfer(shown, model), notice=(lambda line: None) if quiet else note)
        shown.clear()


@contextmanager
def _names_of_models_here() -> Iterator[None]:
    """Without a connection, the error names the models that need none."""
    try:
        yield
    except DownloadError as error:
        if error.reached:
            raise
        from edge.inventory import models

        here = ", ".join(each.name for each in models() if each.summary.engines) or "none"
        raise DownloadError(f"{error}; models here: {here}", reached=False) from None


def transfer(shown: ProgressLine, name: str) -> Callable[[int, int], None]:
    """Draws bytes and their rate."""
    started, first = time.monotonic(), -1

    def tell(done: int, total: int) -> None:
        nonlocal first
        first = done if first < 0 else first
        rate = (done - first) / max(time.monotonic() - started, 1e-3)
        label = f"{name}: {format_bytes(done)} of {format_bytes(total)}, {format_bytes(round(rate))}/s"
        shown.step(label)(float(done), float(total))

    return tell


def _events() -> Callable[[int, int], None]:
    """Prints an object every second."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVENT_S:
            last = time.monotonic()
            event: dict[str, Any] = {"event": "progress", "bytes": done, "of": total}
            print_json(event)

    return tell
