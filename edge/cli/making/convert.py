"""`edge convert`: converts a model into another format, quantizes it, and prunes layers or channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.making.cost import NO_EVAL, CalibrationTokens, check_device, cost_json, show_cost, show_mixture
from edge.cli.terminal.show import note, print_json, progress, table
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.converters.convert import Conversion, Report
    from edge.converters.gguf.quantize import Settings
    from edge.converters.onnx.npu import NpuTarget
    from edge.formats.gguf_writer import Planned
    from edge.types import Progress


_GROUP = 32  # weights that share a scale, by default
_OF_ADDITIONS = ("source", "target", "base", "type", "force", "json", "quiet")  # options with --base


def convert(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a GGUF file, or an installed model.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The GGUF file, or the folder, to make.")],
    to: Annotated[
        str | None, o.flag("--to", help="gguf, onnx, coreml or hf (default: gguf for *.gguf, else onnx).")
    ] = None,
    type: Annotated[
        str | None,
        o.flag("--type", help="Type of the matrices: q4_0, q4_1, iq4_nl, q5_0, q8_0, f16 … (default: unchanged)."),
    ] = None,
    method: Annotated[
        str | None,
        o.flag(
            "--method",
            help="rtn, hqq; by a calibration text importance, awq, gptq, best (default: best with --calibration, else "
            "importance with --target-size or --target-kl, else rtn). For ONNX also nf4, w8a8, and by a text "
            "smoothquant, llm-int8.",
        ),
    ] = None,
    group_size: Annotated[
        int, o.flag("--group-size", help="Weights that share a scale: 32, or a multiple such as 128.")
    ] = _GROUP,
    embedding_type: Annotated[
        str | None,
        o.flag(
            "--embedding-type",
            help="Type of the embedding and the head (default: q8_0, or with --target-size as measured).",
        ),
    ] = None,
    table_type: Annotated[
        str | None,
        o.flag(
            "--table-type", help="Type of a table of per-layer embeddings, as Gemma 4 has (default: the embedding's)."
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        o.flag(
            "--calibration",
            metavar="FILE",
            help="A text to calibrate with, beside the one that comes with edge; may be repeated. Pruning needs one.",
        ),
    ] = None,
    calibration_tokens: CalibrationTokens = 16384,
    target_size: Annotated[
        str | None, o.flag("--target-size", help="Mix types to reach at most this size, such as 70MiB.")
    ] = None,
    target_kl: Annotated[
        float | None,
        o.flag("--target-kl", help="Mix types to lose at most this many nats (estimated), such as 0.05."),
    ] = None,
    lora: Annotated[
        str | None,
        o.flag("--lora", metavar="FILE[:SCALE]", help="Merge LoRA adapters, with commas between (edge run --lora)."),
    ] = None,
    base: Annotated[
        str | None,
        o.flag(
            "--base",
            metavar="MODEL",
            help="SRC is a folder of a PEFT adapter, or of an EAGLE-3 head, of this model in GGUF.",
        ),
    ] = None,
    npu: Annotated[
        bool, o.flag("--npu", help="Compile for the NPU of --device, too, by the vendor's compiler (--to onnx).")
    ] = False,
    device: Annotated[
        str | None,
        o.flag(
            "--device",
            metavar="NAME",
            help="A device to predict the speed on, with --npu to compile for (edge devices list).",
        ),
    ] = None,
    max_kv_size: Annotated[
        int | None, o.flag("--max-kv-size", help="With --npu or --to coreml: KV rows (default: 512).")
    ] = None,
    prefill_step_size: Annotated[
        int | None,
        o.flag("--prefill-step-size", help="With --npu or --to coreml: prompt tokens run at once (default: 32)."),
    ] = None,
    prune_layers: Annotated[int, o.flag("--prune-layers", min=0, help="Number of layers to drop.")] = 0,
    prune_ffn: Annotated[
        float, o.flag("--prune-ffn", help="Share of feed-forward channels to drop, such as 0.1.")
    ] = 0.0,
    repair: Annotated[
        int, o.flag("--repair", min=0, help="Steps of distillation after pruning; needs the extra train.")
    ] = 0,
    no_eval: Annotated[bool, o.flag("--no-eval", help=NO_EVAL)] = False,
    force: Annotated[bool, o.flag("--force", help="Replace DST, if edge made it.")] = False,
    dry_run: Annotated[bool, o.flag("--dry-run", help="List what would be written, with sizes.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Convert a model: Hugging Face folder or GGUF in; GGUF, ONNX, Core ML or Hugging Face folder out."""
    from edge.budget import parse_bytes
    from edge.converters import convert as c
    from edge.converters.calibrate import OWN_TEXT, check_texts
    from edge.converters.coreml.sizes import USUAL, Sizes
    from edge.converters.onnx.methods import METHODS as ONNX_METHODS
    from edge.converters.pruning.prune import Pruning
    from edge.converters.quantizers.mixed import AROUND
    from edge.model.adapters.lora_file import parse_lora
    from edge.model.structure.layers import TABLE

    if base is not None:
        if other := o.stated(context, but=_OF_ADDITIONS):
            raise InputError(f"--base converts an adapter or a head as it is: leave {other} out")
        _convert_addition(Path(source), base, target, type, force=force, json=json)
        return
    onnx_method = method if method in ONNX_METHODS else None
    mixing = "--target-size" if target_size is not None else "--target-kl" if target_kl is not None else ""
    stated = {"--group-size": group_size != _GROUP, "--embedding-type": embedding_type, "--table-type": table_type}
    if type is not None and mixing:
        raise InputError(f"{mixing} mixes types as they are measured: leave --type {type} out")
    if mixing:
        type = "q4_0"  # for tensors that cannot be mixed
    if type is None and (other := next((flag for flag, value in stated.items() if value), None)):
        raise InputError(f"{other} goes with a --type, such as q4_0")
    if method is None and type is not None:
        method = "best" if calibration else "importance" if mixing else "rtn"
    to, sizes = c.find_format(to, target), (max_kv_size, prefill_step_size)
    coreml = to == "coreml"
    wanted = c.Conversion(
        to=to,
        pruning=Pruning(prune_layers, prune_ffn) if prune_layers or prune_ffn else None,
        repair=repair,
        settings=None
        if onnx_method
        else _settings(type, method, group_size, embedding_type or "q8_0", table_type or ""),
        size=None if target_size is None else parse_bytes(target_size, "--target-size"),
        kl=target_kl,
        mixed_outside=() if embedding_type else tuple(each for each in AROUND if each != TABLE or not table_type),
        onnx_method=onnx_method,
        lora=() if lora is None else parse_lora(lora),
        npu=_npu(device, *((None, None) if coreml else sizes), wanted=npu),
        sizes=Sizes(*sizes) if coreml else USUAL,
        evaluates=not no_eval and (json or not quiet),
    )
    if target_kl is not None and not target_kl > 0:
        raise InputError(f"--target-kl {target_kl:g}: state more than 0 nats")
    shown = None if npu else device  # what an NPU does, edge plan predicts
    check_device(shown, evaluates=wanted.evaluates and wanted.quantizes and not dry_run)
    if dry_run and wanted.mixes:
        raise InputError("which types are mixed is known when they have been measured: leave --dry-run out")
    if onnx_method and type:
        raise InputError(f"--method {method} says how weights are stored: leave --type {type} out")
    if repair and not wanted.pruning:
        raise InputError("--repair mends what pruning did: state --prune-layers or --prune-ffn")
    texts = calibration or []
    check_texts(texts)
    if texts and not wanted.calibrated:
        raise InputError("--calibration is of no use here: state --type, a --method that goes by it, or pruning")
    read = texts if wanted.pruning else [*texts, OWN_TEXT]  # pruned is what the user's own texts do without
    if dry_run:
        _show_preview(target, *c.preview(source, target, wanted), json=json, quiet=quiet)
        return
    run_conversion(source, target, wanted, read, calibration_tokens, device=shown, force=force, json=json, quiet=quiet)


def run_conversion(
    source: str, target: Path, wanted: Conversion, texts: Sequence[Path], calibration_tokens: int, *,
    device: str | None, force: bool, json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Convert, and show what came of it. texts: to calibrate with, none for pruning without one, which is refused."""
    from edge.converters import convert as c
    from edge.converters.calibrate import calibration_tokens as read_tokens

    with progress(enabled=not quiet) as shown:

        def step(name: str) -> Progress:
            bar = shown.step(name)
            return lambda part: bar(part, 1.0)

        report = c.convert(
            source, target, wanted, force=force, steps=step,
            tokens=(lambda tokenizer: read_tokens(tokenizer, texts, calibration_tokens)) if texts else None,
        )  # fmt: skip
    if json:
        print_json(
            {**asdict(report), "target": str(target), "written": True} | cost_json(report.evaluated, target, device)
        )
    else:
        _show(report, device, quiet=quiet)


def _convert_addition(folder: Path, base: str, target: Path, type: str | None, *, force: bool, json: bool) -> None:
    """Convert what a model needs beside it: an adapter or a head."""
    from edge.converters.huggingface.adapter import convert_adapter, is_adapter_folder
    from edge.converters.huggingface.eagle import convert_eagle, is_eagle_folder
    from edge.formats.gguf_writer import check_gguf
    from edge.model.model import open_model

    head = is_eagle_folder(folder)
    if not head and not is_adapter_folder(folder):
        raise InputError(f"{folder}: --base is for folders of PEFT adapters and EAGLE-3 heads: leave it out")
    if type is not None and not head:
        raise InputError("--type: an adapter keeps its floats: leave it out")
    check_gguf(target, force=force)
    model = open_model(base)
    convert_eagle(folder, model, target, type and type.upper()) if head else convert_adapter(folder, model, target)
    size = target.stat().st_size
    if json:
        print_json({"target": str(target), "files": {target.name: size}, "written": True})
    else:
        print(table([str(target), "size"], [[target.name, format_bytes(size)]]))


def _npu(device: str | None, rows: int | None, chunk: int | None, *, wanted: bool) -> NpuTarget | None:
    from edge.converters.onnx.npu import NpuTarget

    stated = {"--max-kv-size": rows, "--prefill-step-size": chunk}
    if not wanted:
        if flag := next((flag for flag, value in stated.items() if value is not None), None):
            raise InputError(f"{flag} is for what an NPU runs: state --npu, or --to coreml")
        return None
    if device is None:
        raise InputError("--npu compiles for one device: state it with --device, such as --device galaxy-s24")
    return NpuTarget(device, rows, chunk)


def _settings(
    kind: str | None, method: str | None, group_size: int, embedding: str, layer_table: str
) -> Settings | None:
    """The settings of quantization; None if none was requested."""
    from edge.converters.gguf.quantize import METHODS, Settings

    if kind is None:
        if method is not None:
            raise InputError(f"--method {method} quantizes: state the --type, such as q4_0")
        return None
    named = next((each for each in METHODS if each == method), None)
    if named is None:
        raise InputError(f"there is no method {method}: choose {', '.join(METHODS)}")
    kind, embedding, layer_table = kind.upper(), embedding.upper(), layer_table.upper()
    if kind in ("F32", "F16", "BF16"):
        embedding = kind
    return Settings(
        type=kind, method=named, embedding=embedding, table=layer_table, output=embedding, group_size=group_size
    )


def _show_preview(
    target: Path,
    files: dict[str, int | None],
    tensors: list[Planned],
    notes: Sequence[str],
    *,
    json: bool,
    quiet: bool,
) -> None:
    if json:
        listed = [{"name": t.name, "shape": t.shape, "type": t.type, "bytes": t.nbytes} for t in tensors]
        print_json({"target": str(target), "written": False, "files": files, "tensors": listed, "notes": notes})
        return
    rows = [[each.name, "×".join(map(str, each.shape)), each.type, format_bytes(each.nbytes)] for each in tensors]
    print(table(["tensor", "shape", "type", "size"], rows, left=3))
    sizes = [[name, "known when written" if size is None else format_bytes(size)] for name, size in files.items()]
    print("\n" + table([f"{target} (not written)", "size"], sizes))
    if not quiet:
        for line in notes:
            note(line)


def _show(report: Report, device: str | None, *, quiet: bool) -> None:
    from edge.converters.gguf.outcome import type_counts

    print(table([str(report.target), "size"], [[name, format_bytes(size)] for name, size in report.files.items()]))
    if quiet:
        return
    if report.read:
        note("\n".join(report.read))
    if made := report.quantized:
        note(
            "\n".join([f"{type_counts(made.types.values())}; {made.bits_per_weight:.2f} bits per weight", *made.notes])
        )
    if report.rounded:
        note(f"{', '.join(report.rounded)} weights were rounded once more, to 8 bits: the format has no such grid")
    if npu := report.compiled:
        form, how = npu.form, f"edge run {report.target} --provider {npu.provider}"
        note(
            f"compiled for the NPU of {npu.device}: {form.rows} KV rows in {form.kv_dtype}; chunks of {form.chunk} "
            f"tokens and single ones share their weights; {how}"
        )
    if report.mixture:
        show_mixture(report.mixture)
    if cut := report.pruned:
        layers = f"layers {', '.join(map(str, cut.layers))} went" if cut.layers else "all layers stay"
        before, after = cut.parameters
        note(f"{layers}, {cut.ffn[1]} of {cut.ffn[0]} channels stay, {after / before:.0%} of the weights")
    if report.perplexity:
        said = ", ".join(f"{name} {value:.2f}" for name, value in report.perplexity.items())
        note(f"perplexity of the calibration text's last eighth: {said} (measured)")
    if report.unevaluated:
        note(f"what was lost is not known: {report.unevaluated}")
    if report.evaluated:
        show_cost(report.evaluated, report.target, report.bits_per_weight, sum(report.files.values()), device)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    note(f"{spent} · memory peak {format_bytes(report.peak)} (measured)")
