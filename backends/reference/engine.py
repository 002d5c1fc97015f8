"""The pass of the reference engine: a loop over layers and blocks; each core has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge.backends.base import Capabilities, EngineConfig
from edge.backends.checks import check_free, check_lora, check_positions, check_tokens, check_whole_text, places_of
from edge.backends.reference.attention import attention, heads_of
from edge.backends.reference.context import At
from edge.backends.reference.dense import dense
from edge.backends.reference.experts import experts
from edge.backends.reference.features import features
from edge.backends.reference.functions import rms, soft_cap
from edge.backends.reference.kv import ReferenceKV, SharedRows
from edge.backends.reference.next_token import next_token
from edge.backends.reference.per_layer_input import make_inputs, per_layer_input
from edge.backends.reference.recurrent.delta_net import delta_net
from edge.backends.reference.recurrent.kimi_delta import kimi_delta
from edge.backends.reference.recurrent.mamba import mamba
from edge.backends.reference.recurrent.selective_scan import selective_scan
from edge.backends.reference.recurrent.short_convolution import short_convolution
from edge.backends.reference.weights import UNWARNED
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora
from edge.model.cores import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    Features,
    KimiDelta,
    Mamba,
    NextToken,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.layers import Block
from edge.model.structure.spec import ModelSpec, check_generates
from edge.model.tensors import Source, find_network
from edge.types import FloatArray, IntArray

NAME = "reference"
CAPABILITIES = Capabilities(
    "token",
    uneven="token",
    kv_dtypes=("f32",),
    attention=False,
    keys=False,
    lora=True,
    appends=True,
    hidden=True,
    encodes=True,
)
CORES: dict[type, Callable[..., FloatArray]] = {
    Attention: attention, Dense: dense, Experts: experts, DeltaNet: delta_net,
    KimiDelta: kimi_delta, Mamba: mamba,
    SelectiveScan: selective_scan, ShortConvolution: short_convolution, PerLayerInput: per_layer_input,
    NextToken: next_token, Features: features,
}  # fmt: skip


class ReferenceEngine:
    """Engine protocol over plain NumPy. Calibration calls its parts, layer by layer, with `weights` of its own."""

    capabilities = CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, weights: dict[str, FloatArray],
        sources: Mapping[str, Source] | None = None,
    ) -> None:  # fmt: skip
        """sources: where the weights lie in the file, for adapters."""
        self.spec, self.config = spec, config
        self.weights, self._sources = weights, sources or {}
        self._lora: dict[str, tuple[FloatArray, FloatArray]] = {}  # A and B of matrices that are adapted
        self.network = find_network(spec)
        self.kv = ReferenceKV("reference", file, spec, config)
        self._states = self._embeddings = self.joined = np.zeros((0, spec.hidden), np.float32)
        self._held = self._states  # of a block, for the next one
        self.across: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._last = self._states  # of the newest pass
        self._taps: list[FloatArray] = []

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        check_generates(self.spec)
        return self.head(self._run(tokens, given, places)[-1:]).reshape(-1)

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        check_generates(self.spec)
        hidden, step = self._run(tokens, given, places), self.config.logits_rows
        return np.concatenate([self.head(hidden[at : at + step]) for at in range(0, len(hidden), step)])

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        check_free(rows.shape[3], self.kv.free)
        own = self.kv.reserve(Places.after(self.kv.next_position, rows.shape[3]))
        for layer, (keys, values) in enumerate(zip(*rows, strict=True)):
            self.kv.keys[layer][:, own] = self.kv.rope.ordered(keys, layer)
            self.kv.values[layer][:, own] = values

    def set_crossed(self, states: FloatArray) -> None:
        """See CrossEngine."""
        for layer in self.network.crossings:
            core = self.network.attention[layer]
            assert core is not None
            keys, values = (heads_of(self, core, At(layer), states, name) for name in core.crossing)
            self.across[layer] = keys, values

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """See CrossEngine."""
        return self.across[layer]

    def rest(self) -> None:
        """See CrossEngine."""
        self.across.clear()

    @UNWARNED
    def hidden(self, tokens: IntArray, places: Places | None = None, given: GivenRows | None = None) -> FloatArray:
        """See HiddenEngine."""
        if self.network.encoder:
            check_whole_text(tokens, self.kv, self.config)
        states = self._run(tokens, given, places)
        return self.norm(states, "output_norm") if self.network.normed else states

    def rows(self, layer: int) -> SharedRows:
        """A copy of a layer's rows, for an assistant."""
        kv, window = self.kv, self.network.windows[layer]
        seen = np.flatnonzero(kv.positions > kv.next_position - window) if window else np.arange(kv.length)
        keys, values = list(kv.keys[layer][:, seen]), list(kv.values[layer][:, seen])
        return SharedRows(keys, values, kv.next_position, np.arange(keys[0].shape[1]))

    def give(self, states: FloatArray, embeddings: FloatArray | None = None) -> None:
        """See MTPEngine, of any number of tokens."""
        self._states = states
        self._embeddings = self._embeddings[:0] if embeddings is None else embeddings

    def states(self, count: int) -> FloatArray:
        """See MTPEngine."""
        states = self._last[-count:]
        return states if self.network.features else self.norm(states, "output_norm")

    def layer_states(self, count: int) -> FloatArray:
        """See StatesEngine."""
        return np.concatenate(self._taps, axis=1)[-count:]

    def set_lora(self, lora: Lora | None) -> None:
        check_lora(lora, self.config)
        self.kv.truncate(0)
        self._lora, self.kv.lora = {}, ""
        if lora:
            changed = {name: each for name, each in self._sources.items() if lora.changes(each)}
            self._lora = {name: lora.matrices(each) for name, each in changed.items()}
            self.kv.lora = f" {lora.key}"

    def close(self) -> None:
        self.weights.clear()
        self._lora.clear()

    @UNWARNED
    def _run(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        """Final hidden states of all tokens, [n, hidden], chunk by chunk."""
        if not self.weights:
            raise EngineError("the engine is closed")
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free, given)
        places = places_of(self.kv, self.network, tokens.size, places)
        self.kv.announce(places.next_position - self.kv.next_position)
        passes = list(places.passes(self.config.chunk))
        return np.concatenate([self._run_chunk(tokens[each], given, places.part(each)) for each in passes])

    def _run_chunk(self, tokens: IntArray, given: GivenRows | None, places: Places) -> FloatArray:
        check_positions(self.spec, places.next_position)
        parts = None if given is None else given.parts(tokens)
        rows = self.kv.reserve(places)
        x, self._embeddings = self._embeddings[: tokens.size], self._embeddings[tokens.size :]
        x = x if len(x) else self.embed(tokens, places.numbers, None if parts is None else parts[0], places.types)
        inputs = make_inputs(self, self.network, tokens, x)
        states, self._states = self._states[: tokens.size], self._states[tokens.size :]
        begins = 0 if places.begins is None else rows.start + places.begins
        entering = dict[int, FloatArray]()
        for layer, blocks in enumerate(self.network.layers):
            entering[layer] = x
            at = At(layer, rows, places.positions, rows.start + places.sees, inputs[:, layer], states, begins)
            for block in blocks:
                if not block.beside:
                    normed = self.norm(x, at.name(block.norm)) if block.norm else x
                x = self.add(x, block, at, self.run_core(block, at, normed))
            if parts is not None and layer < self.network.deepstack:
                x[tokens >= self.spec.vocab] += parts[1 + layer]
        self._last, self._taps = x, [entering[layer] for layer in self.config.taps]
        return x

    def embed(
        self, tokens: IntArray, positions: IntArray, given: FloatArray | None = None, types: IntArray | None = None
    ) -> FloatArray:
        """Hidden states before the first layer, [n, hidden]. given: rows of the ids beyond the vocabulary. types: see
        `Places`."""
        beyond = tokens >= self.spec.vocab
        x = np.zeros((tokens.size, self.spec.hidden), np.float32)
        if not beyond.all():
            x[~beyond] = self.weights["token_embd"][tokens[~beyond]] * np.float32(self.network.embedding_scale)
        if given is not None:
            x[beyond] = given
        if self.network.learned_positions:
            x = x + self.weights["position_embd"][positions]
        if self.network.token_types:
            x = x + self.weights["token_types"][0 if types is None else types]
        return self.norm(x, "token_embd_norm") if self.network.embedding_norm else np.asarray(x)

    def run_core(self, block: Block, at: At, x: FloatArray) -> FloatArray:
        """From the block's normalised rows, [n, hidden], to the input of its output projection, [n, width]. Experts and
        features include the projection."""
        return CORES[type(block.core)](self, block.core, at, x)

    def add(self, x: FloatArray, block: Block, at: At, inner: FloatArray) -> FloatArray:
        """Project a core's result `inner`, and add it to the hidden states."""
        added = inner if isinstance(block.core, Experts | Features) else self.project(inner, at, block.core.output)
        if block.post_norm:
            added = self.norm(added, at.name(block.post_norm))
        if block.held:
            self._held = added
            return x
        if block.joint_norm:
            added = self.norm(self._held + added, at.name(block.joint_norm))
        total = added if block.replaces else np.asarray(x + added * np.float32(block.scale))
        if block.rescale:
            total = total * self.weights[at.name(block.rescale)]
        return self.norm(total, at.name(block.sum_norm)) if block.sum_norm else total

    @UNWARNED
    def head(self, x: FloatArray) -> FloatArray:
        return self.logits(self.norm(x, "output_norm"))

    def logits(self, normed: FloatArray) -> FloatArray:
        """Logits, float32 [n, vocab], of normalised final states, [n, hidden]."""
        head = self.weights[self.network.head]
        product = np.asarray(normed @ head.T * np.float32(self.network.logit_scale))
        return soft_cap(product, self.network.logit_cap)

    def project(self, x: FloatArray, at: At, name: str) -> FloatArray:
        if (low := self.weights.get(f"{at.name(name)}.input_min")) is not None:
            x = np.clip(x, low, self.weights[f"{at.name(name)}.input_max"])
        product = x @ self.weights[at.name(name)].T
        if pair := self._lora.get(at.name(name)):
            product = product + (x @ pair[0].T) @ pair[1].T
        bias = self.weights.get(f"{at.name(name)}.bias")
        product = product if bias is None else product + bias
        low, high = (self.weights.get(f"{at.name(name)}.output_{end}") for end in ("min", "max"))
        return np.asarray(product if low is None else np.clip(product, low, high))

    def norm(self, x: FloatArray, name: str) -> FloatArray:
        if self.network.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        scaled = rms(x, self.spec.norm_eps) * self.weights[name]
        return np.asarray(scaled + self.weights.get(f"{name}.bias", np.float32(0)))
