"""`edge search`: the settings of a model on a device that no others surpass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import progress, width
from edge.options import Options


@o.command
def search(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="GGUF files or installed models with the same tokens, such as sizes of a family."
        ),
    ],
    device: Annotated[
        str, o.flag("--device", help="The device to search for, by its name in edge devices list (default: this one).")
    ] = "host",
    *,
    options: Annotated[Options, o.only("memory", "energy", "backend")],
    types: Annotated[
        str | None,
        o.flag("--types", help="Types of weights, such as q8_0,q4_0 (default: usual ones smaller than the file)."),
    ] = None,
    policies: Annotated[str, o.flag("--policies", help="KV policies that evict.")] = "streaming,h2o",
    kv_dtype: Annotated[
        str | None, o.flag("--kv-dtype", help="Dtypes of KV rows (default: f16,int8,int4, if the engine has them).")
    ] = None,
    text: Annotated[
        Path | None,
        o.flag("--text", help="What losses are measured on (default: prose, code and lists that come with edge)."),
    ] = None,
    tokens: Annotated[
        int | None,
        o.flag(
            "--tokens",
            min=32,
            help="Prompt and answer together, and so of the text (default: the text's, at most 1024).",
        ),
    ] = None,
    scheduler: Annotated[
        str | None, o.flag("--scheduler", metavar="ADDRESS", help="Measure on a Dask cluster, such as tcp://HOST:8786.")
    ] = None,
    on: Annotated[
        str | None,
        o.flag("--on", help="Where the device is, to measure the front's speed: ssh:user@host[:port], adb[:serial]."),
    ] = None,
    output: Annotated[Path | None, o.flag("-o", "--output", help="Write a report there: .html, .md or .json.")] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Find the settings that no other surpasses in loss, speed, joules and memory.

    Weight types × KV dtypes × KV policies × rows × threads, predicted first, then measured. What an interrupted search
    measured is remembered.
    """
    from edge.cli.measuring.evaluate_kv import split_names, split_policies
    from edge.devices.output import write_whole
    from edge.lab.report.document import check_place, terminal
    from edge.lab.report.page import render
    from edge.lab.report.search import search_json, search_report
    from edge.lab.searching.search import search as find

    if output is not None:
        check_place(output)
    kinds = None if types is None else split_names(types, "--types")
    dtypes = None if kv_dtype is None else split_names(kv_dtype, "--kv-dtype")
    with progress(enabled=not quiet) as shown:
        found = find(
            models, options, device=device, types=kinds, policies=split_policies(policies), kv_dtypes=dtypes,
            text=text, tokens=tokens, scheduler=scheduler, on=on, on_progress=lambda label, *of: shown.step(label)(*of),
        )  # fmt: skip
    report, data = search_report(found), search_json(found)
    if output is not None:
        write_whole(output, render(output.suffix, report, data))
    columns = width()
    said = terminal(report, columns) if columns and not json else render(".json" if json else ".md", report, data)
    print(said, end="", flush=True)
