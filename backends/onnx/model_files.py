"""The ONNX files of a model: a folder's, or those converted once from a GGUF file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from edge.backends.onnx.folders import check_folder, folder_graph, folder_key
from edge.backends.onnx.graph.builder import make_graph
from edge.backends.onnx.graph.layout import Layout, make_layout
from edge.backends.onnx.graph.weights import write_weights
from edge.formats import blocks
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import WEIGHTS
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.storage import cache
from edge.storage.fingerprint import Fingerprint, fingerprint

_GRAPH = Path(__file__).parent / "graph"
_WEIGHTS_SUFFIX = ".onnx.data"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model. Weights lie in the file `data` of `folder`, as `layout` says."""

    layout: Layout
    folder: Path
    data: str
    key: str  # everything that a saved KV state depends on


def find_model_files(file: GGUFFile, spec: ModelSpec, progress: Callable[[float], None] | None = None) -> ModelFiles:
    """Find a model's files, or convert them.

    Raises CacheError if the cache folder cannot be written, ModelFormatError if weights are not finite or a folder is
    not edge's, UnsupportedError for models that the graph cannot express.
    """
    if file.folder is not None:
        return ModelFiles(check_folder(file, spec), file.folder, WEIGHTS, folder_key(file, progress))
    layout, found = make_layout(file, spec), fingerprint(file.path)

    def write(target: Path) -> None:
        write_weights(file, layout, target, progress)
        found.check()

    key = _key(file, found)
    data = cache.find_or_make("weights", key, _WEIGHTS_SUFFIX, write, about=file.path.name, expected=layout.nbytes)
    return ModelFiles(layout, data.parent, data.name, key)


def find_graph(file: GGUFFile, spec: ModelSpec, files: ModelFiles, kv_dtype: str, observed: bool) -> bytes:
    """The graph for this KV dtype. Raises UnsupportedError for a folder without it, ModelFormatError if the folder's
    differs."""
    if file.folder is not None:
        return folder_graph(file, spec, files.layout, kv_dtype, observed)
    return make_graph(files.layout, spec, find_network(spec), kv_dtype, observed, files.data)


def _key(file: GGUFFile, found: Fingerprint) -> str:
    """A hash of the model and of the converting code."""
    digest = hashlib.sha256(repr((list(file.tensors.values()), found.sha256)).encode())
    for source in (*sorted(_GRAPH.rglob("*.py")), Path(blocks.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
