"""A model's pass as data: layers of blocks, each around a core such as attention.

A block adds to the hidden states x, [tokens, hidden]:

    x += scale · post_norm(output(core(norm(x))))

`norm` and `post_norm` are norms of rows, `output` is the core's last matrix. Some blocks then multiply x by a scalar of
the file (`rescale`), or normalise it (`sum_norm`). A layer is a tuple of blocks, run one after the other, or side by
side. Two blocks may share a norm of the sum of their terms (`joint_norm`).

An encoder's attention is bidirectional: a token sees its whole text, which runs in one pass. It has no output head; its
hidden states are pooled to the text's embedding.

An architecture's file (`architectures/`) turns a header into a `Network`; nothing else knows architectures. Engines,
plans, checks of headers, and converters read these classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Literal

from edge.model.cores import (
    Attention,
    Core,
    Dense,
    Experts,
    Features,
    NextToken,
    OneCore,
    PerLayerInput,
    Rope,
    RowShape,
    Temperature,
    Tensor,
)
from edge.records import dataclass

Norm = Literal["rms", "layer"]
Pooling = Literal["mean", "cls", "last"]
RANKS = 4  # the pooling type of rerankers
DENSE = ("dense_2", "dense_3")  # layers behind the pooling (`tail.py`)
TABLE = "per_layer_token_embd"  # of `PerLayerInput`: too large for memory, and read row by row


@dataclass(frozen=True)
class Block:
    """A core with its norms (see above). norm, post_norm, rescale, sum_norm: tensors of the layer, or none.

    norm: "" passes the hidden states to the core unchanged. rescale: a scalar that multiplies the sum. sum_norm: a norm
    with a bias, whose result replaces the sum. beside: the core reads the same normalised rows as the core of the block
    before it. replaces: the product replaces the hidden states instead of being added to them. held: the term is kept
    for the next block, which reads the same hidden states, has a `joint_norm`, and adds the norm of both terms' sum.
    """

    norm: str
    core: Core
    post_norm: str | None = None
    scale: float = 1.0
    norm_bias: bool = False
    rescale: str | None = None
    beside: bool = False
    sum_norm: str | None = None
    replaces: bool = False
    held: bool = False
    joint_norm: str | None = None

    def tensors(self, hidden: int) -> Iterator[Tensor]:
        """All tensors, in the order in which a pass reads them."""
        if self.norm and not self.beside:
            yield Tensor(self.norm, hidden)
        if self.norm_bias:
            yield Tensor(f"{self.norm}.bias", hidden)
        yield from self.core.tensors(hidden)
        if self.post_norm:
            yield Tensor(self.post_norm, hidden)
        if self.joint_norm:
            yield Tensor(self.joint_norm, hidden)
        if self.rescale:
            yield Tensor(self.rescale, 1)
        if self.sum_norm:
            yield Tensor(self.sum_norm, hidden)
            yield Tensor(f"{self.sum_norm}.bias", hidden)


Layer = tuple[Block, ...]


@dataclass(frozen=True)
class Assists:
    """The part of a network that drafts for another model, whose rows its layers read (Gemma 4's assistants).

    Its input is `nextn.pre_projection` · [the model's embedding of a token, the model's state of the token before];
    `nextn.post_projection` makes the model's next state of its own normalised one. With centroids, the head is read in
    part: tokens are divided evenly among centroids, and those of the `used` centroids with the largest products score.
    """

    hidden: int  # of the model
    centroids: int = 0  # 0: the head is read whole
    used: int = 0


@dataclass(frozen=True)
class Network:
    """The whole pass: token embeddings times `embedding_scale`, the layers, a last norm, and the output head. Logits
    are multiplied by `logit_scale`, and capped like attention scores. An encoder's pass ends with its layers, or with
    the last norm. Without a vocabulary, all rows are given."""

    hidden: int
    vocab: int  # 0: there is no embedding
    layers: tuple[Layer, ...]
    _: KW_ONLY
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    embedding_scale: float = 1.0
    positions: int = 0  # learned: rows of a table that is added to the embeddings
    output_norm_bias: bool = False
    output_norm: str = "output_norm"  # the tensor; engines know it by this name, whatever the file calls it
    tied_head: bool = True
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    token_types: int = 0  # rows of a table, one of which is added to each embedding: the first, but for pairs of texts
    embedding_norm: bool = False  # embeddings are normalised by `token_embd_norm`
    embedding_norm_bias: bool = True  # which has a bias
    encoder_norm: bool = False  # an encoder's states are normalised by `output_norm`
    pooling: Pooling = "mean"  # how the hidden states of a text are reduced to its embedding
    tail: tuple[Tensor, ...] = ()  # behind the pooling (`tail.py`): no part of a pass
    ranks: bool = False  # the tail scores pairs of texts
    classifier: Literal["tanh", "gelu_erf"] = "tanh"  # its activation
    whole_pictures: bool = False  # pictures of its family see all of themselves
    deepstack: int = 0  # first layers behind each of which a part of given rows is added to the hidden states
    assists: Assists | None = None  # the network drafts for another model, and cannot run alone

    @cached_property
    def encoder(self) -> bool:
        """Whether attention is bidirectional: the network embeds texts, and cannot continue them."""
        return any(core is not None and not core.causal for core in self.attention)

    @property
    def normed(self) -> bool:
        """Whether a norm follows the layers."""
        return self.encoder_norm or not self.encoder

    @property
    def tail_bytes(self) -> int:
        """Bytes of the matrices behind the pooling, in float32 beside the pass's weights."""
        return sum(4 * tensor.rows * max(1, tensor.columns) for tensor in self.tail)

    @property
    def head(self) -> str:
        """The matrix of the output head, by the names of `find_tensors`."""
        return "token_embd" if self.tied_head else "output"

    @property
    def learned_positions(self) -> bool:
        return self.positions > 0

    @cached_property
    def layer_inputs(self) -> int:
        """Size of the vector that a token has for each layer (`PerLayerInput`); 0 for none."""
        return next((core.size for core in self.cores if isinstance(core, PerLayerInput)), 0)

    @cached_property
    def features(self) -> Features | None:
        """The input of an EAGLE-3 head, which cannot run alone."""
        return next((core for core in self.cores if isinstance(core, Features)), None)

    @cached_property
    def cores(self) -> tuple[Core, ...]:
        """All cores, in the order of the pass."""
        return tuple(block.core for layer in self.layers for block in layer)

    @cached_property
    def attention(self) -> tuple[Attention | None, ...]:
        """The attention of each layer, [layers]; None in a layer without."""
        return tuple(next(_of_kind(layer, Attention), None) for layer in self.layers)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes, those of full-attention layers first; empty with learned positions."""
        if self.learned_positions:
            return ()
        attention = sorted(filter(None, self.attention), key=lambda core: (core.window > 0, core.rope.dim == 0))
        return tuple(dict.fromkeys(core.rope for core in attention))

    @cached_property
    def halves(self) -> bool:
        """Whether RoPE pairs halves (see `Rope`), the same in all layers."""
        return any(rope.halves for rope in self.ropes)

    @property
    def components(self) -> int:
        """Components of a position, if there are several; else 0."""
        return max((len(rope.sections) for rope in self.ropes), default=0)

    def rope_of(self, layer: int) -> int:
        """The index in `ropes` for a layer; 0 for layers without attention."""
        core = self.attention[layer]
        return self.ropes.index(core.rope) if core and self.ropes else 0

    def rotates(self, layer: int) -> bool:
        """Whether RoPE gives the layer's queries and keys their positions."""
        core = self.attention[layer]
        return core is not None and bool(self.ropes) and core.rope.dim > 0

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Positions up to its own that a token attends to, [layers]; 0: all, an encoder's window, or no attention."""
        return tuple(core.window if core and core.causal else 0 for core in self.attention)

    @cached_property
    def temperature(self) -> Temperature | None:
        """The temperature of queries, the same in all layers that have one."""
        return next((core.temperature for core in self.attention if core and core.temperature), None)

    @cached_property
    def last_mixing(self) -> tuple[int, Block]:
        """The layer and the block of the last core that mixes tokens. Blocks after it can skip tokens whose logits are
        not wanted."""
        blocks = ((layer, block) for layer, blocks in enumerate(self.layers) for block in blocks)
        own = Dense | Experts | PerLayerInput | NextToken | Features  # these do not mix tokens
        return [(layer, block) for layer, block in blocks if not isinstance(block.core, own)][-1]

    @cached_property
    def rows(self) -> tuple[RowShape | None, ...]:
        """The rows that a token adds to the cache, [layers]; None for layers that add none."""
        return tuple(core.row if core and core.makes_rows else None for core in self.attention)

    @cached_property
    def crossings(self) -> tuple[int, ...]:
        """Indexes of the layers with cross attention."""
        return tuple(layer for layer, core in enumerate(self.attention) if core and core.across)

    @cached_property
    def cross_values(self) -> tuple[int, ...]:
        """Values of a row that cross attention reads, [layers]; 0 in layers without."""
        return tuple(core.row.values if core and core.across else 0 for core in self.attention)

    @cached_property
    def row_values(self) -> tuple[int, ...]:
        """Values of keys and values that a token adds to the cache, [layers]."""
        return tuple(row.values if row else 0 for row in self.rows)

    @cached_property
    def foreign(self) -> dict[int, int]:
        """Of layers that read the rows of another model's layers, those: `rows_of` counts them from the last own
        layer on (`edge.model.drafters.assistant.layers_of`)."""
        last = len(self.layers)
        sources = ((layer, core.rows_of) for layer, core in enumerate(self.attention) if core and core.rows_of)
        return {layer: source - last for layer, source in sources if source >= last}

    @property
    def rowless(self) -> tuple[int, ...]:
        """Indexes of layers that add no rows to the cache."""
        return tuple(layer for layer, row in enumerate(self.rows) if row is None)

    @cached_property
    def fixed_values(self) -> tuple[int, ...]:
        """Values of states whose size does not depend on the number of tokens, float32, [layers]."""
        return tuple(sum(block.core.fixed_values for block in layer) for layer in self.layers)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by their names in the model, `blk.0.attn_q`, in the order in which a pass reads them."""
        if self.vocab:
            yield "token_embd", Tensor("token_embd", self.vocab, self.hidden)
        if assists := self.assists:
            for name, rows, columns in (
                ("nextn.pre_projection", self.hidden, 2 * assists.hidden),
                ("nextn.post_projection", assists.hidden, self.hidden),
            ):
                yield name, Tensor(name, rows, columns, bits="more")
            if assists.centroids:
                yield "masked_embd_centroids", Tensor("masked_embd_centroids", assists.centroids, self.hidden)
        if self.positions:
            yield "position_embd", Tensor("position_embd", self.positions, self.hidden)
        if self.token_types:
            yield "token_types", Tensor("token_types", self.token_types, self.hidden, bits="all")
        if self.embedding_norm:
            yield "token_embd_norm", Tensor("token_embd_norm", self.hidden)
            if self.embedding_norm_bias:
                yield "token_embd_norm.bias", Tensor("token_embd_norm.bias", self.hidden)
        if size := self.layer_inputs:
            yield TABLE, Tensor(TABLE, self.vocab, len(self.layers) * size)
            yield (
                "per_layer_model_proj",
                Tensor("per_layer_model_proj", len(self.layers) * size, self.hidden, bits="more"),
            )
            yield "per_layer_proj_norm", Tensor("per_layer_proj_norm", size)
        for index, layer in enumerate(self.layers):
            for block in layer:
                yield from ((f"blk.{index}.{tensor.name}", tensor) for tensor in block.tensors(self.hidden))
        if not self.normed:
            return
        yield "output_norm", Tensor("output_norm", self.hidden)
        if self.output_norm_bias:
            yield "output_norm.bias", Tensor("output_norm.bias", self.hidden)
        if not self.tied_head and not self.encoder:
            yield "output", Tensor("output", self.vocab, self.hidden)


def is_behind(name: str) -> bool:
    """Whether a tensor of this name lies behind the pooling, and so is no part of a pass."""
    return name.split(".", 1)[0] in ("cls", *DENSE)


def _of_kind(layer: Layer, kind: type[OneCore]) -> Iterator[OneCore]:
    return (block.core for block in layer if isinstance(block.core, kind))
