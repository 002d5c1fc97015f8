"""A model's graphs for an app's NPU, through ONNX Runtime: the folder `npu` of a bundle, and section NPU of model.edge.

    npu.S.0.onnx, npu.S.1.onnx   the graphs of shard S: of a chunk of tokens, and of one
    npu.S.bin                    the shard's context binary, where the vendor's compiler made one: the graphs name it
    embed.onnx                   the embeddings of tokens, which ONNX Runtime looks up on the CPU
    npu.data                     the weights; only the embeddings' beside context binaries, which contain the others

The graphs are those of backends/onnx/graph/static.py; runtime/npu/ runs them. Their KV rows are in tiles of 16,
as in the runtime.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge.apps.c_struct import c_struct, filled
from edge.backends.base import EngineConfig
from edge.backends.onnx import ENGINE as ONNX
from edge.backends.onnx.graph.layout import Layout, check_static, make_layout
from edge.backends.onnx.graph.static import (
    Part,
    make_context_graph,
    make_embedding_graph,
    make_static_graph,
    parts_of,
)
from edge.backends.onnx.graph.weights import write_weights
from edge.backends.onnx.model_files import ModelFiles
from edge.backends.onnx.npu.contexts import Contexts, compile_contexts
from edge.backends.onnx.npu.form import KV_DTYPES, make_form
from edge.backends.onnx.providers import STATIC_CPU, Provider, find_provider
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.cores import round_up
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import UnsupportedError
from edge.formats.compiled import StaticForm
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.plan.npu import npu_use
from edge.plan.plan import Plan
from edge.records import dataclass
from edge.types import Progress

FOLDER, WEIGHTS, EMBEDDINGS = "npu", "npu.data", "embed.onnx"
SYSTEMS = ("linux", "android")  # where the runtime loads ONNX Runtime
CONFIG = c_struct(  # the plan determines the graphs' sizes
    shards="<u4",  # as in StaticForm
    options="<u4",  # number of the provider's options
    provider="S64",  # execution provider, by ONNX Runtime's name; empty: its CPU provider
    library="S64",  # plugin that contains the provider
)
OPTION = c_struct(name="S32", value="S32")  # follow CONFIG
STRUCTS = {"npu_config": CONFIG, "npu_option": OPTION}

# By --provider's name of a provider: the plugin library that an app ships, and the options besides the chip's.
_PLUGINS = {
    "qnn": (
        "libonnxruntime_providers_qnn.so",
        {"backend_path": "libQnnHtp.so", "offload_graph_io_quantization": "0"},
    ),
}
_RUNTIME = "ONNX Runtime's own memory as measured with version 1.31 on x86-64; a driver's is not known"


@dataclass(frozen=True)
class NpuGraphs:
    """The part of a bundle for NPUs."""

    model: Model
    layout: Layout
    form: StaticForm
    provider: Provider
    compiled: bool  # to context binaries, by the provider's compiler for the chip in its options

    def section(self) -> bytes:
        """Section NPU: CONFIG, then an OPTION for each of the provider's options."""
        library, options = _PLUGINS.get(self.provider.name, ("", {}))
        values = {
            "shards": self.form.shards, "options": len(options), "library": library.encode(),
            "provider": self.provider.ort_name.encode() if library else b"",
        }  # fmt: skip
        pairs = ({"name": name.encode(), "value": value.encode()} for name, value in options.items())
        return filled(CONFIG, values) + b"".join(filled(OPTION, pair) for pair in pairs)

    def write(self, folder: Path, progress: Progress | None = None) -> None:
        """Write the folder `npu` beside model.edge. Raises EngineError if the vendor's compiler refuses a graph, and
        ModelFormatError for weights that are not finite."""
        target, spec, network = folder / FOLDER, self.model.spec, find_network(self.model.spec)
        target.mkdir()
        write_weights(self.model.file, self.layout, target / WEIGHTS, progress)
        files, contexts = ModelFiles(self.layout, target, WEIGHTS, ""), None
        if self.compiled:
            contexts = compile_contexts(spec, files, self.form, self.provider, progress)
        pairs = zip(*(parts_of(spec, self.form, tokens) for tokens in (self.form.chunk, 1)), strict=True)
        for shard, pair in enumerate(pairs):
            for graph, part in enumerate(pair):
                (target / f"npu.{shard}.{graph}.onnx").write_bytes(self._graph(part, shard, graph, contexts))
        (target / EMBEDDINGS).write_bytes(make_embedding_graph(self.layout, spec, network, WEIGHTS))
        if contexts:
            names = self.layout.matrices["token_embd"].form.arrays(1, self.model.spec.hidden)
            used = [f"token_embd.{name}" for name in names] + ["position_embd"] * network.learned_positions
            os.truncate(target / WEIGHTS, max(_end(self.layout, name) for name in used))  # the embeddings come first

    def _graph(self, part: Part, shard: int, graph: int, contexts: Contexts | None) -> bytes:
        spec, network = self.model.spec, find_network(self.model.spec)
        if contexts is None:
            return make_static_graph(self.layout, spec, network, self.form, part, WEIGHTS)
        return make_context_graph(
            self.layout, spec, network, self.form, part, context=contexts.files[shard],
            name=contexts.graphs[shard][graph], compiler=contexts.compiler,
        )  # fmt: skip


def check_npu(profile: DeviceProfile, spec: ModelSpec, config: EngineConfig) -> None:
    """Raise UnsupportedError for features that the runtime lacks on NPUs, or that static graphs cannot express."""
    if profile.system not in SYSTEMS:
        raise UnsupportedError(f"--npu is for {', '.join(SYSTEMS)}, not for {profile.system}")
    check_static(spec)
    lacks = {
        "KV policies that look at rows (h2o, kvzap): choose --kv-policy streaming, window or full": config.per_head,
        f"{config.kv_dtype} KV rows: choose --kv-dtype {', '.join(KV_DTYPES)}": config.kv_dtype not in KV_DTYPES,
        "LoRA adapters: leave --lora-rank out": config.lora_rank > 0,
        "vectors of each token for every layer: export without --npu": find_network(spec).layer_inputs > 0,
        "layers that share KV rows: export without --npu": bool(find_network(spec).rowless),
        f"heads of {spec.head_dim} values, which are no multiple of 16: export without --npu": spec.head_dim % 16 > 0,
    }
    if found := next((what for what, lacking in lacks.items() if lacking), None):
        raise UnsupportedError(f"--npu has no {found}")


def plan_graphs(model: Model, profile: DeviceProfile, config: EngineConfig) -> NpuGraphs:
    """Graphs for the device's NPU, if edge knows its compiler, else for ONNX Runtime on its CPU.

    Raises as `check_npu`, and UnsupportedError for models that the NPU cannot run, MissingExtraError without the
    compiler.
    """
    check_npu(profile, model.spec, config)
    npu, provider, shards = profile.npu, STATIC_CPU, 1
    if npu and npu.provider in _PLUGINS and npu.soc and npu.arch:
        use = npu_use(model.file, model.spec, profile)
        if use.reasons:
            raise UnsupportedError(f"not for the NPU of {profile.name}: {use.reasons[0]}")
        provider, shards = find_provider(npu.provider).compiling_for(npu), use.shards
    form = make_form(model.spec, config.capacity, config.chunk, config.kv_dtype, shards=shards)
    form = replace(form, rows=round_up(form.rows, TILE), ring_rows=round_up(form.ring_rows, TILE))
    layout = make_layout(model.file, model.spec)
    return NpuGraphs(model, layout, form, provider, compiled=provider != STATIC_CPU)


def describe_npu(graphs: NpuGraphs, plan: Plan) -> dict[str, Any]:
    """The manifest's part `npu`. peak: estimated bytes of a process with one session, whose NPU shares its memory."""
    form, of_cpu = graphs.form, plan.bytes
    config = replace(
        plan.config, capacity=form.rows, chunk=form.chunk, threads=1, logits_rows=1, tuning={}, drafts=0,
        provider="cpu-static",
    )  # fmt: skip
    need = ONNX.footprint(graphs.model.spec, config)
    sizes = {"weights": need.weights, "kv": need.kv, "scratch": need.scratch, "runtime": need.runtime}
    rest = plan.predicted_peak - of_cpu.weights - of_cpu.kv - of_cpu.scratch
    return {
        "provider": graphs.provider.ort_name, "rows": form.rows, "chunk": form.chunk, "shards": form.shards,
        "bytes": sizes, "source": _RUNTIME, "peak": rest + sum(sizes.values()),
    }  # fmt: skip


def _end(layout: Layout, name: str) -> int:
    return layout.places[name].offset + layout.places[name].nbytes
