"""The ONNX files of a model: those of a folder, or those that a GGUF file is converted into once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge import cache
from edge.backends.tensors import find_recipe
from edge.errors import CacheError, MissingExtraError
from edge.fingerprint import Fingerprint, fingerprint
from edge.gguf_file import GGUFFile
from edge.model_folder import WEIGHTS, graph_name, read_manifest
from edge.spec import ModelSpec

_WEIGHTS_SUFFIX = ".onnx.data"


@dataclass(frozen=True)
class ModelFiles:
    """graph: the file to load; the weights lie beside it. key: what a saved KV state depends on."""

    graph: Path
    key: str


def find_model_files(
    file: GGUFFile, spec: ModelSpec, kv_dtype: str, observed: bool, progress: Callable[[float], None] | None = None
) -> ModelFiles:
    """Raises CacheError if the cache folder cannot be written, MissingExtraError if `onnx` is needed and not there,
    ModelFormatError if weights are not numbers, InputError for a folder without such a graph."""
    if file.folder is not None:
        manifest = read_manifest(file.folder)
        return ModelFiles(file.folder / manifest.graph(kv_dtype, observed), manifest.files[WEIGHTS].sha256[:32])
    return _convert(file, spec, kv_dtype, observed, progress)


def _convert(
    file: GGUFFile, spec: ModelSpec, kv_dtype: str, observed: bool, progress: Callable[[float], None] | None
) -> ModelFiles:
    """The graph names the weights' file, so both lie in one folder of the cache."""
    from edge.converters.writers.onnx_graph import make_graph
    from edge.converters.writers.onnx_layout import make_layout
    from edge.converters.writers.onnx_weights import write_weights

    layout, recipe, found = make_layout(file, spec), find_recipe(spec), fingerprint(file.path)

    def write(target: Path) -> None:
        write_weights(file, layout, target, progress)
        found.check()

    key = _key(file, found)
    data = cache.find_or_make("weights", key, _WEIGHTS_SUFFIX, write, about=file.path.name, expected=layout.nbytes)

    def write_graph(target: Path) -> None:
        try:
            target.write_bytes(make_graph(layout, spec, recipe, kv_dtype, observed, data.name))
        except ImportError:
            raise MissingExtraError("onnx", "onnx") from None

    suffix = graph_name(kv_dtype, observed).removeprefix("model")
    graph = cache.find_or_make("weights", key, suffix, write_graph, about=f"{file.path.name}, graph")
    if graph.parent != data.parent:
        raise CacheError("the cache folder has changed while a model was converted: try again")
    return ModelFiles(graph, key)


def _key(file: GGUFFile, found: Fingerprint) -> str:
    """What the files depend on: the model, and how it is converted."""
    from edge.converters import writers

    digest = hashlib.sha256(repr((list(file.tensors.values()), found.sha256)).encode())
    for source in sorted(Path(writers.__path__[0]).glob("onnx_*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
