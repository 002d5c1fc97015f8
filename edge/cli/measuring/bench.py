"""`edge bench`: tokens per second, in the words and formats of llama-bench."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

from edge.budget import format_bytes, format_joules
from edge.cli import options as o
from edge.cli.options import parse_numbers
from edge.cli.terminal.show import print_json, progress, table
from edge.devices.power.base import certainty
from edge.options import Options

if TYPE_CHECKING:
    from edge.lab.profiling.bench import BenchRow


class Format(str, Enum):
    """Formats of `-o`."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


@o.command
def bench(
    model: o.ModelArgument,
    prompt: Annotated[str, o.flag("-p", "--n-prompt", help="Prompt lengths, comma-separated.")] = "512",
    generate: Annotated[str, o.flag("-n", "--n-gen", help="Generation lengths, comma-separated.")] = "128",
    depth: Annotated[
        str,
        o.flag("-d", "--n-depth", help="Tokens of context before the test, comma-separated."),
    ] = "0",
    repetitions: Annotated[int, o.flag("-r", "--repetitions", min=1, max=1000, help="Runs of each test.")] = 5,
    output: Annotated[Format, o.flag("-o", "--output", help="Output format.")] = Format.md,
    *,
    options: Annotated[
        Options, o.only("memory", "kv_dtype", "prefill_step_size", "backend", "lora", "threads", "prefix")
    ],
    energy: Annotated[
        bool,
        o.flag("--energy", help="Joules per token, too, labelled measured or estimated."),
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure prompt processing (pp) and token generation (tg): mean and standard deviation of tokens per second."""
    from edge.devices.power import find_meter
    from edge.errors import InputError
    from edge.lab.profiling.bench import make_tests, remember_bench, run_bench
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    tests = make_tests(parse_numbers("-p", prompt), parse_numbers("-n", generate), parse_numbers("-d", depth))
    opened = open_model(model)
    longest = max(test.rows for test in tests) + options.prefix_rows
    if longest > opened.spec.context:
        raise InputError(
            f"these tests need {longest} positions, the model knows {opened.spec.context}: lower -d, -p or -n"
        )
    meter = find_meter()
    with (
        progress(enabled=not quiet) as shown,
        load(opened, options, kv_policy="full", max_kv_size=max(longest, 256), meter=meter) as session,
    ):
        rows = []
        measured = run_bench(session, tests, repetitions, on_step=shown.message, meter=meter if energy else None)
        for test, row in zip(tests, measured, strict=True):
            rows.append(row)
            remember_bench(session, test, row)
            if output is Format.jsonl and not json:
                shown.clear()
                print_json(row.to_dict())
    _print(rows, Format.json if json else output)


def _print(rows: list[BenchRow], output: Format) -> None:
    if output is Format.md:
        headings = ["model", "size", "params", "backend", "threads", "test", "tok/s"]
        if rows[0].joules is not None:
            headings.append(f"energy/token ({certainty(rows[0].energy_kind)})")
        print(table(headings, [_cells(row) for row in rows]))
        for row in rows:
            if row.team and row.team.why:
                print(f"{row.test}: {row.team}")
    elif output is Format.json:
        print_json([row.to_dict() for row in rows], indent=2)
    elif output is Format.csv:
        _write_csv(row.to_dict() for row in rows)


def _cells(row: BenchRow) -> list[str]:
    from edge.model.structure.spec import format_count

    size, params = format_bytes(row.size), format_count(row.params)
    energy = [] if row.joules is None else [format_joules(row.joules)]
    return [
        row.model,
        size,
        params,
        row.backend,
        str(row.threads),
        row.test,
        f"{row.speed:,.2f} ± {row.sd:,.2f}",
        *energy,
    ]


def _write_csv(rows: Iterable[dict[str, Any]]) -> None:
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(sys.stdout, fieldnames=list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
