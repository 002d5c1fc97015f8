"""`edge convert`: a model into another format, in fewer bits, with fewer layers or channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import Progress, note, print_json, progress, table
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.converters.convert import Conversion, Report
    from edge.tokenizer import Tokenizer
    from edge.types import IntArray


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a GGUF file, or an installed model.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The GGUF file, or the folder, to make.")],
    to: Annotated[str | None, o.flag("--to", help="gguf, onnx or hf (default: gguf for *.gguf, else onnx).")] = None,
    type: Annotated[
        str | None, o.flag("--type", help="Block type of the matrices: q4_0, q4_1, iq4_nl, q8_0, f16 … (default: as is).")
    ] = None,
    method: Annotated[
        str | None,
        o.flag("--method", help="rtn, imatrix, awq, gptq, awq+gptq, hqq; for ONNX also nf4, w8a8, smoothquant, llm-int8."),
    ] = None,
    group: Annotated[
        int | None, o.flag("--group-size", help="Weights that share a scale, a multiple of 32 (default: 32).")
    ] = None,
    embedding_type: Annotated[
        str | None, o.flag("--embedding-type", help="Block type of the embedding and the head (default: q8_0).")
    ] = None,
    calibration: Annotated[
        list[Path] | None, o.flag("--calibration", help="A text that methods go by; may be repeated.")
    ] = None,
    calibration_tokens: Annotated[
        int, o.flag("--calibration-tokens", min=128, help="Tokens of it, from all texts alike.")
    ] = 16384,
    target_size: Annotated[
        str | None, o.flag("--target-size", help="Mix types so that the weights take this, such as 70MiB.")
    ] = None,
    target_kl: Annotated[
        float | None, o.flag("--target-kl", help="Mix types so that about this divergence is left, in nats.")
    ] = None,
    prune_layers: Annotated[int, o.flag("--prune-layers", min=0, help="Drop so many layers.")] = 0,
    prune_ffn: Annotated[float, o.flag("--prune-ffn", help="Drop this share of the feed-forward channels.")] = 0.0,
    force: Annotated[bool, o.flag("--force", help="Replace DST.")] = False,
    dry_run: Annotated[bool, o.flag("--dry-run", help="List what would be written, with sizes.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Convert a model: Hugging Face folder or GGUF in; GGUF, ONNX or Hugging Face folder out."""
    from edge.converters.convert import Conversion, find_format, preview
    from edge.converters.convert import convert as run
    from edge.converters.prune import Pruning

    pruning = Pruning(prune_layers, prune_ffn) if prune_layers or prune_ffn else None
    settings, onnx_method = None, None
    wanted = Conversion(find_format(to, target), pruning, settings, onnx_method)
