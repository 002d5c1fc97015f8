"""Where everything lies: matrices in the packed file of weights, and rows of the scratch memory. No TVM is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from edge.backends.tvm.packing.blocks import BLOCKS, Block
from edge.backends.tvm.targets import Target
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec, Recipe
from edge.model.tensors import BIASES, MATRICES, NORMS, Source, find_recipe, find_tensors

ALIGNMENT = 64  # bytes: what the widest loads want
LINE = 32  # int32 words between two threads' counters: two cache lines, as neighbours are fetched together

GROUPS = {  # matrices that one phase of the pass multiplies
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_PER_HEAD = {"attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm"}  # heads, each rounded up to whole tiles
_TURNED = _PER_HEAD - {"attn_v"}  # where RoPE turns halves, their rows are packed so that pairs are neighbours
_READING_ORDER = (
    "attn_norm", *MATRICES[:3], "attn_q_norm", "attn_k_norm", "attn_output", "post_attention_norm",
    "ffn_norm", *MATRICES[4:], "post_ffw_norm",
)  # fmt: skip
_SEES_ALL = 1 << 30  # a window that no position is beyond

Blocks = tuple[int, int]  # of the packed file: the first one, and how many


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
    windowed: bool  # some layers have a sliding window
    norm: str
    activation: str
    gated: bool
    query_scale: float
    embedding_scale: float
    score_cap: float
    logit_cap: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        recipe = find_recipe(spec)
        return cls(
            spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab, spec.norm_eps,
            any(recipe.windows), recipe.norm, recipe.activation, recipe.gated, recipe.query_scale,
            recipe.embedding_scale, recipe.score_cap, recipe.logit_cap,
        )  # fmt: skip

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Matrices that one phase multiplies."""
        return GROUPS if self.gated else GROUPS | {"gate_up": ("ffn_up",)}

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

    source: Source
    rows: int  # padded
    columns: int
    quants: int
    scales: int
    nbytes: int
    block: Block | None  # None: a vector of float32, `rows` long
    unit: int  # rows of the source that are rounded up to whole tiles together
    turned: int  # first rows of each unit whose halves are interleaved, 0 for none


@dataclass(frozen=True)
class Layout:
    """Every tensor's place. `nbytes`: the size of the packed data."""

    shape: Shape
    recipe: Recipe
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
        blocks = (self.places[f"blk.{layer}.{name}"].block for name in self.shape.groups[group])
        return tuple(block.name for block in blocks if block is not None)

    @property
    def vectors(self) -> list[str]:
        """Norms and biases that every layer has, and `output_norm.bias` if there is one."""
        found = [name for name in (*NORMS, *BIASES) if f"blk.0.{name}" in self.places]
        return found + ["output_norm.bias"] * ("output_norm.bias" in self.places)

    @property
    def head(self) -> str:
        return "output" if "output" in self.places else "token_embd"


def make_layout(file: GGUFFile, spec: ModelSpec) -> Layout:
    """Raises UnsupportedError for tensors that are unknown, and for block types that have no kernels."""
    shape, recipe, tensors = Shape.of(spec), find_recipe(spec), find_tensors(file, spec)
    turned = spec.rope_dim if recipe.ropes and recipe.halves else 0
    places: dict[str, Place] = {}
    at = 0
    for name in _reading_order(spec.layers):
        if name in tensors:
            stem = name.removesuffix(".bias").rpartition(".")[2]
            unit = shape.head if stem in _PER_HEAD else 16
            place = _place(file, tensors[name], at, unit, turned if stem in _TURNED else 0)
            places[name] = place
            at = round_up(place.quants + place.nbytes, ALIGNMENT)
    return Layout(shape, recipe, places, at)


def _reading_order(layers: int) -> Iterator[str]:
    """Names of all tensors that there could be, in the order in which a pass reads them."""
    yield from ("token_embd", "position_embd")
    for layer in range(layers):
        for name in _READING_ORDER:
            yield from (f"blk.{layer}.{name}", f"blk.{layer}.{name}.bias")
    yield from ("output_norm", "output_norm.bias", "output")


def _place(file: GGUFFile, source: Source, at: int, unit: int, turned: int) -> Place:
    info = file.tensors[source.tensor]
    rows = -(-source.rows // unit) * round_up(unit, 16)
    if len(info.shape) == 1:
        rows = round_up(rows, 32)
        return Place(source, rows, 1, at, 0, 4 * rows, None, unit, turned)
    block = BLOCKS.get(info.type)
    if block is None:
        raise UnsupportedError(
            f"the tvm engine has no kernels for {info.type} ({info.name}) yet: use --backend llamacpp"
        )
    quants, scales = block.packed_bytes(rows, info.shape[0])
    start = round_up(at + quants, ALIGNMENT)
    return Place(source, rows, info.shape[0], at, start, start - at + scales, block, unit, turned)


class Job:
    """What the threads are to do next: an int64 array that thread 0 fills before it wakes the others.

    angle: row of the rotary table for the first token. wanted: rows of logits.
    observed: last tokens whose attention is added up; votes: 1 to count instead how often a row gets more than average.
    disk: 1 if streamed weights come from one (streaming.py).
    """

    NAMES = ("kind", "threads", "count", "position", "angle", "wanted", "observed", "votes", "disk")
    QUIT, STEP, CHUNK = 0, 1, 2

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)


class Table:
    """Numbers that a compiled pass reads from an int64 array: offsets that depend on the weights or on the run.

    Behind the layers' numbers come four for each piece of streamed weights.
    """

    NAMES = (
        "x", "normed", "queries", "query_rows", "mixed", "ffn", "work", "part_stride", "raw", "raw_stride", "mirrors",
        "words", "scales", "corrections", "sums", "half_corrections", "half_sums",
        "token_embd", "token_embd.scales", "position_embd", "position_embd.scales",
        "output_norm", "output_norm.bias", "head", "head.scales",
        "block", "head_step", "head_parts",  # streaming.py
    )  # fmt: skip
    PER_LAYER = (
        *MATRICES, *(f"{name}.scales" for name in MATRICES), *NORMS, *BIASES,
        *GROUPS,  # which variant
        "window",  # positions that a token sees
        "angles",  # where the layer's table of rotary angles begins
    )  # fmt: skip

    @classmethod
    def slot(cls, name: str) -> int:
        return cls.NAMES.index(name)

    @classmethod
    def layer_slot(cls, name: str) -> int:
        """Within a layer's slots."""
        return cls.PER_LAYER.index(name)

    @classmethod
    def first_piece(cls, layers: int) -> int:
        return len(cls.NAMES) + layers * len(cls.PER_LAYER)


@dataclass(frozen=True)
class Streams:
    """The blocks of the packed file that a pass evicts.

    pieces: blocks that are evicted together, two ranges each: of every layer, of every group of `head_step` tiles of
    the head, and those from which embeddings are taken. kept: blocks that stay.
    """

    block: int  # bytes
    pieces: list[tuple[Blocks, Blocks]]
    kept: list[Blocks]
    head_step: int

    @property
    def table(self) -> list[int]:
        """Four numbers for each piece."""
        return [number for piece in self.pieces for blocks in piece for number in blocks]


def fill_table(layout: Layout, scratch: Scratch, rope_size: int, streams: Streams | None = None) -> list[int]:
    """The whole table for one run; `rope_size` in values of one table of angles. streams: None if weights stay."""
    values = dict(scratch.offsets) | {"head_step": layout.shape.padded_vocab // 16, "head_parts": 1}
    if streams:
        parts = len(streams.pieces) - layout.shape.layers - 1
        values |= {"head_step": streams.head_step, "head_parts": parts, "block": streams.block}
    for name in ("token_embd", "position_embd", "output_norm", "output_norm.bias"):
        values |= _offsets(layout, name, name)
    values |= _offsets(layout, layout.head, "head")
    table = [values.get(name, 0) for name in Table.NAMES]
    for layer in range(layout.shape.layers):
        values = {
            "window": layout.recipe.windows[layer] or _SEES_ALL,
            "angles": layout.recipe.rope_of(layer) * rope_size,
        }
        for name in (*MATRICES, *NORMS, *BIASES):
            values |= _offsets(layout, f"blk.{layer}.{name}", name)
        for group, variants in layout.variants.items():
            values[group] = variants.index(layout.blocks_of(group, layer))
        table += [values.get(name, 0) for name in Table.PER_LAYER]
    return table + (streams.table if streams else [0] * 4 * (layout.shape.layers + 2))


def _offsets(layout: Layout, tensor: str, name: str) -> dict[str, int]:
    """Of matrices in bytes, of vectors in values; nothing if the model has no such tensor."""
    place = layout.places.get(tensor)
    if place is None:
        return {}
    return {name: place.quants // 4} if place.block is None else {name: place.quants, f"{name}.scales": place.scales}


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
    """Rows serve the tokens of a chunk, or in decode each thread its own copy.

    observed_rows: those that one head may hold, if attention is observed, in whole tiles.
    """
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
        "half_sums": rows * 2 * blocks,
        "mirrors": shape.layers * shape.kv_heads * shape.padded_head,  # mirror.py; 0 where rows are not turned
    }
    integers = {
        "words": rows * shape.widest // 4,
        "corrections": rows * blocks,
        "half_corrections": rows * 2 * blocks,
    }
    offsets = {"query_rows": query_rows, "part_stride": part, "raw_stride": observed_rows}
    totals = []
    for arena in (floats, integers):
        at = 0
        for name, count in arena.items():
            offsets[name] = at
            at = round_up(at + count, 16)
        totals.append(at + 64)  # the last rows may be read a little beyond their end
    return Scratch(totals[0], totals[1], offsets)
