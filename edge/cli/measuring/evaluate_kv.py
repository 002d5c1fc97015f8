"""`edge eval kv`: the loss of quality through small KV caches, by policy, size and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edge.cli import options as o
from edge.cli.options import parse_numbers
from edge.cli.terminal.show import progress, width
from edge.errors import InputError
from edge.options import Options

if TYPE_CHECKING:
    from edge.lab.quality.material import Document
    from edge.lab.quality.matrix import Cell
    from edge.model.structure.spec import ModelSpec

_BYTES = 512 * 2  # without any size: 512 rows in f16, per value of a row


@o.command
def kv(
    model: o.ModelArgument,
    text: Annotated[list[Path], o.flag("--text", help="A long UTF-8 text file; may be repeated.")],
    policies: Annotated[
        str | None, o.flag("--policies", help="KV policies with commas between, auto among them (default: all).")
    ] = None,
    kv_memory: Annotated[
        str | None,
        o.flag("--kv-memory", help="Sizes of the cache, such as 6MiB,12MiB (default: that of 512 rows in f16)."),
    ] = None,
    max_kv_size: Annotated[str | None, o.flag("--max-kv-size", help="Or its rows, such as 256,512.")] = None,
    kv_dtype: Annotated[
        str | None, o.flag("--kv-dtype", help="Dtypes of rows, such as f16,int8 (default: the engine's own).")
    ] = None,
    tasks: Annotated[
        str | None, o.flag("--tasks", help="What to measure: perplexity, retrieval, repeat (default: these), kl.")
    ] = None,
    tokens: Annotated[
        int | None, o.flag("--tokens", min=1, help="Tokens of each text, for perplexity (default: 4000, or all).")
    ] = None,
    trials: Annotated[int, o.flag("--trials", min=1, max=10_000, help="Keys to find, for retrieval.")] = 20,
    length: Annotated[
        int | None, o.flag("--length", min=1, help="Tokens that a key is hidden in (default: 2048).")
    ] = None,
    prefill_step_size: Annotated[
        int | None,
        o.flag(
            "--prefill-step-size",
            min=1,
            help="Tokens run at once, and so evicted for (default: 64, or fewer in a small cache).",
        ),
    ] = None,
    *,
    options: Annotated[Options, o.only("sinks", "backend", "threads")],
    seed: Annotated[int, o.flag("--seed", min=0, help="Of the keys, and where they lie.")] = 0,
    output: Annotated[Path | None, o.flag("-o", "--output", help="Write a report there: .html, .md or .json.")] = None,
    resume: Annotated[
        bool, o.flag("--resume", help="Go on with OUTPUT.jsonl, where an interrupted run left its figures.")
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Quality of the KV cache: policies × sizes × dtypes against the full cache.

    Perplexity of long texts streamed through each cache, retrieval of digits, perplexity of a segment that comes again.
    """
    if output is not None:
        from edge.lab.report.document import check_place

        check_place(output)
    if resume and output is None:
        raise InputError("--resume goes with -o FILE: figures are kept beside it")
    from edge.backends import find_backend
    from edge.devices.output import write_whole
    from edge.lab.quality.material import Amounts, Setup, make_material, possible_tasks, settings_of
    from edge.lab.quality.matrix import open_journal, run_matrix
    from edge.lab.quality.summary import make_rows, to_json
    from edge.lab.report.document import terminal
    from edge.lab.report.kv import kv_report, kv_text, reasons_of
    from edge.lab.report.page import render
    from edge.run.starting.opening import open_model

    opened = open_model(model)
    cells = _cells(opened.spec, policies, kv_memory, max_kv_size, kv_dtype)
    engine = find_backend(options.backend, opened.file, opened.spec, cells[0].kv_dtype).NAME  # the same for all cells
    setup = Setup(opened, engine, prefill_step_size, options.sinks, options.threads)
    context = opened.spec.context
    amounts = Amounts(tokens or min(Amounts.tokens, context), trials, length or min(Amounts.length, context), seed)
    documents = _read(text, setup)
    wanted = possible_tasks(context) if tasks is None else split_names(tasks, "--tasks")
    material = make_material(setup, documents, amounts, wanted)
    settings = settings_of(setup, documents, amounts)
    journal = open_journal(None if output is None else Path(f"{output}.jsonl"), settings, resume=resume)
    measured, complete = [], False
    with progress(enabled=not quiet) as shown:
        try:
            for each in run_matrix(setup, cells, material, journal, lambda label, *of: shown.step(label)(*of)):
                measured.append(each)
            complete = True
        except KeyboardInterrupt:
            pass
    rows = make_rows(measured)
    if complete and len(cells) > 1 and not any(row.figures for row in rows[1:]):
        raise InputError(f"nothing was measured besides the full cache: {'; '.join(reasons_of(rows))}")
    if rows:
        kind, columns = ".json" if json else ".md", width()
        report, data = kv_report(rows, settings, model, complete=complete), to_json(rows, settings, complete=complete)
        if output is not None:
            write_whole(output, render(output.suffix, report if output.suffix == ".html" else kv_text(report), data))
        said = terminal(kv_text(report), columns) if columns and not json else render(kind, kv_text(report), data)
        print(said, end="", flush=True)
    if not complete:
        raise KeyboardInterrupt


def _cells(
    spec: ModelSpec, policies: str | None, kv_memory: str | None, max_kv_size: str | None, kv_dtype: str | None
) -> list[Cell]:
    from edge.budget import parse_bytes
    from edge.kv import POLICY_NAMES
    from edge.lab.quality.matrix import make_cells

    if kv_memory is not None and max_kv_size is not None:
        raise InputError("--max-kv-size and --kv-memory both say how large the KV cache is: state one")
    names = list(POLICY_NAMES) if policies is None else split_policies(policies)
    dtypes: Sequence[str | None] = [None] if kv_dtype is None else split_names(kv_dtype, "--kv-dtype")
    if max_kv_size is None:
        sizes = kv_memory or str(_BYTES * spec.kv_values_per_row)
        counts = [parse_bytes(each, "--kv-memory") for each in split_names(sizes, "--kv-memory")]
        return make_cells(names, dtypes, counts)
    return make_cells(names, dtypes, parse_numbers("--max-kv-size", max_kv_size, 1), in_rows=True)


def split_names(text: str, flag: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{flag} wants names with commas between, not {text!r}")
    return parts


def split_policies(text: str) -> list[str]:
    """`h2o,snapkv:window=16,kernel=5` has two: what follows a comma and has a `=` but no `:` is still an option."""
    names: list[str] = []
    for part in split_names(text, "--policies"):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def _read(paths: Sequence[Path], setup: Any) -> list[Document]:
    from edge.cli.terminal.prompts import read_text
    from edge.lab.quality.material import Document

    return [Document(path.name, setup.model.encode_text(read_text(path))) for path in paths]
