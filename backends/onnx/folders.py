"""Checks of a folder that `edge convert` made, before ONNX Runtime loads it.

A graph is a program, and a folder's author can seal any graph with a matching hash. So edge regenerates the graph from
the header, which its own readers have checked, and the folder's must be identical, byte by byte: it contains no
operator, attribute, shape or place of weights that our writer would not have chosen, and ONNX Runtime allocates what
the plan counted. Hashes detect damage to the weights, which a graph cannot reveal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from edge.backends.onnx.graph.builder import make_graph
from edge.backends.onnx.graph.forms import Form, Int8, NormalFloats
from edge.backends.onnx.graph.layout import Layout, Method, make_layout
from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import MANIFEST, WEIGHTS, Manifest, check_content, read_manifest
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.storage.fingerprint import fingerprint


def check_folder(file: GGUFFile, spec: ModelSpec) -> Layout:
    """The layout of the folder's data file. Raises UnsupportedError for models that the graph cannot express,
    ModelFormatError if the data file is shorter than the layout."""
    folder, manifest = _opened(file)
    layout = make_layout(file, spec, Method("", forms=_forms(folder, file, spec, manifest)))
    if layout.nbytes != manifest.files[WEIGHTS].bytes:
        raise ModelFormatError(
            f"{folder / WEIGHTS}: {manifest.files[WEIGHTS].bytes} bytes instead of the {layout.nbytes} of the "
            f"tensors in {MANIFEST}: convert the model again"
        )
    return layout


def folder_graph(file: GGUFFile, spec: ModelSpec, layout: Layout, kv_dtype: str, observed: bool) -> bytes:
    """The graph for this KV dtype, regenerated from the folder's layout and compared with the folder's.

    Raises ModelFormatError, and UnsupportedError if the folder has none.
    """
    folder, manifest = _opened(file)
    graph = make_graph(layout, spec, find_network(spec), kv_dtype, observed, WEIGHTS)
    name = manifest.graph(kv_dtype, observed)
    try:
        with open(folder / name, "rb") as there:
            found = there.read(len(graph) + 1)
    except OSError as error:
        raise ModelFormatError(f"{folder / name}: cannot be read ({error.strerror})") from None
    if found != graph:
        if len(found) == manifest.files[name].bytes:
            check_content(folder, manifest, name, hashlib.sha256(found).hexdigest())
        raise ModelFormatError(
            f"{folder / name}: not the graph that this version of edge writes for the model: convert the model again"
        )
    return graph


def folder_key(file: GGUFFile, progress: Callable[[float], None] | None = None) -> str:
    """A hash, 32 hexadecimal digits, of everything that a pass depends on, after a check of the weights.

    It is computed from the files themselves, not from the hashes that the folder states. Raises ModelFormatError.
    """
    folder, manifest = _opened(file)
    weights = fingerprint(folder / WEIGHTS, progress).sha256
    check_content(folder, manifest, WEIGHTS, weights)
    said = repr((weights, fingerprint(file.path).sha256, list(manifest.tensors.values()), manifest.outliers))
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _opened(file: GGUFFile) -> tuple[Path, Manifest]:
    assert file.folder is not None
    return file.folder, read_manifest(file.folder)


def _forms(folder: Path, file: GGUFFile, spec: ModelSpec, manifest: Manifest) -> dict[str, Form]:
    """The forms that a method gave to matrices; the others follow from block types."""
    found = find_tensors(file, spec)
    kinds = {name: file.tensors[source.tensor] for name, source in found.items()}
    forms: dict[str, Form] = {name: NormalFloats() for name, info in kinds.items() if info.type == NormalFloats.type}
    for name, info in kinds.items():
        channels = manifest.outliers.get(name, ())
        if list(channels) != sorted({each for each in channels if each < info.shape[0]}):
            raise ModelFormatError(f"{folder / MANIFEST}: outliers of {name}: the file is damaged")
        if info.type == Int8.type:
            forms[name] = Int8(channels)
    return forms
