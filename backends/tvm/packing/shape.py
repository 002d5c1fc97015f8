"""The sizes that kernels are compiled for: a model's pass without what differs from layer to layer. TVM is not needed.

Layers whose blocks have the same shape share compiled code: what differs between them (windows, RoPE, block types,
places of tensors) stands in the table of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from edge.backends.checks import check_cores, plain_rows
from edge.errors import UnsupportedError
from edge.model.layers import (
    UNROTATED,
    Attention,
    Block,
    Core,
    DeltaNet,
    Dense,
    Network,
    PerLayerInput,
    ShortConvolution,
    Temperature,
)
from edge.model.spec import ModelSpec

_LANES = 16
_MOST_BLOCKS = 8  # of different shapes, each of which is compiled

Groups = dict[str, tuple[str, ...]]
"""Matrices that one phase of the pass multiplies, by the name of the phase."""


ROPE_AHEAD = 64  # decode steps for which angles are computed at once


def rope_values(tokens: int, gemm_tokens: int, head: int) -> int:
    """Values of one table of angles, for a chunk of `tokens`: its last batch may read beyond them."""
    return (max(tokens, ROPE_AHEAD) + gemm_tokens) * 2 * head


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def groups_of(core: Core) -> Groups:
    if isinstance(core, Attention):
        return {"qkv": core.inputs, "output": (core.output,)}
    if isinstance(core, DeltaNet):
        return {"delta_in": core.inputs, "delta_out": (core.output,)}
    if isinstance(core, ShortConvolution):
        return {"conv_in": core.inputs, "conv_out": (core.output,)}
    return {"gate_up": core.inputs, "down": (core.output,)}


MOST_MATRICES = 3  # of a phase of a model that runs adapters
GROUPS = ("qkv", "output", "gate_up", "down", "delta_in", "delta_out", "conv_in", "conv_out")


def supports(core: Core) -> str | None:
    """Why the kernels cannot run a core; None if they can."""
    if isinstance(core, DeltaNet) and (core.size % _LANES or core.value_size % _LANES):
        return f"gated delta nets with heads of {core.size} and {core.value_size} values"
    if isinstance(core, ShortConvolution) and core.hidden % _LANES:
        return f"short convolutions of {core.hidden} channels"
    if isinstance(core, Attention):
        return plain_rows(core)
    return core.kind if isinstance(core, PerLayerInput) else None


@dataclass(frozen=True)
class Shape:
    """blocks: the different ones, without RoPE; windows are 1 where some layer of the model has one. forms: the
    different layers, as numbers of blocks. The `padded_` sizes are rounded up to whole vectors.
    """

    layers: int
    hidden: int
    vocab: int
    norm: str
    norm_eps: float
    embedding_scale: float
    logit_cap: float
    logit_scale: float
    output_norm_bias: bool
    blocks: tuple[Block, ...]
    forms: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        """Raises UnsupportedError for cores without kernels, and for layers that differ too much."""
        network = check_cores("cpu engine", spec, supports)
        layers = [tuple(_shape_of(block, network) for block in layer) for layer in network.layers]
        blocks = tuple(dict.fromkeys(block for layer in layers for block in layer))
        attention = {(core.heads, core.kv_heads, core.head_dim) for core in filter(None, network.attention)}
        if len(blocks) > _MOST_BLOCKS or len(attention) != 1:
            what = "layers of so many forms" if attention else "models without attention"
            raise UnsupportedError(f"the cpu engine does not run {what} yet: use --backend=llamacpp")
        forms = tuple(dict.fromkeys(tuple(map(blocks.index, layer)) for layer in layers))
        return cls(
            len(layers), spec.hidden, spec.vocab, network.norm, network.norm_eps, network.embedding_scale,
            network.logit_cap, network.logit_scale, network.output_norm_bias, blocks, forms,
        )  # fmt: skip

    def form_of(self, layer: tuple[Block, ...], network: Network) -> int:
        """The number of a layer's form."""
        return self.forms.index(tuple(self.blocks.index(_shape_of(block, network)) for block in layer))

    @property
    def states(self) -> bool:
        """Some layers have a state of a fixed size."""
        return any(block.core.fixed_values for block in self.blocks)

    @cached_property
    def groups(self) -> Groups:
        """Of all cores."""
        return {name: matrices for block in self.blocks for name, matrices in groups_of(block.core).items()}

    def code(self, number: int, unit: str) -> str:
        """The name of a unit, or of a group of matrices, of one of `blocks`: that of its kind, numbered from the second
        block of the kind on."""
        kinds = [type(block.core) for block in self.blocks]
        alike = kinds[:number].count(kinds[number])
        return f"{unit}_{alike}" if alike else unit

    @cached_property
    def attention(self) -> Attention:
        """Of the first block of attention; heads are the same in all."""
        return next(block.core for block in self.blocks if isinstance(block.core, Attention))

    @cached_property
    def dense(self) -> Dense:
        """Of the first feed-forward network."""
        return next(block.core for block in self.blocks if isinstance(block.core, Dense))

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head(self) -> int:
        return self.attention.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def query_scale(self) -> float:
        return self.attention.scale

    @property
    def score_cap(self) -> float:
        return self.attention.score_cap

    @property
    def windowed(self) -> bool:
        """Some layers have a sliding window."""
        return self.attention.window > 0

    @property
    def tempered(self) -> bool:
        """Queries have a temperature that depends on their position."""
        return self.attention.temperature is not None

    @property
    def ffn(self) -> int:
        return self.dense.ffn

    @property
    def gated(self) -> bool:
        """The feed-forward network has a gate."""
        return self.dense.gated

    @property
    def padded_head(self) -> int:
        return round_up(self.head, _LANES)

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
        return round_up(self.vocab, _LANES)

    @property
    def widest(self) -> int:
        """The longest row of activations."""
        return max(self.padded_hidden, *(round_up(block.core.width, 32) for block in self.blocks))

    def widths(self, kind: type[Core]) -> int:
        """The longest row that a core of this kind hands to its output projection, padded; 0 without such cores."""
        widths = (round_up(block.core.width, 32) for block in self.blocks if isinstance(block.core, kind))
        return max(widths, default=0)


def _shape_of(block: Block, network: Network) -> Block:
    core = block.core
    if isinstance(core, Attention):
        temperature = Temperature(0.0, 1) if core.temperature else None
        core = replace(core, rope=UNROTATED, window=int(any(network.windows)), temperature=temperature)
    return replace(block, core=core)
