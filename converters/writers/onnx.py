"""A model in ONNX: a folder that edge and ONNX Runtime run.

model.onnx, model.KV.onnx, model[.KV].observed.onnx    graphs, see onnx_graph.py; KV is the type of the KV rows
model.onnx.data                                        weights, which they share
metadata.gguf, tokenizer.json, edge.json               see model_folder.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.backends.tensors import find_recipe
from edge.converters.metadata import write_metadata
from edge.converters.target import check_folder, new_folder
from edge.converters.tokenizer_file import write_tokenizer
from edge.converters.writers.onnx_graph import KV_TYPES, make_graph
from edge.converters.writers.onnx_layout import Layout, make_layout
from edge.converters.writers.onnx_weights import write_weights
from edge.errors import InputError, MissingExtraError, ModelFormatError
from edge.gguf_file import GGUFFile
from edge.model_folder import FORMAT, MANIFEST, METADATA, WEIGHTS, graph_name, is_model_folder, read_folder
from edge.spec import ModelSpec
from edge.tokenizer import Tokenizer

_TOKENIZER = "tokenizer.json"
_WEIGHTS_SHARE = 0.9  # of the time

Progress = Callable[[float], None]


def planned_files(file: GGUFFile, spec: ModelSpec) -> dict[str, int | None]:
    """Names and bytes of what would be written, None where only writing tells."""
    sizes: dict[str, int | None] = {WEIGHTS: make_layout(file, spec).nbytes}
    sizes |= dict.fromkeys((*(graph_name(*each) for each in _graphs()), METADATA, _TOKENIZER, MANIFEST))
    return sizes


def write_onnx(
    file: GGUFFile, spec: ModelSpec, folder: Path, *, force: bool = False, progress: Progress | None = None
) -> dict[str, int]:
    """Write the folder, whole or not at all; names and bytes of its files.

    force: a folder that edge wrote before may be replaced. Raises InputError if `folder` is in the way or cannot be
    written, UnsupportedError for models that have no graph, ModelFormatError for weights that are no numbers.
    """
    if file.folder is not None:
        raise InputError(f"{file.folder} is a model in ONNX already")
    layout = make_layout(file, spec)
    check_folder(folder, is_model_folder, force=force)
    with new_folder(folder) as target:
        write_weights(file, layout, target / WEIGHTS, progress and (lambda part: progress(part * _WEIGHTS_SHARE)))
        _write_graphs(layout, spec, target)
        write_metadata(file, target / METADATA)
        write_tokenizer(Tokenizer(file), target / _TOKENIZER)
        sizes = _write_manifest(file, target)
        _verify(target)
        if progress:
            progress(1.0)
    return sizes


def _graphs() -> list[tuple[str, bool]]:
    return [(kv_dtype, observed) for kv_dtype in KV_TYPES for observed in (False, True)[: 1 + (kv_dtype[0] == "f")]]


def _write_graphs(layout: Layout, spec: ModelSpec, target: Path) -> None:
    try:
        for kv_dtype, observed in _graphs():
            graph = make_graph(layout, spec, find_recipe(spec), kv_dtype, observed, WEIGHTS)
            (target / graph_name(kv_dtype, observed)).write_bytes(graph)
    except ImportError:
        raise MissingExtraError("onnx", "onnx") from None


def _write_manifest(file: GGUFFile, target: Path) -> dict[str, int]:
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    said: dict[str, Any] = {
        "format": FORMAT,
        "source": file.path.name,
        "settings": {"block": 32, "activations": "int8", "kv_dtypes": list(KV_TYPES)},
        "files": {name: {"bytes": size, "sha256": _hash(target / name)} for name, size in sizes.items()},
        "tensors": [[info.name, info.type, list(info.shape)] for info in file.tensors.values()],
    }
    (target / MANIFEST).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return sizes | {MANIFEST: (target / MANIFEST).stat().st_size}


def _verify(target: Path) -> None:
    """What was written is read again: our own readers, and ONNX's checker on every graph."""
    import onnx

    from edge.model import read_spec

    read_spec(read_folder(target))
    for kv_dtype, observed in _graphs():
        try:
            onnx.checker.check_model(str(target / graph_name(kv_dtype, observed)))
        except onnx.checker.ValidationError as error:
            raise ModelFormatError(f"the graph is not valid ONNX: {str(error).splitlines()[0]}") from None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
