"""The weights of an ONNX model, their forms and places in the data file, determined before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from math import prod

import numpy as np

from edge.backends.checks import check_cores, hybrid_cores, usual_cores
from edge.backends.onnx.graph.forms import Array, Blocks, Floats, Form, Int8, NormalFloats
from edge.backends.onnx.graph.matmul_nbits import bits_of, has_minimum, is_exact
from edge.backends.ring import LayerKinds
from edge.errors import UnsupportedError
from edge.formats import nf4
from edge.formats.blocks import BLOCK, FLOATS
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.cores import Attention, Core, Experts, KimiDelta, PerLayerInput, SelectiveScan
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.records import dataclass
from edge.types import FloatArray

_PAGE = 4096  # where tensors begin: mapped files are read page by page
_HEAD_MULTIPLE = 8  # of GroupQueryAttention


@dataclass(frozen=True)
class Method:
    """A quantization method that replaces the forms of block types. Embedding and head keep the file's.

    `multiplied` and `divided` together change only the magnitude of activations (SmoothQuant); such matrices are Int8.
    """

    name: str = ""
    form: Form | None = None  # of all matrices within layers; None: as their types say
    forms: Mapping[str, Form] = field(default_factory=dict)  # likewise, by matrix (`blk.0.attn_q`)
    multiplied: Mapping[str, FloatArray] = field(default_factory=dict)  # columns of matrices, float32 [columns]
    divided: Mapping[str, FloatArray] = field(default_factory=dict)  # vectors, or rows of matrices, float32 [rows]

    def form_of(self, name: str, columns: int) -> Form | None:
        """The form of a matrix; None: that of its block types. name: the first part's, where matrices are joined."""
        if not name.startswith("blk."):
            return None
        form = self.forms.get(name, self.form)
        return None if isinstance(form, NormalFloats) and columns % nf4.BLOCK else form


AS_IT_IS = Method()


@dataclass(frozen=True)
class SourceRows:
    """Rows of a tensor of the file."""

    name: str
    source: Source
    order: tuple[int, ...]  # of each head's rows in the graph; empty: the file's


@dataclass(frozen=True)
class Matrix:
    """A matrix of the graph: rows of one or more tensors of the file, concatenated or alternating."""

    parts: tuple[SourceRows, ...]
    rows: int
    columns: int
    form: Form
    in_turn: bool = False

    def row(self, part: int, row: int) -> int:
        """The index in the matrix of a part's row."""
        if self.in_turn:
            return row * len(self.parts) + part
        return sum(each.source.rows for each in self.parts[:part]) + row


@dataclass(frozen=True)
class Place:
    """The place of an array in the data file."""

    array: Array
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.array.shape) * self.array.numpy.itemsize


@dataclass(frozen=True)
class Layout:
    """The arrays of a model by name: matrix `blk.0.qkv` joins attn_q, attn_k and attn_v, and has arrays such as
    `blk.0.qkv.scales`, depending on its form."""

    matrices: dict[str, Matrix]
    vectors: dict[str, tuple[SourceRows, ...]]
    places: dict[str, Place]
    nbytes: int
    method: Method

    @property
    def types(self) -> dict[str, str]:
        """Names of forms that GGUF lacks, by tensor of the file."""
        forms = ((part.source.tensor, matrix.form) for matrix in self.matrices.values() for part in matrix.parts)
        return {name: form.type for name, form in forms if isinstance(form, (NormalFloats, Int8))}

    @property
    def outliers(self) -> dict[str, list[int]]:
        """Input channels that matrices of int8 keep in float32."""
        first = ((matrix.parts[0].name, matrix.form) for matrix in self.matrices.values())
        return {name: list(form.outliers) for name, form in first if isinstance(form, Int8) and form.outliers}

    def rounded_types(self, file: GGUFFile) -> list[str]:
        """Block types of the file whose weights are rounded a second time, since ONNX Runtime lacks their grid."""
        found = set()
        for matrix in self.matrices.values():
            kinds = {file.tensors[part.source.tensor].type for part in matrix.parts}
            if isinstance(matrix.form, Blocks):
                found |= {kind for kind in kinds if not is_exact(kind, matrix.form.bits)}
            elif not isinstance(matrix.form, Floats):
                found |= kinds
        return sorted(found)


def encoder_cores(core: Core) -> str | None:
    """Why graphs of encoders cannot express a core."""
    if isinstance(core, Attention):
        if core.window or core.across:
            return f"encoders with {'windows' if core.window else 'cross attention'}"
        core = replace(core, causal=True, unit_values=False)
    return usual_cores(core)


def supports(core: Core) -> str | None:
    """Why dynamic graphs cannot express a core."""
    if isinstance(core, Experts):
        return None if core.activation == "silu" else f"experts with {core.activation}"
    if isinstance(core, PerLayerInput):
        return None
    if isinstance(core, Attention):
        core = replace(core, sinks=False, unit_values=False, rows_of=None, across=False)
    if isinstance(core, Attention) and core.latent:
        core = replace(core, latent=None, value_dim=0, shared_values=False, rope=replace(core.rope, first=0))
    return hybrid_cores(core)


def check_static(spec: ModelSpec) -> None:
    """Refuse models that static graphs cannot express. Raises UnsupportedError."""
    if None in check_cores("NPU", spec, _static_cores).attention:
        raise UnsupportedError("NPUs run models with attention in all layers: use --backend=llamacpp")
    check_network(spec)


def _static_cores(core: Core) -> str | None:
    if isinstance(core, PerLayerInput):
        return None
    return usual_cores(replace(core, unit_values=False, rows_of=None) if isinstance(core, Attention) else core)


def check_network(spec: ModelSpec) -> Network:
    """The model's layers. Raises UnsupportedError for models that the graph cannot express."""
    if spec.encoder and not spec.vocab:  # of pictures or sounds
        network = check_cores("onnx engine", spec, encoder_cores)
        if any(block.sum_norm or block.joint_norm or block.replaces for each in network.layers for block in each):
            raise UnsupportedError("the onnx engine does not run such an encoder yet: use --backend=cpu")
        return network
    network = check_cores("onnx engine", spec, supports)
    attention = [core for core in network.attention if core]
    kinds = LayerKinds.of(network.windows, network.rowless)
    forms: list[list[object]] = [[(core.heads, core.temperature) for core in attention]]
    stored = [row and row.sizes for row in network.rows]
    forms += [[stored[layer] for layer in layers] for layers in (kinds.whole, kinds.ringed)]
    forms += [[core.head_dim for core in attention if core.rope == rope] for rope in network.ropes]
    if any(len({*each}) > 1 for each in forms):
        raise UnsupportedError("the model has layers of several forms: use --backend=llamacpp")
    for size in sorted({core.head_dim for core in attention}):
        if size % _HEAD_MULTIPLE:
            raise UnsupportedError(
                f"ONNX Runtime's attention wants heads of a multiple of {_HEAD_MULTIPLE} values, not {size}: "
                "use --backend=cpu"
            )
    return network


def orders(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """For matrices of which RoPE rotates products, and their norms, by names without an ending: the permutation of
    a head's values from the file's order to the graph's, if it is another.

    ONNX Runtime rotates pairs with one value in each half of the head. Conversion to GGUF puts them side by side in
    Llama models; with partial RoPE, values that are not rotated fill the rest of the halves.
    """
    network = find_network(spec)
    if all(rope.still for rope in network.ropes):
        return {}
    pairs = max(rope.dim for rope in network.ropes) // 2
    rotated = np.arange(2 * pairs).reshape(2, pairs) if network.halves else np.arange(2 * pairs).reshape(pairs, 2).T
    core = next(core for core in network.attention if core)
    if core.latent:  # whose rotated values are the last, apart from the others
        firsts = dict.fromkeys(("attn_q", "attn_q_b"), core.latent.plain) | {"attn_kv_a_mqa": core.row.value}
        found = {name: [*range(first), *(rotated.reshape(-1) + first).tolist()] for name, first in firsts.items()}
    else:
        if core.rope.apart:
            quarters = np.arange(2 * pairs).reshape(2, 2, -1)
            rotated = quarters.swapaxes(0, 1).reshape(2, pairs)
        others = np.arange(2 * pairs, spec.head_dim).reshape(2, -1)
        order = np.concatenate([rotated, others], axis=1).reshape(-1).tolist()
        found = dict.fromkeys(("attn_q", "attn_k", "attn_q_norm", "attn_k_norm"), order)
    layers = [layer for layer, core in enumerate(network.attention) if core]
    changed = {name: tuple(order) for name, order in found.items() if order != list(range(len(order)))}
    return {f"blk.{layer}.{name}": order for layer in layers for name, order in changed.items()}


def rows_in(info: TensorInfo, source: Source) -> int:
    """Rows of a whole tensor of the file, as its source counts them: values, of vectors."""
    if source.is_row:
        return 1
    return info.elements if source.rows == info.elements else info.rows


def products_of(core: Core) -> dict[str, tuple[str, ...]]:
    """Matrices grouped by product: queries, keys and values share one."""
    if isinstance(core, Attention) and core.latent:
        ranked = ("attn_q_b",) if core.latent.rank else ()
        return {name: (name,) for name in (*core.inputs, *ranked, core.output)}
    if isinstance(core, Attention):
        return {"qkv": core.inputs, core.output: (core.output,)} | {name: (name,) for name in core.crossing}
    if isinstance(core, Experts):
        shared = (*core.inputs[2:], *core.outputs[1:])
        return {name: (name,) for name in (*core.routers, *shared)}
    behind = (
        ("ssm_x", "ssm_dt") if isinstance(core, SelectiveScan) else core.gates if isinstance(core, KimiDelta) else ()
    )
    return {name: (name,) for name in (*core.inputs, *behind, core.output)}


def form_for(kinds: Sequence[str], columns: int, *, looked_up: bool = False) -> Form:
    """The form that stores weights of these block types, lossless for floats and 4 bits.

    looked_up: rows are read individually, so there are no columns for means.
    """
    if any(kind in FLOATS for kind in kinds) or columns % BLOCK:
        same = len(set(kinds)) == 1
        return Floats({"F16": "float16", "BF16": "bfloat16"}.get(kinds[0], "float32") if same else "float32")
    bits = max(bits_of(kind) for kind in kinds)
    minima = any(has_minimum(kind, bits) for kind in kinds)
    return Blocks(8) if looked_up and minima else Blocks(bits, minima)


def make_layout(file: GGUFFile, spec: ModelSpec, method: Method = AS_IT_IS) -> Layout:
    """Lay out a model's weights. Raises UnsupportedError, and the errors of `find_tensors`."""
    network, found = check_network(spec), find_tensors(file, spec)
    maker = _Maker(file, found, orders(spec), method)
    if spec.vocab:
        maker.table("token_embd")
    if network.layer_inputs:
        maker.table("per_layer_token_embd")
        maker.matrix("per_layer_model_proj", "per_layer_model_proj")
        maker.norm("per_layer_proj_norm")
    if network.learned_positions:
        maker.vector("position_embd", "position_embd")
    for layer, blocks in enumerate(network.layers):
        at = f"blk.{layer}."
        for tensor in (tensor for block in blocks for tensor in block.tensors(spec.hidden)):
            if not tensor.columns and not tensor.name.endswith(".bias"):
                maker.norm(at + tensor.name)
        for block in blocks:
            for name, parts in products_of(block.core).items():
                maker.matrix(at + name, *(at + part for part in parts))
            if isinstance(block.core, Experts):
                maker.experts(at, block.core)
            for tensor in block.core.tensors(spec.hidden):
                if at + tensor.name not in maker.used:  # factors of recurrent cores
                    maker.vector(at + tensor.name, at + tensor.name)
    maker.norm("output_norm")
    if not spec.tied_head and spec.vocab:
        maker.matrix("output", "output")
    if unused := sorted(name for name in set(found) - maker.used if not name.startswith("rope_")):
        raise UnsupportedError(f"the ONNX writer does not know the tensor {unused[0]}: use --backend=cpu")
    return Layout(maker.matrices, maker.vectors, maker.places, maker.end, method)


class _Maker:
    """Lays out arrays one after the other."""

    def __init__(
        self, file: GGUFFile, found: dict[str, Source], orders: Mapping[str, tuple[int, ...]], method: Method
    ) -> None:
        self._file, self._found, self._orders, self._method = file, found, orders, method
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, tuple[SourceRows, ...]] = {}
        self.places: dict[str, Place] = {}
        self.used: set[str] = set()
        self.end = 0

    def table(self, name: str) -> None:
        """Add a matrix whose rows are also looked up."""
        parts = self._parts((name,))
        info = self._file.tensors[parts[0].source.tensor]
        self._matrix(name, parts, form_for([info.type], info.shape[0], looked_up=True))

    def matrix(self, name: str, *names: str) -> None:
        parts = self._parts(names)
        infos = [self._file.tensors[part.source.tensor] for part in parts]
        plain = form_for([info.type for info in infos], infos[0].shape[0])
        self._matrix(name, parts, self._method.form_of(names[0], infos[0].shape[0]) or plain)
        biases = [f"{each}.bias" for each in names]
        if all(bias in self._found for bias in biases):
            self.vector(f"{name}.bias", *biases)

    def experts(self, at: str, core: Experts) -> None:
        """Add the matrices of all experts: gates and ups in turn, and downs."""
        names = (at + core.inputs[0], at + core.inputs[1], at + core.output)
        infos = [self._file.tensors[self._found[name].tensor] for name in names]
        floats = any(info.type in FLOATS or info.shape[0] % BLOCK for info in infos)
        for chosen, own in ((names[:2], infos[:2]), (names[2:], infos[2:])):
            kinds = [info.type for info in own]
            # Block means cannot be appended to inputs within the operator, so types with minima are rounded.
            form = Floats() if floats else form_for(kinds, own[0].shape[0], looked_up=True)
            self._matrix(chosen[0], self._parts(chosen), form, in_turn=len(chosen) > 1)
            if core.biases:
                self.vector(f"{chosen[0]}.bias", *(f"{name}.bias" for name in chosen))

    def norm(self, name: str) -> None:
        """Add a norm and its bias, if the model has them."""
        for each in (name, f"{name}.bias"):
            if each in self._found:
                self.vector(each, each)

    def vector(self, name: str, *names: str) -> None:
        """Add a vector, stored as float32."""
        parts = self.vectors[name] = self._parts(names)
        info = self._file.tensors[parts[0].source.tensor]
        columns = info.shape[:1] if rows_in(info, parts[0].source) < info.elements else ()
        self._place(name, Array("float32", (sum(part.source.rows for part in parts), *columns)))

    def _matrix(self, name: str, parts: tuple[SourceRows, ...], form: Form, *, in_turn: bool = False) -> None:
        rows, columns = sum(part.source.rows for part in parts), self._file.tensors[parts[0].source.tensor].shape[0]
        self.matrices[name] = Matrix(parts, rows, columns, form, in_turn)
        for suffix, array in form.arrays(rows, columns).items():
            self._place(f"{name}.{suffix}", array)

    def _parts(self, names: tuple[str, ...]) -> tuple[SourceRows, ...]:
        self.used.update(names)
        orders = [self._orders.get(name.removesuffix(".bias"), ()) for name in names]
        return tuple(SourceRows(name, self._found[name], order) for name, order in zip(names, orders, strict=True))

    def _place(self, name: str, array: Array) -> None:
        self.places[name] = place = Place(array, self.end)
        self.end += -(-place.nbytes // _PAGE) * _PAGE
