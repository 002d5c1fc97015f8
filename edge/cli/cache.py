"""`edge cache`: lists and empties the cache folder, and installs images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.help import Group
from edge.cli.terminal.show import note, print_json, table
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.storage.cache import Entry, EntryKind

_HISTORY = "history"  # of runs: one file, without a completion record

cache = typer.Typer(cls=Group, help="Look into the cache folder, or empty it.", invoke_without_command=True)


@cache.callback()
def show(context: typer.Context, json: o.Json = False) -> None:
    """List the contents of the cache folder, empty it, or install compiled kernels."""
    if context.invoked_subcommand is None:
        _list(json=json)


@cache.command("list")
def list_entries(json: o.Json = False) -> None:
    """List the contents of the cache folder, last used first."""
    _list(json=json)


def _list(*, json: bool) -> None:
    from edge.run.history import history_size
    from edge.storage.cache import cache_folder, cache_limit, entries

    found, folder, limit = entries(), str(cache_folder()), cache_limit()
    total, (runs, size) = sum(entry.bytes for entry in found), history_size()
    if json:
        rows = [
            {**asdict(entry), "path": str(entry.path), "last_used": _moment(entry.last_used).isoformat()}
            for entry in found
        ]
        print_json(
            {
                "folder": folder,
                "total": total,
                "limit": limit,
                "entries": rows,
                "history": {"runs": runs, "bytes": size},
            }
        )
        return
    if found:
        print(table(["kind", "about", "last used", "entries", "size"], _rows(found), left=3))
    print(f"{folder}: {format_bytes(total)} of at most {format_bytes(limit)}")
    if runs:
        print(
            f"history of {runs} {'run' if runs == 1 else 'runs'}, from which others are predicted: {format_bytes(size)}"
        )


@cache.command()
def clear(
    kind: Annotated[
        str | None,
        o.flag(
            "--kind",
            help="Only models, weights, kernels, hashes, tokenizers, templates, trials, headers, races, traces, "
            "searches, losses or history (default: all).",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Empty the cache folder, whose files are made again when needed, and delete the history of runs.

    A device without a compiler cannot make its kernels again: there they stay, unless --kind=kernels says so.
    """
    from edge.backends.tvm.compiler.compiled import is_installed
    from edge.run.history import clear_history
    from edge.storage.cache import ENTRY_KINDS, entries
    from edge.storage.cache import clear as remove

    kinds = [] if kind == _HISTORY else ENTRY_KINDS if kind is None else [_kind(kind)]
    kept = len(entries("kernels")) if kind is None and not is_installed() else 0
    removed = [remove(each) for each in kinds if not (kept and each == "kernels")]
    count, freed = (sum(each) for each in zip((0, 0), *removed, strict=True))
    if kept:
        note(f"{kept} kept: kernels, which cannot be made here again without a compiler (--kind=kernels removes them)")
    if kind in (None, _HISTORY):
        runs, size = clear_history()
        count, freed = count + (runs > 0), freed + size
    if json:
        print_json({"removed": count, "bytes": freed})
    else:
        print(f"removed {count} {'entry' if count == 1 else 'entries'}, {format_bytes(freed)}")


@cache.command()
def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What edge compile made for this device.")],
    json: o.Json = False,
) -> None:
    """Install kernels from edge compile: this device then needs no compiler for that model.

    They are machine code, and run as you from then on: add only what you made, or what comes from those you trust.
    """
    from edge.backends.tvm.export import add as take
    from edge.backends.tvm.targets import choose_target

    design, isa = take(folder), choose_target().name
    if json:
        print_json({"isa": design.target.name, "kv_dtype": design.kv_dtype})
        return
    print(f"added: {design.shape.layers} layers, {design.kv_dtype} KV, {design.target.name}")
    if design.target.name != isa:
        print(f"this CPU has {isa}, which is better: EDGE_ISA={design.target.name} selects the added image")


def _rows(found: Sequence[Entry]) -> list[list[str]]:
    """Entries of one kind about the same thing in a row. A file of the cache itself goes by its model's name."""
    names = {entry.path.name: entry.about for entry in found if entry.kind == "models"}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        *before, file = entry.about.split(" ")
        groups.setdefault((entry.kind, " ".join([*before, names.get(file, file)])), []).append(entry)
    return [
        [kind, about, _moment(those[0].last_used).astimezone().strftime("%Y-%m-%d %H:%M"), f"{len(those):,}",
         format_bytes(sum(entry.bytes for entry in those))] for (kind, about), those in groups.items()
    ]  # fmt: skip


def _kind(name: str) -> EntryKind:
    """Raises InputError."""
    from edge.storage.cache import ENTRY_KINDS

    for kind in ENTRY_KINDS:
        if kind == name:
            return kind
    raise InputError(f"unknown kind {name!r}: choose {', '.join((*ENTRY_KINDS, _HISTORY))}")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
