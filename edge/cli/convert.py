"""`edge convert`: a model from one format into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import print_json, progress, table
from edge.errors import InputError


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A GGUF file, or an installed model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    to: Annotated[str, o.flag("--to", help="The format: onnx.")] = "onnx",
    force: Annotated[bool, o.flag("--force", help="Replace a folder that edge convert made.")] = False,
    dry_run: Annotated[bool, o.flag("--dry-run", help="List what would be written.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Convert a model to ONNX, on the grid of its own weights."""
    from edge.converters.writers.onnx import planned_files, write_onnx
    from edge.opened import open_model

    if to != "onnx":
        raise InputError(f"--to {to!r}: choose onnx")
    opened = open_model(source)
    sizes: dict[str, int | None]
    if dry_run:
        sizes = planned_files(opened.file, opened.spec)
    else:
        with progress(enabled=not quiet) as shown:
            bar = shown.step(f"converting {opened.path.name}")
            sizes = {**write_onnx(opened.file, opened.spec, target, force=force, progress=lambda part: bar(part, 1.0))}
    if json:
        print_json({"folder": str(target), "files": sizes, "written": not dry_run})
        return
    rows = [[name, "small" if size is None else format_bytes(size)] for name, size in sizes.items()]
    print(table([f"{target}{' (not written)' if dry_run else ''}", "size"], rows))
