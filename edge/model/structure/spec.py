"""ModelSpec: a model's sizes, and its pass as data (`layers.py`), read from a header by `edge/model/reader.py`."""

from __future__ import annotations

from edge.devices.keys import key_of
from edge.errors import UnsupportedError
from edge.formats.compiled import Compiled
from edge.model.cores import Features
from edge.model.structure.layers import Network
from edge.records import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """The description of a model for engines and plans. Counts are numbers of values, sizes are bytes."""

    architecture: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # positions the model was trained for
    norm_eps: float
    rope_base: float
    rope_dim: int
    window: int  # positions that a token attends to, in layers with a window; 0: all
    tied_head: bool  # the output head is the token embedding
    parameters: int
    weight_bytes: int
    largest_tensor: int  # bytes
    largest_layer: int  # bytes of all its tensors but experts
    embedding_bytes: int  # of the token embedding
    weight_type: str  # the block type of most parameters of layers, such as Q4_1; the embedding may have another
    type_bytes: tuple[tuple[str, int], ...]  # bytes of weights in each block type
    network: Network | None = None  # None: only llama.cpp runs this architecture
    proven: bool = True  # False: the header was not checked in full, so llama.cpp tries it in a process of its own
    layer_values: tuple[int, ...] = ()  # [layers], where there is no network: values of K and V in a row
    layer_windows: tuple[int, ...] = ()  # [layers], where there is no network: positions that a token sees, 0: all
    recurrent: bool = False  # some state sums up all tokens and cannot be rolled back by a token
    state_bytes: int = 0  # size of that state in float32, for any number of tokens
    experts: int = 0  # in each layer that has them; `experts_used` of them run for a token
    experts_used: int = 0
    expert_parameters: int = 0  # of all experts together
    expert_bytes: int = 0
    expert_types: tuple[tuple[str, int], ...] = ()  # bytes of experts in each block type
    largest_expert: int = 0  # bytes of one expert, in the layer where they are largest
    table_parameters: int = 0  # of tables besides the token embedding; a pass reads one row of each per token
    table_bytes: int = 0
    table_type: str = ""  # their block type
    compiled: Compiled | None = None  # the context binaries that the model's folder has
    mtp: ModelSpec | None = None  # the layer for multi-token prediction, as a model of one layer (`mtp.py`)
    ears: ModelSpec | None = None  # the encoder of a model that hears (`edge/model/whisper`), not in the figures above
    rounded: bool = False  # matrices of floats are multiplied as Q8_0, by engines that can (`rounding.py`)
    mtp_of: ModelSpec | None = None  # in an `mtp`: the model whose embedding and head it shares, not in `type_bytes`

    @property
    def kv_values_per_row(self) -> int:
        """Values of K and V that one token adds to the KV cache, all layers together."""
        return sum(self.kv_values)

    @property
    def kv_values(self) -> tuple[int, ...]:
        """Values of K and V that one token adds to the KV cache, [layers]; 0 in layers without a cache of their own."""
        return self.network.row_values if self.network else self.layer_values

    @property
    def windows(self) -> tuple[int, ...]:
        """Positions that a token sees, [layers]; 0: all."""
        return self.network.windows if self.network else self.layer_windows or (self.window,) * self.layers

    def experts_read(self, tokens: int) -> float:
        """The expected share of experts that a pass of this many tokens reads, if the router is uniform."""
        return 1 - (1 - self.experts_used / self.experts) ** tokens if self.experts else 1.0

    @property
    def encoder(self) -> bool:
        """Whether the model embeds texts, and cannot continue them."""
        return self.network is not None and self.network.encoder

    @property
    def assists(self) -> bool:
        """Whether it drafts for another model, whose rows it reads, and cannot run alone."""
        return self.network is not None and self.network.assists is not None

    @property
    def features(self) -> Features | None:
        """The input of an EAGLE-3 head, which drafts from another model's hidden states, and cannot run alone."""
        return self.network.features if self.network else None

    @property
    def label(self) -> str:
        """The model's name in benchmarks: `llama 135M Q4_1`."""
        return f"{self.architecture} {format_count(self.parameters)} {self.weight_type}"


def check_generates(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model that cannot continue a text: an encoder, or one that hears."""
    if spec.ears:
        raise UnsupportedError(
            f"{spec.name} hears, and answers no prompts: edge transcribe writes what was said with it"
        )
    if spec.encoder:
        raise UnsupportedError(f"{spec.name} is an encoder, which answers no prompts: edge embed makes vectors with it")


def check_embeds(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model that makes no vectors of texts: one that hears, or drafts for another."""
    if spec.ears or spec.assists or spec.features:
        does = "hears" if spec.ears else "drafts for another model"
        raise UnsupportedError(f"{spec.name} {does}, and embeds no texts: choose an encoder, such as all-minilm")


def deaf(name: str) -> UnsupportedError:
    """The error of a model that writes no transcripts."""
    return UnsupportedError(f"{name} does not hear: choose a Whisper model, such as whisper-base")


def format_count(count: int) -> str:
    """134515008 -> `135M`, 1540000000 -> `1.5B`, 999885952 -> `1.0B`."""
    if count >= 999.5e6:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.0f}M" if count >= 1e7 else f"{count / 1e6:.1f}M"


def model_key(spec: ModelSpec) -> str:
    """A key shared by models of the same shape and block types."""
    shape = (spec.architecture, spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn,
             spec.vocab, spec.type_bytes)  # fmt: skip
    return key_of(repr(shape), 16)
