"""The ONNX engine's memory: counted where possible, otherwise measured."""

from __future__ import annotations

from edge.backends.base import EngineConfig
from edge.backends.counts import Footprint
from edge.backends.onnx.graph.matmul_nbits import bits_of, has_minimum
from edge.backends.onnx.kv import row_bytes, row_of
from edge.backends.onnx.npu.form import find_form, graph_bytes
from edge.backends.onnx.providers import is_static
from edge.backends.onnx.rows import LARGEST
from edge.backends.ring import LayerKinds
from edge.backends.row_lists import pinned_bytes
from edge.formats.blocks import BLOCK, BLOCK_TYPES
from edge.formats.compiled import StaticForm
from edge.formats.onnx_folder import FORM_TYPES
from edge.model.cores import SelectiveScan
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network

MOST_OBSERVED = 32  # queries whose attention is computed at once
MOST_AT_ONCE = 256  # tokens: longer runs take memory and are not faster

# Measured with ONNX Runtime 1.31: its library's pages and heap, and what a session keeps of every layer's nodes.
LIBRARY_BYTES = 48 << 20
LAYER_BYTES = 640 << 10
# Copies of a chunk's scores, all heads of a layer at once: integer rows are converted to floats.
_SCORES = {"f32": 1, "f16": 1, "int8": 4, "int4": 4}
# Bytes for each row of a head: its physical row and position, and a policy's scratch while it chooses.
_BOOKKEEPING = 12 + 36
_KEY_BYTES = 24  # for each value of a layer's keys while they are read or rotated


# Memory of QNN's emulator, measured with onnxruntime-qnn 2.7: the plugin and its compiler, and prepared copies of all
# weights for each of the two graphs.
_EMULATOR_BYTES, _EMULATED_COPIES = 176 << 20, 9


def count_footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    if is_static(config.provider):
        return _count_static(spec, config, find_form(spec, config))
    network, float_bytes = find_network(spec), 4
    kinds, state = LayerKinds.of(network.windows, network.rowless), 4 * sum(network.fixed_values)
    rows, ring_rows = config.capacity, kinds.ring_rows(config.capacity, config.chunk)
    row, ringed = row_of(network, kinds.whole), row_of(network, kinds.ringed)
    heads, fixed = len(kinds.whole) * row.heads, row_bytes(ringed, config.kv_dtype) * len(kinds.ringed) * ring_rows
    fixed += state + float_bytes * config.crossed * sum(network.cross_values)
    queries = max((core.queries for core in network.attention if core), default=0)
    qkv = queries + max(row.values, ringed.values)
    at_once = min(config.chunk, MOST_AT_ONCE)
    widest = max(getattr(core, "channels", core.width) for core in network.cores)
    per_token = 3 * max(spec.ffn, widest) + 2 * qkv + 4 * spec.hidden + _SCORES[config.kv_dtype] * spec.heads * rows
    # Decays, B and C of each channel, the last two also before they are reshaped
    per_token += 3 * max(
        (core.width * core.size for core in network.cores if isinstance(core, SelectiveScan)), default=0
    )
    shows = config.observes or config.kv_dtype in LARGEST
    per_token += 4 * spec.layers * network.layer_inputs
    tables = max(rows, config.chunk) * max(row.key, ringed.key)
    numbers = at_once * per_token + 2 * config.logits_rows * spec.vocab + tables
    numbers += spec.layers * MOST_OBSERVED * qkv if shows else 0
    numbers += spec.layers * MOST_OBSERVED * queries if config.observes else 0
    windowed = sum(map(bool, find_network(spec).windows))
    by_heads = windowed * spec.heads * MOST_OBSERVED if config.per_head and not kinds.ringed else 0
    numbers += 3 * max(at_once, by_heads) * (ring_rows or rows) if windowed else 0
    numbers += 3 * at_once * rows if network.whole_pictures else 0
    per_row = heads * _BOOKKEEPING + row.heads * row.key * _KEY_BYTES
    by_head = rows * per_row if config.per_head else 0
    attention = float_bytes * heads * rows if config.observes else 0
    kv = row_bytes(row, config.kv_dtype) * len(kinds.whole) * rows + attention + fixed
    scratch = float_bytes * numbers + by_head + state + pinned_bytes(heads, row.key, config.pinned)
    return Footprint(
        weights=weights_of(spec),
        kv=kv,
        scratch=max(scratch, _packed_head(spec) - kv),  # before there are rows
        runtime=LIBRARY_BYTES + LAYER_BYTES * spec.layers,
        fixed_kv=fixed,
    )


def _count_static(spec: ModelSpec, config: EngineConfig, form: StaticForm) -> Footprint:
    """The footprint of static graphs. The context of an NPU's driver, with weights and operators of two graphs, is
    included, since host and NPU share one memory on these devices."""
    network, float_bytes = find_network(spec), 4
    kinds = LayerKinds.of(network.windows, network.rowless)
    row, ringed = row_of(network, kinds.whole), row_of(network, kinds.ringed)
    queries = max(core.queries for core in network.attention if core)
    heads, fixed = len(kinds.whole) * row.heads, row_bytes(ringed, form.kv_dtype) * len(kinds.ringed) * form.ring_rows
    kv = row_bytes(row, form.kv_dtype) * len(kinds.whole) * form.rows + fixed
    attention = float_bytes * heads * config.capacity if config.observes else 0
    masks = len(set(network.windows)) * (form.rows + form.chunk)
    per_token = spec.hidden + masks + spec.layers * (queries + max(row.values, ringed.values))
    per_token += (spec.hidden + spec.layers * network.layer_inputs) * (network.layer_inputs > 0)
    numbers = 2 * form.chunk * per_token + 2 * spec.vocab
    numbers += spec.layers * MOST_OBSERVED * queries if config.observes else 0
    per_row = heads * _BOOKKEEPING + row.heads * row.key * _KEY_BYTES
    scratch = float_bytes * numbers + (form.rows * per_row if config.per_head else 0)
    weights = weights_of(spec) - (spec.largest_tensor if spec.tied_head else 0)
    return Footprint(
        weights=weights * (_EMULATED_COPIES if config.emulated else 1),
        kv=kv + attention,
        scratch=scratch + pinned_bytes(heads, row.key, config.pinned),
        runtime=_EMULATOR_BYTES if config.emulated else LIBRARY_BYTES + graph_bytes(spec),
        fixed_kv=fixed,
    )


def weights_of(spec: ModelSpec) -> int:
    """Bytes of the weights in their new layout; an embedding that is also the head exists in both layouts. Float16
    matrices become float32 one after the other. A table of per-layer embeddings stays in its mapped file, of which a
    pass reads its tokens' rows."""
    blocks = {each.name: (each.values, each.nbytes) for each in BLOCK_TYPES.values()} | FORM_TYPES
    total = 0.0
    for kind, nbytes in spec.type_bytes:
        values, size = blocks[kind]
        nbytes -= spec.table_bytes if kind == spec.table_type else 0
        total += nbytes / size * values * _value_bytes(kind)
    for kind, nbytes in spec.expert_types:
        if kind not in FORM_TYPES and has_minimum(kind, bits_of(kind)):  # which experts store in 8 bits
            values, size = blocks[kind]
            total += nbytes / size * values * (_value_bytes("Q8_0") - _value_bytes(kind))
    for core in find_network(spec).attention:
        if core and core.latent:  # whose heads' own matrices become float32
            total += 4 * core.heads * core.row.value * (core.latent.plain + core.latent.value)
    largest = spec.embedding_bytes if spec.table_bytes else spec.largest_tensor
    on_the_way = 2 * largest if {"F16", "BF16"} & {kind for kind, _ in spec.type_bytes} else 0
    return int(total) + (largest if spec.tied_head and spec.vocab else 0) + on_the_way


def _packed_head(spec: ModelSpec) -> int:
    """Bytes of the output head that exist twice while ONNX Runtime packs it for its kernels."""
    values = spec.vocab * spec.hidden
    bits = 8 * spec.embedding_bytes / values  # in the file
    if bits >= 16:
        return 0  # `_weights` counts floats twice
    return int(values * (_value_bytes("Q4_0") if spec.tied_head and bits < 4.6 else _value_bytes("Q8_0")))


def _value_bytes(kind: str) -> float:
    if kind in FORM_TYPES:
        values, size = FORM_TYPES[kind]
        return size / values
    bits = bits_of(kind)
    if bits == 32:
        return 4.0
    scale, minimum = 4 / BLOCK, has_minimum(kind, bits)
    return (bits / 8 + scale) * (1 + minimum / BLOCK) + minimum / 2 / BLOCK
