"""Writer of ONNX folders, which edge and ONNX Runtime run.

model.onnx, model.KV.onnx, model[.KV].observed.onnx    graphs, see graph/builder.py; KV is the type of the KV rows
model.onnx.data                                        weights, which they share
npu.N.bin                                              context binaries, with --npu (npu.py)
metadata.gguf, tokenizer.json, edge.json               see edge/formats/onnx_folder.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge.backends.onnx.graph.builder import make_graph
from edge.backends.onnx.graph.check import check_graphs, check_weights
from edge.backends.onnx.graph.context import KV_TYPES
from edge.backends.onnx.graph.layout import AS_IT_IS, Layout, Method, make_layout
from edge.backends.onnx.graph.weights import write_weights
from edge.converters.onnx.npu import NpuTarget, compile_npu, plan_form
from edge.converters.onnx.tokenizer_file import write_tokenizer
from edge.devices.output import check_folder, new_folder
from edge.errors import InputError, MissingExtraError
from edge.formats.compiled import Compiled
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import copy_gguf
from edge.formats.onnx_folder import (
    FACTORS,
    FORMAT,
    MANIFEST,
    METADATA,
    WEIGHTS,
    graph_name,
    is_model_folder,
    read_folder,
)
from edge.model.parts.text import utf8_path
from edge.model.reader import read_spec
from edge.model.structure.mtp import without_mtp
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.model.tokens.tokenizer import Tokenizer
from edge.storage.fingerprint import hash_file
from edge.types import Progress

_TOKENIZER = "tokenizer.json"
_WEIGHTS_SHARE = 0.9  # of the time
_COMPILED_SHARE = 0.2  # of the time until there is something to compile


def planned_files(file: GGUFFile, spec: ModelSpec, method: Method | None = AS_IT_IS) -> dict[str, int | None]:
    """Names and bytes of the files that `write_onnx` would write; None: unknown until written. method: from
    `planning_method`."""
    sizes: dict[str, int | None] = {WEIGHTS: make_layout(file, spec, method).nbytes if method else None}
    sizes |= dict.fromkeys((*(graph_name(*each) for each in _graphs()), METADATA, _TOKENIZER, MANIFEST))
    return sizes


def check_installed() -> None:
    """Raise MissingExtraError without the package that checks the graphs at the end."""
    if find_spec("onnx") is None:
        raise MissingExtraError("onnx", "onnx")


def write_onnx(
    file: GGUFFile,
    spec: ModelSpec,
    folder: Path,
    *,
    method: Method = AS_IT_IS,
    npu: NpuTarget | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write the folder atomically; return names and bytes of its files.

    method: from `find_method`. npu: also compile for a device's NPU. force: a folder that edge wrote may be replaced.
    Raises InputError if `folder` is in the way or cannot be written, UnsupportedError for models without a graph,
    ModelFormatError for weights that are not finite, and the errors of `compile_npu`.
    """
    if file.folder is not None:
        raise InputError(f"{file.folder} is a model in ONNX already")
    check_installed()
    layout = make_layout(file, spec, method)
    check_folder(folder, is_model_folder, force=force)
    if npu:
        plan_form(file, spec, npu)
    share = _COMPILED_SHARE if npu else 1.0
    utf8_path(folder)  # ONNX Runtime and the checker need a path in UTF-8
    with new_folder(folder) as target:
        weights_share = _WEIGHTS_SHARE * share
        write_weights(file, layout, target / WEIGHTS, progress and (lambda part: progress(part * weights_share)))
        _write_graphs(layout, spec, target)
        write_metadata(file, target / METADATA)
        write_tokenizer(Tokenizer(file), target / _TOKENIZER)
        compiled = None
        if npu:
            rest = progress and (lambda part: progress(share + part * (1 - share)))
            compiled = compile_npu(file, spec, layout, target, npu, rest)
        sizes = _write_manifest(file, layout, compiled, target)
        read_spec(read_folder(target))
        check_graphs(target / graph_name(*each) for each in _graphs())
        check_weights(file, layout, target / WEIGHTS)
        if progress:
            progress(1.0)
    return sizes


def rounded_types(file: GGUFFile, spec: ModelSpec, method: Method = AS_IT_IS) -> list[str]:
    """Block types of the file whose weights are rounded a second time, since ONNX Runtime lacks their grid."""
    return make_layout(file, spec, method).rounded_types(file)


def _graphs() -> list[tuple[str, bool]]:
    return [(kv_dtype, observed) for kv_dtype in KV_TYPES for observed in (False, True)[: 1 + (kv_dtype[0] == "f")]]


def _write_graphs(layout: Layout, spec: ModelSpec, target: Path) -> None:
    for kv_dtype, observed in _graphs():
        graph = make_graph(layout, spec, find_network(spec), kv_dtype, observed, WEIGHTS)
        (target / graph_name(kv_dtype, observed)).write_bytes(graph)


def write_metadata(file: GGUFFile, target: Path) -> None:
    """Write a GGUF file without weights: the header's metadata, and RoPE's factors. Raises InputError."""
    copy_gguf(file, target, (info for name, info in file.tensors.items() if name.startswith(FACTORS)))


def _write_manifest(file: GGUFFile, layout: Layout, compiled: Compiled | None, target: Path) -> dict[str, int]:
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    types, tensors = layout.types, without_mtp(file).tensors.values()
    said: dict[str, Any] = {
        "format": FORMAT,
        "source": file.path.name,
        "settings": {
            "method": layout.method.name or None,
            "kv_dtypes": list(KV_TYPES),
            "scores": list(KV_TYPES),  # kinds of rows for which some graph outputs queries
        },
        "files": {name: {"bytes": size, "sha256": hash_file(target / name)} for name, size in sizes.items()},
        "tensors": [[info.name, types.get(info.name, info.type), list(info.shape)] for info in tensors],
        "outliers": layout.outliers,
    } | ({"npu": asdict(compiled)} if compiled else {})
    (target / MANIFEST).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return sizes | {MANIFEST: (target / MANIFEST).stat().st_size}
