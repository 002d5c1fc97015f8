"""Where everything lies: matrices in the packed file of weights, and rows of the scratch memory. No TVM is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from edge.backends.tvm.blocks import BLOCKS
from edge.backends.tvm.blocks.base import Block
from edge.backends.tvm.targets import Target
from edge.errors import UnsupportedError
from edge.gguf_file import GGUFFile
from edge.model import ModelSpec

ALIGNMENT = 64  # bytes: what the widest loads want
LINE = 32  # int32 words between two threads' counters: two cache lines, as neighbours are fetched together

NORMS = ("attn_norm", "ffn_norm")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
GROUPS = {  # matrices that one phase of the pass multiplies
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
PER_HEAD = {"attn_q", "attn_k", "attn_v"}  # their rows are heads, each rounded up to whole tiles


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Shape:
    """The sizes that kernels are compiled for, with those rounded up to whole vectors."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    norm_eps: float
    window: int  # sliding window, 0 for none

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        return cls(
            spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab, spec.norm_eps,
            spec.window,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_head(self) -> int:
        return round_up(self.head, 16)

    @property
    def padded_hidden(self) -> int:
        return round_up(self.hidden, 32)

    @property
    def padded_mixed(self) -> int:
        """The heads' outputs side by side."""
        return round_up(self.heads * self.head, 32)

    @property
    def padded_ffn(self) -> int:
        return round_up(self.ffn, 32)

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab, 16)

    @property
    def widest(self) -> int:
        """The longest row of activations."""
        return max(self.padded_hidden, self.padded_mixed, self.padded_ffn)


@dataclass(frozen=True)
class Place:
    """A tensor in the packed file: bytes from its start. Vectors have no scales."""

    tensor: str
    rows: int  # padded
    columns: int
    quants: int
    scales: int
    nbytes: int
    block: Block | None  # None: a vector of float32, `rows` long


@dataclass(frozen=True)
class Layout:
    """Every tensor's place. `nbytes`: the size of the packed data."""

    shape: Shape
    places: dict[str, Place]
    nbytes: int

    @cached_property
    def variants(self) -> dict[str, list[tuple[str, ...]]]:
        """For each group of matrices, the combinations of block types that occur in some layer."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for group in GROUPS:
            each = (self.blocks_of(group, layer) for layer in range(self.shape.layers))
            found[group] = list(dict.fromkeys(each))
        return found

    def blocks_of(self, group: str, layer: int) -> tuple[str, ...]:
        blocks = (self.places[f"blk.{layer}.{name}"].block for name in GROUPS[group])
        return tuple(block.name for block in blocks if block is not None)

    @property
    def head(self) -> str:
        return "output" if "output" in self.places else "token_embd"


def make_layout(file: GGUFFile, spec: ModelSpec) -> Layout:
    """Raises UnsupportedError for block types that have no kernels."""
    shape = Shape.of(spec)
    places: dict[str, Place] = {}
    at = 0
    for name in _tensor_names(file, spec):
        place = _place(file, shape, name, at)
        places[name] = place
        at = round_up(place.quants + place.nbytes, ALIGNMENT)
    return Layout(shape, places, at)


def _tensor_names(file: GGUFFile, spec: ModelSpec) -> Iterator[str]:
    """In the order in which a pass reads them."""
    yield "token_embd"
    for layer in range(spec.layers):
        for name in ("attn_norm", *MATRICES[:4], "ffn_norm", *MATRICES[4:]):
            yield f"blk.{layer}.{name}"
    yield "output_norm"
    if not spec.tied_head:
        yield "output"


def _place(file: GGUFFile, shape: Shape, name: str, at: int) -> Place:
    info = file.tensors[f"{name}.weight"]
    stem = name.rpartition(".")[2]
    if len(info.shape) == 1:
        rows = round_up(info.shape[0], 32)
        return Place(info.name, rows, 1, at, 0, 4 * rows, None)
    columns, rows = info.shape
    block = BLOCKS.get(info.type)
    if block is None:
        raise UnsupportedError(
            f"the tvm engine has no kernels for {info.type} ({info.name}) yet: use --backend llamacpp"
        )
    rows = rows // shape.head * shape.padded_head if stem in PER_HEAD else round_up(rows, 16)
    quants, scales = block.packed_bytes(rows, columns)
    start = round_up(at + quants, ALIGNMENT)
    return Place(info.name, rows, columns, at, start, start - at + scales, block)


class Job:
    """What the threads are to do next: an int64 array that thread 0 fills before it wakes the others.

    angle: row of the rotary table for the first token. wanted: rows of logits.
    observed: last tokens whose attention is added up.
    """

    NAMES = ("kind", "threads", "count", "position", "angle", "wanted", "observed")
    QUIT, STEP, CHUNK = 0, 1, 2

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)


class Table:
    """Numbers that a compiled pass reads from an int64 array: offsets that depend on the weights or on the run."""

    NAMES = (
        "capacity",
        "x", "normed", "queries", "query_rows", "mixed", "ffn", "work", "part_stride", "raw",
        "words", "corrections", "scales", "sums",
        "embedding", "embedding_scales", "output_norm", "head", "head_scales",
    )  # fmt: skip
    PER_LAYER = 2 * len(MATRICES) + len(NORMS) + len(GROUPS)

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)

    @classmethod
    def layer_slot(cls, name: str, scales: bool = False) -> int:
        """Within a layer's slots: a matrix's quants or scales, a norm, or the variant of a group."""
        if name in NORMS:
            return 2 * len(MATRICES) + NORMS.index(name)
        if name in GROUPS:
            return 2 * len(MATRICES) + len(NORMS) + list(GROUPS).index(name)
        return 2 * MATRICES.index(name) + scales


def fill_table(layout: Layout, scratch: Scratch, capacity: int) -> list[int]:
    """The whole table for one run; `capacity` in rows as allocated."""
    places = layout.places
    values = dict.fromkeys(Table.NAMES, 0) | {
        "capacity": capacity,
        **scratch.offsets,
        "embedding": places["token_embd"].quants,
        "embedding_scales": places["token_embd"].scales,
        "output_norm": places["output_norm"].quants // 4,
        "head": places[layout.head].quants,
        "head_scales": places[layout.head].scales,
    }
    table = [values[name] for name in Table.NAMES]
    for layer in range(layout.shape.layers):
        slots = [0] * Table.PER_LAYER
        for name in MATRICES:
            place = places[f"blk.{layer}.{name}"]
            slots[Table.layer_slot(name)], slots[Table.layer_slot(name, True)] = place.quants, place.scales
        for name in NORMS:
            slots[Table.layer_slot(name)] = places[f"blk.{layer}.{name}"].quants // 4
        for group, variants in layout.variants.items():
            slots[Table.layer_slot(group)] = variants.index(layout.blocks_of(group, layer))
        table += slots
    return table


@dataclass(frozen=True)
class Scratch:
    """What a pass works in: two arenas, of float32 and of int32, in elements. It depends on the longest chunk only."""

    floats: int
    integers: int
    offsets: dict[str, int]


def work_offsets(shape: Shape, target: Target) -> dict[str, int]:
    """A thread's memory for attention: outputs, maxima and sums of its query rows, and one block of scores."""
    lines = max(shape.heads, target.score_rows)
    scores = round_up(lines * (shape.padded_head + 2), 16)
    return {
        "maxima": lines * shape.padded_head,
        "sums": lines * (shape.padded_head + 1),
        "scores": scores,
        "size": scores + target.score_rows * max(target.step_block, target.chunk_block) * 16,
    }


def make_scratch(shape: Shape, target: Target, chunk: int, threads: int, observed_rows: int = 0) -> Scratch:
    """Rows serve the tokens of a chunk, or in decode each thread its own copy. observed_rows: the cache's, if any."""
    tokens = round_up(chunk, target.gemm_tokens)
    rows = max(tokens, threads)
    query_rows = round_up(tokens * shape.group, target.score_rows) + target.score_rows
    part = work_offsets(shape, target)["size"]
    blocks = shape.widest // 32
    floats = {
        "x": tokens * shape.padded_hidden,
        "normed": rows * shape.padded_hidden,
        "queries": shape.kv_heads * query_rows * shape.padded_head,
        "mixed": rows * shape.padded_mixed,
        "ffn": tokens * shape.padded_ffn,
        "work": threads * part,
        "raw": threads * observed_rows,
        "scales": rows * blocks,
        "sums": rows * blocks,
    }
    integers = {"words": rows * shape.widest // 4, "corrections": rows * blocks}
    offsets = {"query_rows": query_rows, "part_stride": part}
    totals = []
    for arena in (floats, integers):
        at = 0
        for name, count in arena.items():
            offsets[name] = at
            at = round_up(at + count, 16)
        totals.append(at + 64)  # the last rows may be read a little beyond their end
    return Scratch(totals[0], totals[1], offsets)
