"""The sizes of static graphs: those of a compiled folder, or of the plan."""

from __future__ import annotations

import platform

from edge.backends.base import EngineConfig
from edge.backends.counts import FixedSizes
from edge.backends.onnx.graph.layout import check_static
from edge.backends.onnx.providers import is_static
from edge.backends.ring import LayerKinds
from edge.devices.profiles.profile import Npu
from edge.formats.compiled import StaticForm
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network

KV_DTYPES = ("f16", "f32")
ROWS, CHUNK = 512, 32  # unless the user says otherwise: every pass reads all rows
# Measured with QNN 2.51 on layers 576 and 1,536 wide: a layer's operators in a context, of both graphs together,
# whatever the chunk.
_LAYER_BYTES, _LAYER_BYTES_PER_WIDTH = 200 << 10, 220
_HAVE_NO_NPU = ("x86_64", "AMD64")  # machines on which QNN emulates


def find_sizes(spec: ModelSpec, provider: str | None, *, elsewhere: bool) -> FixedSizes | None:
    """See `Backend.fixed_sizes`."""
    if provider is None or not is_static(provider):
        return None
    check_static(spec)
    emulated = not elsewhere and provider.lower() == "qnn" and platform.machine() in _HAVE_NO_NPU
    if (compiled := spec.compiled) is None:
        return FixedSizes(min(ROWS, spec.context), CHUNK, spec.context, KV_DTYPES, False, emulated)
    form = compiled.form
    return FixedSizes(form.rows, form.chunk, spec.context, (form.kv_dtype,), True, emulated)


def find_form(spec: ModelSpec, config: EngineConfig) -> StaticForm:
    """The static form that `config` runs on a static provider."""
    if spec.compiled:
        return spec.compiled.form
    return make_form(spec, config.capacity, config.chunk, config.kv_dtype)


def make_form(spec: ModelSpec, rows: int, chunk: int, kv_dtype: str, *, shards: int = 1) -> StaticForm:
    """The static form with these sizes. Raises UnsupportedError for models that static graphs cannot express."""
    check_static(spec)
    network = find_network(spec)
    ring_rows = LayerKinds.of(network.windows, network.rowless).ring_rows(rows, chunk)
    return StaticForm(rows, ring_rows, chunk, "f32" if kv_dtype == "f32" else "f16", shards)


def graph_bytes(spec: ModelSpec) -> int:
    """Bytes of a model's contexts besides weights: the operators of a chunk's and a step's graph."""
    return spec.layers * (_LAYER_BYTES + _LAYER_BYTES_PER_WIDTH * spec.hidden)


def chip_of(spec: ModelSpec) -> Npu | None:
    """The chip that the model was compiled for; None: this device's."""
    if not (found := spec.compiled):
        return None
    return Npu(found.device, found.provider, "edge.json", found.provider, found.soc, found.arch)
