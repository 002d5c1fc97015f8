"""Everything that a model's GPU kernels depend on, as data. TVM is not needed."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.rope import find_rotation
from edge.backends.tvm.cpu.arguments import cross_dtype
from edge.backends.tvm.gpu import ENGINE
from edge.backends.tvm.gpu.adapters import Adapters
from edge.backends.tvm.gpu.hosts import Adapter
from edge.backends.tvm.gpu.picking import found_bytes
from edge.backends.tvm.gpu.weights import WeightsLayout, make_weights
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.shape import Shape
from edge.formats.gguf import GGUFFile
from edge.model.cores import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Mamba,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)
from edge.model.structure.layers import Block
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass

ANGLES_AHEAD = 64  # decode steps for which angles are computed at once
KEYS, VALUES = 1, 2  # the parts of a row that a move copies
RING_MOVE = "edge_move_ring"  # the kernel that moves rows of an arena of rings alone
CROSS, CROSS_MOVE = "cross_", "edge_move_cross"  # before names of the buffers that attention reads across; its kernel
MOST_MOVED = 4096  # pairs of rows that are moved at once
PICKS = 256  # ids that may be picked before the host reads them
LANES = 16  # heads of KV rows are padded to multiples of this
ALIGNMENT = 64  # words, between the parts of `Tables`: 256 bytes


class State:
    """Indices of the words at the start of `tables`."""

    COUNT = 0  # tokens of this pass
    APPENDED = 1  # rows that passes have appended since lengths were uploaded
    ANGLE = 2  # row of the table of angles for the pass's first token
    POSITION = 3  # of the first token
    WANTED = 4  # last tokens whose logits are wanted
    OBSERVED = 5  # last tokens whose attention is accumulated
    VOTES = 6  # 1: count instead the tokens that pay a row more than the average
    PICKED = 7  # ids picked since this was uploaded
    BANNED = 8  # number of ids that argmax never picks
    SPAN = 9  # the first token of a span that sees all of itself, of which a pass has one at most …
    SPAN_STOP = 10  # … and the token behind it; 0: there is none
    BANS = 16  # where tokens are that argmax never picks
    WORDS = 64
    MOST_BANS = WORDS - BANS


@dataclass(frozen=True)
class Tables:
    """Offsets, in words, into the buffer `tables`."""

    starts: int  # [together, layers, KV heads]: a head's first row in the arena
    lengths: int  # [together, layers, KV heads]: a head's rows in use
    angles: int  # float32 [kinds, angle_rows, 2, pairs]: cosines, then sines, for consecutive positions
    temperatures: int  # float32 [chunk]: of the queries
    normals: int  # float32 [layers, KV heads, normal]: of the reflections of keys
    positions: int  # [rows of the arena]; last, since their number is not known here
    angle_rows: int
    pairs: int
    kv_heads: int  # the most of a layer
    normal: int  # values of a normal; 0: keys are not reflected
    texts: int = 0  # [chunk, 2], of encoders: the first row that a token sees, and the number of those that it sees
    heads: int = 0  # KV heads of all layers: words from the starts and lengths of a token to those of the next one
    places: int = 0  # [together]: positions of tokens that run as if alone
    alone: bool = False  # each token runs as if alone, with starts, lengths and a place of its own

    @classmethod
    def of(
        cls, layers: int, kv_heads: int, kinds: int, chunk: int, pairs: int, normal: int = 0, *, encoder: bool = False,
        together: int = 1,
    ) -> Tables:  # fmt: skip
        """Lay out the tables. pairs: rotated values of a head / 2. together: see `Design`."""
        starts, heads = State.WORDS, layers * kv_heads
        lengths = starts + round_up(together * heads, ALIGNMENT)
        places = lengths + round_up(together * heads, ALIGNMENT)
        angles = places + round_up(together * (together > 1), ALIGNMENT)
        rows = chunk + ANGLES_AHEAD
        temperatures = angles + round_up(kinds * rows * 2 * pairs, ALIGNMENT)
        normals = temperatures + round_up(chunk, ALIGNMENT)
        texts = normals + round_up(layers * kv_heads * normal, ALIGNMENT)
        positions = texts + round_up(2 * chunk * encoder, ALIGNMENT)
        return cls(
            starts, lengths, angles, temperatures, normals, positions, rows, pairs, kv_heads, normal, texts, heads,
            places,
        )  # fmt: skip

    def angle_row(self, kind: int) -> int:
        """The first angle row of one kind of RoPE."""
        return self.angles + kind * self.angle_rows * 2 * self.pairs


@dataclass(frozen=True)
class RowForm:
    """The storage of KV rows: codes in words; for integers also a word per key and value: a float32 scale, or for int4
    the scale and the least value, both float16 (`kv/row_formats.py`).

    Keys lie in tiles of 16 rows, so that 16 threads that read 16 bytes each of 16 rows read consecutive memory; values
    row by row. head: values of a row, a multiple of LANES. shared: values are a part of keys (`RowShape.shared`).
    """

    dtype: str
    head: int
    shared: bool = False

    @classmethod
    def of(cls, core: Attention, dtype: str) -> RowForm:
        return cls(dtype, round_up(core.head_dim, LANES), core.shared_values)

    @property
    def per_word(self) -> int:
        """Values per word."""
        return {"f32": 1, "f16": 2, "int8": 4, "int4": 8}[self.dtype]

    @property
    def stored(self) -> int:
        """Values per row in memory, which are whole units."""
        return round_up(self.head, 4 * self.per_word)

    @property
    def words(self) -> int:
        """Words per row."""
        return self.stored // self.per_word

    @property
    def units(self) -> int:
        """16-byte units per row."""
        return self.words // 4

    @property
    def scaled(self) -> bool:
        return self.dtype in ("int8", "int4")

    @property
    def transformed(self) -> bool:
        """Whether keys are reflected, and all rows multiplied by H."""
        return FORMATS[self.dtype].transformed

    @property
    def scale_type(self) -> str:
        return "uint32" if self.dtype == "int4" else "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and a value."""
        return 4 * self.words * (2 - self.shared) + 8 * self.scaled


@dataclass(frozen=True)
class Tuning:
    """The division of work over threads, which `edge tune` optimizes per device."""

    rows: int = 2  # rows of a matrix per thread in a step
    split: int = 16  # threads that share a row's columns
    workgroup: int = 64  # threads of a product's workgroup
    gemm_tokens: int = 32  # tokens of a workgroup's tile in a chunk
    gemm_rows: int = 32  # rows of a workgroup's tile in a chunk
    attend: int = 128  # threads that attend for one KV head
    heads: int = 0  # query heads for which a workgroup of a step attends; 0: as many as fit its memory
    row_splits: int = 8  # workgroups that share the rows of such heads in a step behind many; 1: none do
    split_from: int = 1024  # rows of a head that are many
    stage: int = 0  # bytes of shared memory of a step's product whose activations fit there; 0: it reads them directly
    ahead: int = 0  # loads of 16 bytes that a thread of a step's product issues ahead of tensor cores; 0: it uses none
    mma_rows: int = 0  # rows of a workgroup's tile in a chunk through tensor cores; 0: there are none
    mma_tokens: int = 64  # tokens of such a tile
    mma_groups: int = 256  # workgroups that occupy the device: tiles become smaller where there are fewer

    @classmethod
    def of(cls, adapter: Adapter) -> Tuning:
        """The defaults for an adapter. CPUs run a workgroup's threads serially or as vector lanes: steps take half the
        time if none share a row."""
        if adapter.kind == "cpu":
            return cls(rows=4, split=1, workgroup=16, gemm_tokens=16, gemm_rows=16, row_splits=1)
        if "mma" in adapter.features:
            return cls(rows=2, split=32, workgroup=256, heads=1, stage=48 << 10, ahead=24, mma_rows=128)
        return cls()

    def chosen(self, config: EngineConfig) -> Tuning:
        """With the values of a record, and without splits where rows are never many."""
        known = {field.name for field in fields(Tuning)}
        tuning = replace(self, **{name: value for name, value in config.tuning.items() if name in known})
        return tuning if config.capacity >= tuning.split_from else replace(tuning, row_splits=1)


@dataclass(frozen=True)
class Design:
    """Everything that a program depends on."""

    shape: Shape
    weights: WeightsLayout
    language: str
    tuning: Tuning
    kv_dtype: str
    chunk: int
    logits_rows: int
    observes: bool  # there are passes that accumulate attention
    pairs: int  # rotated values of a head / 2
    halves: bool  # RoPE pairs value i with i + pairs, else 2i with 2i + 1
    apart: int  # pairs of a component of positions whose values stand together (`Rope.apart`); 0: of all
    forms: tuple[int, ...]  # [layers]: index into `Shape.forms`
    kinds: tuple[int, ...]  # [layers]: kind of RoPE
    windows: tuple[int, ...]  # [layers]; 0: none
    rows_of: tuple[int, ...]  # [layers]: the layer whose rows are read
    whole: tuple[int, ...]  # layers whose rows a policy keeps or evicts
    states: tuple[int, ...]  # [layers]: the first value of a layer's fixed state
    learned: bool
    adapters: Adapters  # LoRA's, that matrices may have
    together: int  # most tokens of a pass that run as if each alone (`EngineConfig.together`); 1: there is no such pass

    @classmethod
    def of(cls, file: GGUFFile, spec: ModelSpec, config: EngineConfig, adapter: Adapter) -> Design:
        """The design of a model on an adapter. Raises UnsupportedError for models that its kernels cannot run."""
        network = find_network(spec)
        rotation = find_rotation(file, network, halves=network.halves)
        tuning = Tuning.of(adapter).chosen(config)
        if "mma" not in adapter.features:
            tuning = replace(tuning, mma_rows=0, stage=0, ahead=0)
        shape, weights = ENGINE.shape_of(spec), make_weights(file, spec, adapter.limits.binding)
        adapters = Adapters.of(config.lora_rank, config.kv_dtype)
        adapters.check(weights, adapter.limits.binding)
        return cls(
            shape, weights, adapter.language, tuning, config.kv_dtype, tokens_of(config), config.logits_rows,
            config.observes, rotation.pairs, network.halves,
            max(max(each.apart, default=0) for each in rotation.angles),
            tuple(shape.forms_of(network)), rotation.kinds, network.windows,
            tuple(
                core.source(layer) if core else layer
                for layer, core in enumerate(network.attention)
            ),
            LayerKinds.of(network.windows, network.rowless).whole,
            tuple(accumulate(network.fixed_values[:-1], initial=0)), network.learned_positions, adapters,
            config.together,
        )  # fmt: skip

    def blocks(self, layer: int) -> list[Block]:
        return [self.shape.blocks[number] for number in self.shape.forms[self.forms[layer]]]

    def has_ring(self, layer: int) -> bool:
        """Whether a layer's rows lie in an arena of rings alone."""
        return self.shape.apart and self.windows[layer] > 0

    @property
    def long_layers(self) -> frozenset[int]:
        """Layers in which several workgroups share a head's rows once these are many: all that can have so many."""
        if self.tuning.row_splits == 1:
            return frozenset()
        layers = (layer for layer, most in enumerate(self.windows) if not 0 < most < self.tuning.split_from)
        return frozenset(
            layer for layer in layers if any(isinstance(block.core, Attention) for block in self.blocks(layer))
        )

    def row_form(self, core: Attention) -> RowForm:
        """The rows that a core reads."""
        return RowForm.of(core, cross_dtype(self.kv_dtype) if core.across else self.kv_dtype)

    @property
    def tables(self) -> Tables:
        shape = self.shape
        kinds, normal = max(self.kinds, default=0) + 1, normal_values(shape, self.kv_dtype)
        return Tables.of(
            shape.layers, shape.kv_heads, kinds, self.chunk, self.pairs, normal, encoder=shape.encoder,
            together=self.together,
        )  # fmt: skip

    def buffers(self, positions: int) -> dict[str, int]:
        """Bytes of all buffers except the KV cache's. positions: rows of the arena, if there are windows."""
        scratch = scratch_sizes(
            self.shape, self.tables, self.chunk, self.logits_rows, positions, self.adapters.rank,
            self.tuning.row_splits, self.together,
        )  # fmt: skip
        return self.weights.buffers | self.adapters.buffers(self.weights) | scratch

    def about(self) -> str:
        return f"{self.shape.layers} layers, {self.kv_dtype} KV, {self.language}"


def tokens_of(config: EngineConfig) -> int:
    """The most tokens of a pass."""
    return max(config.chunk, config.together)


def normal_values(shape: Shape, kv_dtype: str) -> int:
    """Values of the normal by which a head's keys are reflected; 0: they are not."""
    return shape.padded_head if FORMATS[kv_dtype].transformed else 0


def scratch_sizes(
    shape: Shape, tables: Tables, chunk: int, logits_rows: int, positions: int, rank: int = 0, splits: int = 1,
    together: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Bytes of the buffers besides weights, adapters and KV cache. rank: of adapters, padded. splits: of rows in a
    step. together: see `Design`."""
    mixtures, attention = shape.cores(Experts), shape.cores(Attention)
    latent, scans = [(core.latent, core) for core in attention if core.latent], shape.cores(SelectiveScan)
    kinds = DeltaNet | KimiDelta | Mamba | SelectiveScan
    convolved = [block.core.convolved for block in shape.blocks if isinstance(block.core, kinds)]
    shared = [round_up(core.shared, PART) for core in mixtures]
    words = {
        "tables": tables.positions + positions,
        "tokens": chunk + PICKS,
        "x": chunk * shape.padded_hidden,
        "other x": together * shape.padded_hidden,
        "normed": chunk * shape.padded_hidden,
        "held": chunk * shape.padded_hidden * any(block.held for block in shape.blocks),
        "qkv": chunk * shape.attention_inputs,
        "channels": chunk * shape.channels,
        "convolved": chunk * max(convolved, default=0),
        "mixed": chunk
        * max(
            *(round_up(core.mixed, PART) for core in attention),
            *map(shape.widths, (DeltaNet, KimiDelta, Mamba, SelectiveScan, ShortConvolution)),
        ),
        "latents": chunk
        * max(
            [each.rank + core.row.key + core.heads * each.gated for each, core in latent]
            + [core.selected for core in scans]
            + [core.rank for core in shape.cores(KimiDelta)],
            default=0,
        ),
        "ranked": chunk
        * max([each.rank for each, _ in latent] + [round_up(core.rank, PART) for core in scans], default=0),
        "queries": chunk * max((core.heads * core.query for _, core in latent), default=0),
        "expanded": chunk
        * max([core.width for _, core in latent] + [round_up(core.width, PART) for core in scans], default=0),
        "softmax": 2 * chunk * shape.heads,
        "partials": (splits > 1 and not shape.encoder)
        * splits
        * max((core.heads * partial_words(RowForm.of(core, "f32")) for core in attention), default=0),
        "layer_inputs": chunk * shape.layers * input_stride(shape.layer_inputs),
        "projected": chunk * shape.layers * shape.layer_inputs,
        "ffn": chunk * max(*map(shape.widths, (Dense, PerLayerInput)), *shared),
        "routes": chunk * max((core.number + 1 for core in mixtures), default=0),
        "chosen": chunk * max((core.used for core in mixtures), default=0),
        "shares": chunk * max((core.used + 1 for core in mixtures), default=0),
        "inner": chunk * max((core.used * round_up(core.ffn, PART) for core in mixtures), default=0),
        "deepstack": shape.deepstack * chunk * shape.padded_hidden,
        "low": chunk * shape.most_matrices * rank,
        "logits": max(logits_rows, together * (together > 1)) * shape.vocab,
    }
    return {name: 4 * size for name, size in words.items() if size} | {"found": together * found_bytes(shape.vocab)}


def partial_words(form: RowForm) -> int:
    """Words of what attention to a part of the rows leaves for a query head (kernels/attention/flash_decoding.py)."""
    return 2 + form.head


def input_stride(size: int) -> int:
    """Values from one layer's vector of a token to the next one's (`edge.model.cores.PerLayerInput`)."""
    return round_up(size, ALIGNMENT)
