"""The sizes that kernels are compiled for: a model's pass without differences between layers. TVM is not needed.

Layers whose blocks have the same shape share compiled code; their differences (windows, RoPE, block types, places of
tensors) are entries in a table at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import chain

from edge.backends.checks import check_cores
from edge.backends.tvm.packing.cores import LANES, Groups, groups_of, round_up, supports
from edge.errors import UnsupportedError
from edge.model.cores import (
    UNROTATED,
    Attention,
    Core,
    DeltaNet,
    Experts,
    Features,
    KimiDelta,
    Mamba,
    OneCore,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
    Temperature,
)
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

_MOST_BLOCKS = 8  # of different shapes, each of which is compiled

ROPE_AHEAD = 64  # decode steps for which angles are computed at once


def padded_head(head: int) -> int:
    return max(LANES, round_up(head, LANES))


_NO_ATTENTION = Attention(1, 1, 0, 1.0)  # of models without, whose rows have no values
LAYER_INPUTS = {"layer_inputs": ("per_layer_model_proj",)}  # the group outside of layers


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's pass. The `padded_` sizes are rounded up to whole vectors."""

    layers: int
    hidden: int
    vocab: int
    norm: str
    norm_eps: float
    embedding_scale: float
    logit_cap: float
    logit_scale: float
    output_norm_bias: bool
    blocks: tuple[Block, ...]  # distinct ones, without RoPE; windows are 1 where some layer has one, see `_shape_of`
    forms: tuple[tuple[int, ...], ...]  # distinct layers, as indices into blocks
    embedding_norm: bool = False
    embedding_norm_bias: bool = False
    encoder: bool = False  # runs whole texts, as chunks, and has no head
    deepstack: int = 0  # first layers behind which chunks add parts of given rows

    @classmethod
    def of(cls, spec: ModelSpec, engine: str = "cpu", reason: Callable[[Core], str | None] = supports) -> Shape:
        """The shape of a model. reason: the engine's `Backend.supports`. Raises UnsupportedError for cores without
        kernels, and for layers that differ too much."""
        network = check_cores(f"{engine} engine", spec, reason)
        layers = _layers_of(network)
        blocks = tuple(dict.fromkeys(block for layer in layers for block in layer))
        attention = list(filter(None, network.attention))
        if len(blocks) > _MOST_BLOCKS or not _fit_arenas(network, attention):
            raise UnsupportedError(
                f"the {engine} engine does not run layers of so many forms yet: use --backend=llamacpp"
            )
        forms = tuple(dict.fromkeys(tuple(map(blocks.index, layer)) for layer in layers))
        return cls(
            len(layers), spec.hidden, spec.vocab, network.norm, network.norm_eps, network.embedding_scale,
            network.logit_cap, network.logit_scale, network.output_norm_bias, blocks, forms,
            network.embedding_norm, network.embedding_norm and network.embedding_norm_bias, network.encoder,
            network.deepstack,
        )  # fmt: skip

    def forms_of(self, network: Network) -> list[int]:
        """The index of each layer's form."""
        return [self.forms.index(tuple(map(self.blocks.index, layer))) for layer in _layers_of(network)]

    def side_by_side(self, form: tuple[int, ...]) -> list[list[int]]:
        """The blocks of a form, grouped by the rows that they read."""
        found: list[list[int]] = []
        for number in form:
            if self.blocks[number].beside:
                found[-1].append(number)
            else:
                found.append([number])
        return found

    @property
    def states(self) -> bool:
        """Whether some layers have a fixed state."""
        return any(block.core.fixed_values for block in self.blocks)

    @property
    def crosses(self) -> bool:
        """Whether some layers have cross attention."""
        return any(core.across for core in self._attention)

    @property
    def sums_experts(self) -> bool:
        """Whether the outputs of experts are summed before they are added to the hidden states."""
        return any(isinstance(block.core, Experts) and block.post_norm for block in self.blocks)

    @cached_property
    def groups(self) -> Groups:
        """The matrix groups of all cores, and outside of layers."""
        found = {name: matrices for block in self.blocks for name, matrices in groups_of(block.core).items()}
        return found | (LAYER_INPUTS if self.layer_inputs else {})

    @cached_property
    def most_matrices(self) -> int:
        """The most matrices of a phase."""
        return max(len(matrices) for block in self.blocks for matrices in groups_of(block.core).values())

    def code(self, number: int, unit: str) -> str:
        """The name, in compiled code, of a unit or matrix group of one of `blocks`: its kind's name, with a number for
        all but the kind's first block."""
        kinds = [type(block.core) for block in self.blocks]
        alike = kinds[:number].count(kinds[number])
        return f"{unit}_{alike}" if alike else unit

    @cached_property
    def _attention(self) -> list[Attention]:
        return self.cores(Attention) or [_NO_ATTENTION]

    def cores(self, kind: type[OneCore]) -> list[OneCore]:
        """The different cores of a kind."""
        return [block.core for block in self.blocks if isinstance(block.core, kind)]

    @cached_property
    def attention(self) -> Attention:
        """The core of layers whose rows policies choose. All layers but those of `ringed` have the same heads."""
        return min(self._attention, key=lambda core: core.window)

    @cached_property
    def ringed(self) -> Attention:
        """The core of layers with rings, if there are any."""
        return max(self._attention, key=lambda core: core.window)

    @property
    def apart(self) -> bool:
        """Whether rows of rings have other sizes, and so an arena of their own."""
        return self.ringed.row.sizes != self.attention.row.sizes

    @cached_property
    def layer_inputs(self) -> int:
        """Values of the vector that a token has for each layer; 0 for none."""
        return next((block.core.size for block in self.blocks if isinstance(block.core, PerLayerInput)), 0)

    @property
    def padded_inputs(self) -> int:
        return round_up(self.layer_inputs, LANES)

    @cached_property
    def heads(self) -> int:
        """The most heads of a layer. `kv_heads`, `head` and `group` are maxima over layers, too."""
        return max(core.heads for core in self._attention)

    @cached_property
    def kv_heads(self) -> int:
        return max(core.kv_heads for core in self._attention)

    @cached_property
    def head(self) -> int:
        return max(core.head_dim for core in self._attention)

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return max(core.group for core in self._attention)

    @cached_property
    def attention_inputs(self) -> int:
        """The most values that a token's input products have in an attention layer."""
        return max((core.heads * (1 + core.gated) + 2 * core.kv_heads) * core.head_dim for core in self._attention)

    @property
    def windowed(self) -> bool:
        """Whether some layers have a sliding window."""
        return self.ringed.window > 0

    @property
    def tempered(self) -> bool:
        """Whether queries have a temperature that depends on their position."""
        return self.attention.temperature is not None

    @property
    def padded_head(self) -> int:
        return padded_head(self.head)

    @property
    def padded_hidden(self) -> int:
        return round_up(self.hidden, 32)

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab, LANES)

    @property
    def widest(self) -> int:
        """The length of the longest row of activations."""
        joined = 2 * self.hidden * bool(self.cores(Features))
        cores = (block.core for block in self.blocks)
        widths = (core.widest if isinstance(core, Attention) else core.width for core in cores)
        return max(self.padded_hidden, joined, *(round_up(width, 32) for width in widths))

    @property
    def channels(self) -> int:
        """The most values that a token's input products have in a core with a fixed state; 0 without such cores."""
        kinds, cores = (
            DeltaNet | KimiDelta | Mamba | SelectiveScan | ShortConvolution,
            (block.core for block in self.blocks),
        )
        return max((core.channels for core in cores if isinstance(core, kinds)), default=0)

    def widths(self, kind: type[Core]) -> int:
        """The length of the longest input to an output projection from cores of this kind, padded; 0 without such
        cores."""
        widths = (round_up(block.core.width, 32) for block in self.blocks if isinstance(block.core, kind))
        return max(widths, default=0)


def _layers_of(network: Network) -> list[tuple[Block, ...]]:
    """The layers, as blocks reduced to their shapes by `_shape_of`."""
    shapes = {block: _shape_of(block, network) for block in dict.fromkeys(chain.from_iterable(network.layers))}
    return [tuple(shapes[block] for block in layer) for layer in network.layers]


def _shape_of(block: Block, network: Network) -> Block:
    core = block.core
    if isinstance(core, Attention):
        temperature = Temperature(0.0, 1) if core.temperature else None
        apart = len({each.row.sizes for each in network.attention if each}) > 1
        window = core.window if apart else any(network.windows)
        rows_of = None if core.rows_of is None else 0
        core = replace(core, rope=UNROTATED, window=int(window > 0), temperature=temperature, rows_of=rows_of)
    if isinstance(core, Features):
        core = replace(core, layers=())
    return replace(block, core=core)


def _fit_arenas(network: Network, attention: list[Attention]) -> bool:
    """Whether all rows have the same sizes, or those of layers with windows and those of the others do, so that each
    kind can have an arena; and whether layers that read an earlier one's rows are of its kind."""
    own = len(network.attention)  # from here on, layers are those of another model (`Network.foreign`)
    sources = [(core, core.rows_of) for core in attention if core.rows_of is not None and core.rows_of < own]
    read = [(core, network.attention[source]) for core, source in sources]
    if any(not of or bool(core.window) != bool(of.window) or core.row.sizes != of.row.sizes for core, of in read):
        return False
    kinds = [{core.row.sizes for core in attention if bool(core.window) == windowed} for windowed in (False, True)]
    return len(kinds[0] | kinds[1]) <= 1 or len(kinds[0]) == len(kinds[1]) == 1
