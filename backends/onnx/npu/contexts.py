"""Context binaries: static graphs as compiled by a vendor's compiler for one chip.

The graphs of a shard, a chunk's and a step's, are compiled into one context and share their weights. ONNX Runtime runs
a context through a small graph that names the file and the graph in it. We regenerate that graph whenever it is needed,
so that a folder holds only the contexts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from edge.backends.onnx.graph.static import Part, make_context_graph, make_static_graph, parts_of
from edge.backends.onnx.model_files import ModelFiles
from edge.backends.onnx.npu.form import make_form
from edge.backends.onnx.providers import CPU, Provider
from edge.backends.onnx.session import open_session
from edge.errors import EngineError, ModelFormatError
from edge.formats.compiled import Compiled, StaticForm
from edge.formats.onnx_folder import MANIFEST, check_content, read_manifest
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.types import Progress

# Nothing may run elsewhere unseen: a graph with a node that the provider does not have is refused.
_NO_FALLBACK = {"session.disable_cpu_ep_fallback": "1"}
_SHARED = {"ep.share_ep_contexts": "1"}

# A part of the layers, the index of its shard, the index of its graph there (0: chunk, 1: step), the serialized graph.
_Made = tuple[Part, int, int, bytes]


@dataclass(frozen=True)
class Contexts:
    """The compiler's output."""

    files: tuple[str, ...]  # as `contexts` of edge.formats.compiled.Compiled, like the next three
    graphs: tuple[tuple[str, str], ...]
    compiler: str
    source: str
    sizes: tuple[int, ...]  # bytes of the files


def open_parts(
    spec: ModelSpec, files: ModelFiles, form: StaticForm, provider: Provider, threads: int,
    progress: Progress | None = None,
) -> dict[Part, Any]:  # fmt: skip
    """Open sessions of all parts of a form: from the folder's contexts, if it has them for this provider and there is
    an NPU; otherwise compiled now.

    Raises EngineError if compiling fails, UnsupportedError for weights that NPUs do not multiply, ModelFormatError for
    contexts that are not the model's.
    """
    sessions: dict[Part, Any] = {}
    if compiled := spec.compiled:
        _check(spec, files, compiled)  # before graphs of these sizes are made
    parts = _parts(spec, files, form)
    if compiled and _source(parts) != compiled.source:
        raise ModelFormatError(
            f"{files.folder}: its context binaries are of another model or another version of edge: convert it again"
        )
    if compiled and (provider.emulated or compiled.provider != provider.name):
        compiled = None
    entries = {} if provider.ort_name == CPU.ort_name else _NO_FALLBACK
    for done, (part, shard, graph, content) in enumerate(parts, start=1):
        if compiled:
            context, name = compiled.contexts[shard], compiled.graphs[shard][graph]
            network = find_network(spec)
            around = make_context_graph(
                files.layout, spec, network, form, part, context=context, name=name, compiler=compiled.compiler
            )
            place = {"ep.context_file_path": str(files.folder / "npu.onnx")}  # contexts lie beside it
            try:
                sessions[part] = open_session(around, None, provider, threads, entries=entries | _SHARED | place)
            except EngineError as error:
                made = f"made for {compiled.device} by the compiler of version {compiled.compiler}"
                raise EngineError(f"{files.folder / context} was {made}, and cannot be loaded here: {error}") from None
        else:
            sessions[part] = open_session(content, files.folder, provider, threads, entries=entries)
        if progress:
            progress(done / len(parts))
    return sessions


def compile_contexts(
    spec: ModelSpec, files: ModelFiles, form: StaticForm, provider: Provider, progress: Progress | None = None
) -> Contexts:
    """Compile all shards, each into a file `npu.N.bin` beside the weights.

    The graphs lie there, too, during compilation, since ONNX Runtime distinguishes a context's graphs by path. Raises
    EngineError if the compiler refuses a graph, UnsupportedError for weights that NPUs do not multiply, OSError.
    """
    import onnx

    made, names, sizes = [], [], []
    compiler, parts, kept = "", _parts(spec, files, form), []  # sessions of a context live until it is written
    for done, (_, shard, graph, content) in enumerate(parts, start=1):
        plain = files.folder / f"npu.{shard}.{graph}.onnx"
        wrapper = plain.with_suffix(".context.onnx")
        plain.write_bytes(content)
        entries = {"ep.context_enable": "1", "ep.context_embed_mode": "0", "ep.context_file_path": str(wrapper)}
        last = {"ep.stop_share_ep_contexts": "1"} if graph else {}
        kept.append(open_session(plain, None, provider, 1, entries=_NO_FALLBACK | _SHARED | entries | last))
        (node,) = onnx.load(wrapper, load_external_data=False).graph.node
        said = {each.name: each.s.decode() for each in node.attribute}
        names.append(said["partition_name"])
        compiler = said["ep_sdk_version"]
        plain.unlink()
        wrapper.unlink()
        if graph:
            context = files.folder / f"npu.{shard}.bin"
            (files.folder / said["ep_cache_context"]).rename(context)
            made.append(context.name)
            sizes.append(context.stat().st_size)
            kept.clear()
        if progress:
            progress(done / len(parts))
    graphs = tuple(zip(names[::2], names[1::2], strict=True))
    return Contexts(tuple(made), graphs, compiler, _source(parts), tuple(sizes))


def _check(spec: ModelSpec, files: ModelFiles, compiled: Compiled) -> None:
    """Raise ModelFormatError if the contexts' sizes do not fit the model, or the files were changed."""
    form, manifest = compiled.form, read_manifest(files.folder)
    sizes = make_form(spec, form.rows, form.chunk, form.kv_dtype, shards=form.shards)
    counts = {form.shards, len(compiled.contexts), len(compiled.graphs)}
    if form != sizes or len(counts) > 1 or form.shards > spec.layers or not form.chunk < form.rows <= spec.context:
        raise ModelFormatError(f"{files.folder / MANIFEST}: the sizes of npu do not fit the model: convert it again")
    for name in compiled.contexts:
        check_content(files.folder, manifest, name, fingerprint(files.folder / name).sha256)


def _source(parts: Sequence[_Made]) -> str:
    """`Compiled.source`: a hash of all graphs of the layers."""
    digest = hashlib.sha256()
    for *_, content in parts:
        digest.update(content)
    return digest.hexdigest()


def _parts(spec: ModelSpec, files: ModelFiles, form: StaticForm) -> list[_Made]:
    by_graph = (parts_of(spec, form, tokens) for tokens in (form.chunk, 1))
    return [
        (part, shard, graph, _make(spec, files, form, part))
        for shard, pair in enumerate(zip(*by_graph, strict=True))
        for graph, part in enumerate(pair)
    ]


def _make(spec: ModelSpec, files: ModelFiles, form: StaticForm, part: Part) -> bytes:
    return make_static_graph(files.layout, spec, find_network(spec), form, part, files.data)
