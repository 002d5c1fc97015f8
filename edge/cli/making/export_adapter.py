"""`edge export-adapter`: a LoRA adapter for exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import print_json


@o.command
def export_adapter(
    model: o.ModelArgument,
    lora: Annotated[str, typer.Argument(help="The adapter in GGUF, FILE or FILE:SCALE.", show_default=False)],
    bundle: Annotated[Path, o.flag("--for", help="What edge export made of the model, with --lora-rank.")],
    output: Annotated[Path, o.output("The file to write.")],
    force: Annotated[bool, o.flag("--force", help="Replace an older file.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Export a LoRA adapter for apps and pages of a model: one bundle, many adapters.

    Several adapters with commas between, as for edge run --lora, become one.
    """
    from edge.apps.sections.adapter_file import export_adapter as make

    made = make(model, lora, bundle, output, force=force)
    if json:
        print_json(made)
    elif not quiet:
        print(f"{made['file']}: rank {made['rank']}, {format_bytes(made['bytes'])}")
