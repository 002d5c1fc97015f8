"""A model's shape, and the place of each tensor in the packed file of weights. TVM is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from edge.backends.tvm.packing.blocks import BLOCKS, Block
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec, Recipe
from edge.model.tensors import BIASES, MATRICES, NORMS, Source, find_recipe, find_tensors

ALIGNMENT = 64  # bytes, as the widest loads require

GROUPS = {  # matrices that one phase of the pass multiplies
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_PER_HEAD = {"attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm"}  # heads, each rounded up to whole tiles
_ROTATED = _PER_HEAD - {"attn_v"}  # by RoPE; if it pairs halves of a head, rows are interleaved: pairs are neighbours
_READING_ORDER = (
    "attn_norm", *MATRICES[:3], "attn_q_norm", "attn_k_norm", "attn_output", "post_attention_norm",
    "ffn_norm", *MATRICES[4:], "post_ffw_norm",
)  # fmt: skip


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Shape:
    """The sizes that kernels are compiled for. The `padded_` ones are rounded up to whole vectors."""

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
    residual_scale: float
    tempered: bool  # queries have a temperature that depends on their position
    score_cap: float
    logit_cap: float
    logit_scale: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        recipe = find_recipe(spec)
        return cls(
            spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab, spec.norm_eps,
            any(recipe.windows), recipe.norm, recipe.activation, recipe.gated, recipe.query_scale,
            recipe.embedding_scale, recipe.residual_scale, recipe.temperature is not None, recipe.score_cap,
            recipe.logit_cap, recipe.logit_scale,
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
        """Values of all heads' outputs side by side."""
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
    """A tensor in the packed file. quants, scales: offsets in bytes; vectors have no scales."""

    source: Source
    rows: int  # padded
    columns: int
    quants: int
    scales: int
    nbytes: int
    block: Block | None  # None: a vector of float32, `rows` long
    unit: int  # rows of the source that are rounded up to whole tiles together
    interleaved: int  # the first rows of each unit, whose two halves are interleaved; 0 for none


@dataclass(frozen=True)
class PackedLayout:
    """The place of every tensor in the packed file. nbytes: the size of that file."""

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


def make_layout(file: GGUFFile, spec: ModelSpec) -> PackedLayout:
    """Raises UnsupportedError for unknown tensors, and for block types without kernels."""
    shape, recipe, tensors = Shape.of(spec), find_recipe(spec), find_tensors(file, spec)
    interleaved = spec.rope_dim if recipe.ropes and recipe.halves else 0
    places: dict[str, Place] = {}
    at = 0
    for name in _reading_order(spec.layers):
        if name in tensors:
            stem = name.removesuffix(".bias").rpartition(".")[2]
            unit = shape.head if stem in _PER_HEAD else 16
            place = _place(file, tensors[name], at, unit, interleaved if stem in _ROTATED else 0)
            places[name] = place
            at = round_up(place.quants + place.nbytes, ALIGNMENT)
    return PackedLayout(shape, recipe, places, at)


def _reading_order(layers: int) -> Iterator[str]:
    """The names of all possible tensors, in the order in which a pass reads them."""
    yield from ("token_embd", "position_embd")
    for layer in range(layers):
        for name in _READING_ORDER:
            yield from (f"blk.{layer}.{name}", f"blk.{layer}.{name}.bias")
    yield from ("output_norm", "output_norm.bias", "output")


def _place(file: GGUFFile, source: Source, at: int, unit: int, interleaved: int) -> Place:
    info = file.tensors[source.tensor]
    rows = -(-source.rows // unit) * round_up(unit, 16)
    if len(info.shape) == 1:
        rows = round_up(rows, 32)
        return Place(source, rows, 1, at, 0, 4 * rows, None, unit, interleaved)
    block = BLOCKS.get(info.type)
    if block is None:
        raise UnsupportedError(
            f"the tvm engine has no kernels for {info.type} ({info.name}) yet: use --backend llamacpp"
        )
    quants, scales = block.packed_bytes(rows, info.shape[0])
    start = round_up(at + quants, ALIGNMENT)
    return Place(source, rows, info.shape[0], at, start, start - at + scales, block, unit, interleaved)
