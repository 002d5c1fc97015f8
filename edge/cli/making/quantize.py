"""`edge quantize`: a GGUF file in a smaller type, with the conventions of llama-quantize."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated

import typer

from edge.budget import format_bytes, parse_bytes
from edge.cli import options as o
from edge.cli.making.convert import run_conversion
from edge.cli.making.cost import DEVICE, NO_EVAL, CalibrationTokens, check_device, cost_json, show_cost
from edge.cli.terminal.show import note, print_json, progress, table
from edge.errors import InputError, UnsupportedError


def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help="A GGUF file, or an installed model.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    kind: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="A name of llama-quantize: q4_0, q8_0, q4_k_m … (or --target-size)."),
    ] = None,
    target_size: Annotated[
        str | None,
        o.flag("--target-size", help="Mix types to reach at most this size, such as 70MiB, instead of a TYPE."),
    ] = None,
    pure: Annotated[
        bool, o.flag("--pure", help="Use this type for all matrices, including the head: no mixture.")
    ] = False,
    no_eval: Annotated[bool, o.flag("--no-eval", help=NO_EVAL)] = False,
    device: Annotated[str | None, o.flag("--device", metavar="NAME", help=DEVICE)] = None,
    force: Annotated[bool, o.flag("--force", help="Replace OUT, if it is a GGUF file.")] = False,
    dry_run: Annotated[bool, o.flag("--dry-run", help="List the tensors and sizes, and write nothing.")] = False,
    calibration: Annotated[
        list[Path] | None,
        o.flag(
            "--calibration",
            metavar="FILE",
            help="A text for the importance matrix, beside the one that comes with edge; may be repeated.",
        ),
    ] = None,
    calibration_tokens: CalibrationTokens = 16384,
    importance: Annotated[
        bool,
        o.flag(
            "--importance",
            help="Round by an importance matrix. Types below 3 bits, --target-size and --calibration imply it.",
        ),
    ] = False,
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Round a GGUF file's weights to a smaller type.

    edge writes plain types itself; llama.cpp's own routine writes mixtures, K-quants, IQ types, and all types with
    --importance. With --target-size, edge chooses a type for each matrix by the loss that it measures, and rounds to
    it by an importance matrix.
    """
    from edge.converters.calibrate import OWN_TEXT, any_importance, check_texts, column_importance
    from edge.converters.calibrate import calibration_tokens as read_tokens
    from edge.converters.convert import Conversion
    from edge.converters.evaluate import evaluate
    from edge.converters.gguf.ggml import TRAINED, find_ftype, needs_importance, quantize_file
    from edge.converters.gguf.outcome import again_notes, has_choice, notes_on, trained_notes, type_counts
    from edge.converters.gguf.quantize import Settings
    from edge.formats.gguf import read_gguf
    from edge.formats.gguf_writer import check_gguf
    from edge.plan.checks import check_threads
    from edge.run.starting.opening import open_model

    check_threads(threads)
    check_device(device, evaluates=not no_eval and not dry_run and (json or not quiet))
    texts = [*(calibration or []), OWN_TEXT]
    check_texts(texts)

    if target_size is not None:
        stated = {f"the TYPE {kind}": kind, "--pure": pure, "--dry-run": dry_run, "--threads": threads}
        if other := next((name for name, value in stated.items() if value), None):
            raise InputError(f"--target-size mixes types as they are measured, by edge itself: leave {other} out")
        wanted = Conversion(
            "gguf", settings=Settings(method="importance"), size=parse_bytes(target_size, "--target-size"),
            evaluates=not no_eval and (json or not quiet),
        )  # fmt: skip
        open_model(source)  # no folder of Hugging Face: edge convert reads those
        run_conversion(
            source, target, wanted, texts, calibration_tokens, device=device, force=force, json=json, quiet=quiet
        )
        return
    if kind is None:
        raise InputError("state a TYPE, such as q4_k_m, or a --target-size")
    kind = find_ftype(kind)
    asked = "--calibration" if calibration else "--importance" if importance else ""
    opened = open_model(source)
    file = opened.file
    if file.folder is not None:
        raise UnsupportedError(f"{file.folder} is a model in ONNX: edge quantize reads GGUF files")
    if asked and not has_choice(file, kind):
        raise InputError(f"{asked} is of no use for {kind}, to which these weights round in one way only: leave it out")
    if target.exists() and target.samefile(file.path):
        raise InputError(f"{target} is IN: write to another file")
    if not dry_run:
        check_gguf(target, force=force)
    again = again_notes(opened.spec, kind)
    if again and not quiet:
        note(again[0])
    if kind in TRAINED and not quiet:
        note(f"{kind} is for models that were trained with such weights: others become noise")
    with progress(enabled=not quiet) as shown:
        columns = None
        if asked or needs_importance(kind):
            columns = any_importance(file.tensors)  # enough to choose types by
        if columns and not dry_run:
            reading = shown.step("calibrating")
            ids = read_tokens(opened.tokenizer, texts, calibration_tokens)
            columns = column_importance(file, opened.spec, ids, lambda part: reading(part, 1.0))
        bar = shown.step(f"quantizing {opened.name} to {kind}")
        tensors = quantize_file(
            file, target, kind, pure=pure, importance=columns, threads=threads, dry_run=dry_run,
            progress=lambda part: bar(part, 1.0),
        )  # fmt: skip
        found, unknown = None, ""
        if not dry_run and not no_eval and (json or not quiet):
            comparing = shown.step("evaluating")
            try:
                found = evaluate(file, read_gguf(target), lambda part: comparing(part, 1.0))
            except (UnsupportedError, InputError) as error:
                unknown = str(error)
    before = {name: info.type for name, info in file.tensors.items()}
    notes = [*notes_on(file, tensors, kind), *trained_notes(file, tensors)]
    total, values = sum(each.nbytes for each in tensors), sum(prod(each.shape) for each in tensors)
    size = sum(info.nbytes for info in file.tensors.values())
    if json:
        print_json({
            "file": str(target), "type": kind, "written": not dry_run, "requantized": bool(again), "bytes": total,
            "bits_per_weight": 8 * total / values, "peak_rss": _peak(),
            "tensors": [
                {"name": each.name, "shape": each.shape, "from": before[each.name], "type": each.type,
                 "bytes": each.nbytes} for each in tensors
            ],
            "notes": notes, **cost_json(found, target, device),
        })  # fmt: skip
        return
    if dry_run:
        rows = [
            [each.name, "×".join(map(str, each.shape)), before[each.name], each.type, format_bytes(each.nbytes)]
            for each in tensors
        ]
        print(table(["tensor", "shape", "from", "to", "size"], rows, left=4))
    print(f"{target}{' (not written)' if dry_run else ''}: {type_counts(each.type for each in tensors)}")
    print(
        f"{format_bytes(total)}, {8 * total / values:.2f} bits per weight, was {format_bytes(size)}"
        + ("" if dry_run else f", memory peak {format_bytes(_peak())} (measured)")
    )
    if notes and not quiet:
        note("\n".join(notes))
    if unknown:
        note(f"what was lost is not known: {unknown}")
    if found:
        show_cost(found, target, 8 * total / values, target.stat().st_size, device)


def _peak() -> int:
    """The largest resident set of this process and of the one that runs llama.cpp's quantizer, bytes."""
    from edge.devices.memory import memory_use
    from edge.devices.platform import peak_of_children

    return max(memory_use().peak, peak_of_children())
