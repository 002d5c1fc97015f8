"""`edge pull`: downloads a model by its name, if it fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.cli import options as o
from edge.cli.terminal.fetching import names_of_models_here, transfer
from edge.cli.terminal.show import note, print_json, progress
from edge.errors import EdgeError, InputError
from edge.options import Options

_EVENT_S = 1.0  # between two events of progress
_OF_DRAFTERS = "q8_0"  # the type in which they are kept


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
    options: Annotated[
        Options, o.only("memory", "backend", "kv_policy", "kv_dtype", "max_kv_size", "threads", "mmproj")
    ],
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Download a model from the Hugging Face Hub, once its header shows that a plan fits.

    \b
      edge pull qwen3:0.6b
      edge pull hf.co/unsloth/gemma-3-270m-it-GGUF --memory 512MiB
      edge pull Qwen/Qwen3-4B-GGUF --quant Q4_K_M --device raspberry-pi-5
      edge pull LiquidAI/LFM2-350M --convert q4_0

    Interrupted, it goes on from where it was. Gemma 4, and Qwen3 of 1.7B and 4B, come with a drafter, and a line names
    that for --draft. With --json, one object a line says what happens.
    """
    from edge.pulling import offer, take, take_encoder

    if convert is not None:
        _pull_checkpoint(model, convert, quant, json=json, quiet=quiet)
        return
    with names_of_models_here():
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
        encoder = take_encoder(
            chosen, options, progress=tell, notice=note if not (quiet or json) else lambda line: None
        )
    drafter = _pull_drafter(chosen.repository.name, path, json=json, quiet=quiet)
    if json:
        draft = {} if drafter is None else {"drafter": str(drafter)}
        draft |= {} if encoder is None else {"mmproj": str(encoder)}
        print_json({"event": "done", "path": str(path), "downloaded": not was_here, **draft})
    else:
        print(path)


def _pull_drafter(repository: str, model: Path, *, json: bool, quiet: bool) -> Path | None:
    """Download and convert the drafter of a repository's models, if there is one. model: the file of one of them. A
    failure leaves it out."""
    from edge.converters.hub_checkpoint import pull_checkpoint
    from edge.model.names.known import drafter_of

    name, tell = drafter_of(repository), note if not (quiet or json) else lambda line: None
    if not name:
        return None
    try:
        with progress(enabled=not (quiet or json)) as shown:
            path = pull_checkpoint(name, _OF_DRAFTERS, base=model, progress=transfer(shown, name), notice=tell)
    except EdgeError as error:
        tell(f"without its drafter: {error}")
        return None
    tell(f"its drafter: --draft {path}")
    return path


def _pull_checkpoint(model: str, kind: str, quant: str | None, *, json: bool, quiet: bool) -> None:
    from edge.converters.hub_checkpoint import pull_checkpoint

    if quant is not None:
        raise InputError("--quant chooses a GGUF file, and --convert makes one: state one of them")
    with names_of_models_here(), progress(enabled=not (quiet or json)) as shown:
        tell = _events() if json else transfer(shown, model)
        path = pull_checkpoint(model, kind, progress=tell, notice=note if not (quiet or json) else lambda line: None)
    if json:
        print_json({"event": "done", "path": str(path)})
    else:
        print(path)


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
