"""The oracle: a decoder in NumPy float32, written to be read.

Every weight is dequantized to float32 at load, every formula stands as in the paper. It is slow and large on
purpose; it is what the other engines are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial

import numpy as np

from edge.backends.base import (
    Capabilities,
    EngineConfig,
    Footprint,
    KVState,
    MostRows,
    Operator,
    Tuned,
    all_positions,
    state_key,
)
from edge.backends.checks import (
    check_capacity,
    check_lora,
    check_positions,
    check_range,
    check_rows,
    check_state,
    check_tokens,
)
from edge.backends.efficiency import Efficiency, Kind, Rows, Weights
from edge.backends.rope import CacheRope, Rotation
from edge.errors import EngineError, InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.lora import Lora, adapted_values
from edge.model.spec import ModelSpec
from edge.model.tensors import Source, find_recipe, find_tensors
from edge.types import FloatArray, IntArray

NAME = "reference"
CAPABILITIES = Capabilities("token", uneven="token", kv_dtypes=("f32",), attention=False, keys=False, lora=True)
EFFICIENCY = Efficiency({"floats": Weights(0.02, 0.3)}, {"f32": Rows(0.02, 0.20)}, step_s=5e-3)


_UNWARNED = np.errstate(all="ignore")  # damaged weights give values that are not finite, which are refused in one line


def check_installed() -> None:
    """NumPy and gguf are part of the base install."""


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """Architectures that have a recipe."""
    find_tensors(file, spec)


def check_elsewhere(file: GGUFFile, spec: ModelSpec, system: str) -> None:
    check_supported(file, spec)


def weight_kind(weight_type: str, config: EngineConfig) -> Kind:
    return "floats"


def most_rows(spec: ModelSpec, expected: int | None) -> MostRows:
    return all_positions(spec)


def keeps_all(spec: ModelSpec) -> str | None:
    return None


def can_repack(spec: ModelSpec) -> bool:
    return False


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Weights in float32, fused ones while they are parted; the widest intermediate results of one chunk."""
    attention = spec.heads * (config.capacity + 3 * spec.head_dim)
    widest = 3 * spec.ffn + 4 * spec.hidden + 2 * attention
    return Footprint(
        weights=4 * spec.parameters,
        kv=4 * spec.kv_values_per_row * config.capacity,
        scratch=4 * (config.chunk * widest + 2 * config.logits_rows * spec.vocab) + 2 * spec.largest_tensor,
        runtime=8 << 20,
        lora=4 * config.lora_rank * adapted_values(spec),
    )


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    return None


def load(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> ReferenceEngine:
    """Dequantize every tensor and allocate the cache."""
    sources = find_tensors(file, spec)
    return ReferenceEngine(file, spec, config, read_weights(file, sources, progress), sources)


def operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    raise UnsupportedError("the reference engine does not tell where its time goes: choose another --backend")


def versions() -> dict[str, str]:
    return {"numpy": np.__version__}


class ReferenceKV:
    """Rotated keys, and values, float32 [layers, KV heads, capacity, head size]."""

    has_tail, earliest, fixed = False, 0, 0

    def __init__(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> None:
        shape = (spec.layers, spec.kv_heads, config.capacity, spec.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.capacity = config.capacity
        self.nbytes = self.keys.nbytes + self.values.nbytes
        self.next_position = 0
        self._positions = np.zeros(config.capacity, np.int32)
        self._length = 0
        recipe = find_recipe(spec)
        self.rope = CacheRope(file, recipe, config.capacity, halves=recipe.halves)
        self._make_key = partial(state_key, NAME, file, spec, config)
        self.lora = ""  # names the adapters

    @property
    def key(self) -> str:
        return self._settings + self.rope.suffix

    @property
    def _settings(self) -> str:
        return self._model_key + self.lora

    @cached_property
    def _model_key(self) -> str:
        """Made when rows are first saved: that may read the whole file."""
        return self._make_key()

    def expect(self, count: int) -> None:
        if self.rope.is_outgrown_by(self.next_position + count):
            self._rotate(self.rope.lengthen(self._length), self.positions)

    def _rotate(self, rotation: Rotation, by: IntArray) -> None:
        """Rotate the keys in use, row i by `by[i]` more positions."""
        for layer, keys in enumerate(self.keys):
            keys[:, : self._length] = rotation.rotate_cached(keys[:, : self._length], by, layer)

    @property
    def length(self) -> int:
        return self._length

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        return self._positions[: self._length]

    def reserve(self, count: int) -> tuple[slice, IntArray]:
        """Reserve the next `count` rows; returns them and their positions."""
        rows = slice(self._length, self._length + count)
        self._positions[rows] = np.arange(self.next_position, self.next_position + count)
        self._length += count
        self.next_position += count
        return rows, self._positions[rows]

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        rows = check_rows(rows, self._length)
        count = rows.size
        self.keys[:, :, :count] = self.keys[:, :, rows]
        self.values[:, :, :count] = self.values[:, :, rows]
        self._positions[:count] = self._positions[rows]
        self._length = count
        if close_gaps:
            moved = np.arange(count, dtype=np.int32) - self._positions[:count]
            self._rotate(self.rope.rotation, moved)
            self._positions[:count] += moved
            self.next_position = count

    def truncate(self, length: int, end: KVState | None = None) -> None:
        if not 0 <= length <= self._length:
            raise InputError(f"cannot truncate {self._length} rows to {length}")
        if length < self._length or length == 0:
            self.next_position = int(self._positions[length - 1]) + 1 if length else 0
        self._length = length
        if not length:
            self.rope.clear()

    def shrink(self, capacity: int) -> None:
        check_capacity(capacity, self)
        self.capacity = min(self.capacity, capacity)
        self.keys, self.values = (each[:, :, : self.capacity].copy() for each in (self.keys, self.values))
        self.nbytes = self.keys.nbytes + self.values.nbytes

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        last = check_range(first, last, self._length)
        positions = self.positions[first:last].copy()
        next_position = self.next_position if last == self._length else int(self._positions[last])
        rows = np.stack([self.keys[:, :, first:last], self.values[:, :, first:last]])
        return KVState(self.key, positions, next_position, rows.tobytes())

    def append(self, state: KVState) -> None:
        if not self._length:
            self.rope.adopt(state.key, self._settings)
        check_state(state, self, self.next_position)
        first, last = self._length, self._length + state.positions.size
        shape = (2, *self.keys.shape[:2], last - first, self.keys.shape[3])
        if len(state.data) != 4 * math.prod(shape):
            raise InputError("the saved KV rows are damaged")
        self.keys[:, :, first:last], self.values[:, :, first:last] = np.frombuffer(state.data, np.float32).reshape(
            shape
        )
        self._positions[first:last], self._length, self.next_position = state.positions, last, state.next_position


def read_weights(
    file: GGUFFile, sources: Mapping[str, Source], progress: Callable[[float], None] | None = None
) -> dict[str, FloatArray]:
    """Tensors in float32, matrices [rows, columns], by the names that `find_tensors` gives them."""
    weights: dict[str, FloatArray] = {}
    for done, (name, source) in enumerate(sources.items(), start=1):
        weights[name] = _dequantize(file, source.tensor)[source.first : source.first + source.rows].copy()
        if progress:
            progress(done / len(sources))
    return weights


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
        self._recipe = find_recipe(spec)
        self.kv = ReferenceKV(file, spec, config)

    def forward(self, tokens: IntArray) -> FloatArray:
        return self.head(self._run(tokens)[-1:]).reshape(-1)

    def forward_all(self, tokens: IntArray) -> FloatArray:
        hidden, step = self._run(tokens), self.config.logits_rows
        return np.concatenate([self.head(hidden[at : at + step]) for at in range(0, len(hidden), step)])

    def set_lora(self, lora: Lora | None) -> None:
        check_lora(lora, self.config)
        changed = {name: each for name, each in self._sources.items() if lora and lora.changes(each)}
        adapted = {name: lora.matrices(each) for name, each in changed.items()} if lora else {}
        self.kv.truncate(0)
        self._lora, self.kv.lora = adapted, f" {lora.key}" if lora else ""

    def close(self) -> None:
        self.weights.clear()
        self._lora.clear()

    @_UNWARNED
    def _run(self, tokens: IntArray) -> FloatArray:
        """Final hidden states of all tokens, [n, hidden], chunk by chunk."""
        if not self.weights:
            raise EngineError("the engine is closed")
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free)
        self.kv.expect(tokens.size)
        chunks = [tokens[at : at + self.config.chunk] for at in range(0, tokens.size, self.config.chunk)]
        return np.concatenate([self._run_chunk(chunk) for chunk in chunks])

    def _run_chunk(self, tokens: IntArray) -> FloatArray:
        check_positions(self.spec, self.kv.next_position + tokens.size)
        rows, positions = self.kv.reserve(tokens.size)
        x = self.embed(tokens, positions)
        for layer in range(self.spec.layers):
            at = f"blk.{layer}."
            x = self.add(x, layer, "attn_output", self.mix(self.norm(x, f"{at}attn_norm"), layer, rows, positions))
            x = self.add(x, layer, "ffn_down", self.widen(self.norm(x, f"{at}ffn_norm"), layer))
        return x

    def embed(self, tokens: IntArray, positions: IntArray) -> FloatArray:
        """Hidden states before the first layer, [n, hidden]."""
        x = self.weights["token_embd"][tokens] * np.float32(self._recipe.embedding_scale)
        return np.asarray(x + self.weights["position_embd"][positions] if self._recipe.learned_positions else x)

    def mix(self, x: FloatArray, layer: int, rows: slice, positions: IntArray) -> FloatArray:
        """Attention: from the input of attn_q, attn_k and attn_v, [n, hidden], to the input of attn_output."""
        spec, recipe, count, rotation = self.spec, self._recipe, len(x), self.kv.rope.rotation
        queries = self._heads(self._project(x, layer, "attn_q"), f"blk.{layer}.attn_q_norm")
        keys = self._heads(self._project(x, layer, "attn_k"), f"blk.{layer}.attn_k_norm")
        values = self._heads(self._project(x, layer, "attn_v"))
        self.kv.keys[layer, :, rows] = rotation.rotate(keys, layer, positions)
        self.kv.values[layer, :, rows] = values
        seen_keys, seen_values = self.kv.keys[layer, :, : rows.stop], self.kv.values[layer, :, : rows.stop]

        # Each KV head serves a group of query heads: [KV heads, group, n, rows].
        queries = rotation.rotate(queries, layer, positions) * np.float32(recipe.query_scale)
        if recipe.temperature:
            queries *= temperatures(recipe.temperature, positions)[:, None]
        queries = queries.reshape(spec.kv_heads, spec.heads // spec.kv_heads, count, spec.head_dim)
        scores = soft_cap(queries @ seen_keys[:, None].swapaxes(-1, -2), recipe.score_cap)
        hidden = np.arange(rows.stop)[None, :] > np.arange(rows.start, rows.stop)[:, None]
        if window := recipe.windows[layer]:
            hidden |= self.kv.positions[None, :] <= positions[:, None] - window
        mixed = softmax(np.where(hidden, np.float32(-np.inf), scores)) @ seen_values[:, None]
        return np.asarray(mixed.reshape(spec.heads, count, spec.head_dim).swapaxes(0, 1).reshape(count, -1))

    def widen(self, x: FloatArray, layer: int) -> FloatArray:
        """The feed-forward network: from the input of ffn_gate and ffn_up to the input of ffn_down, [n, ffn]."""
        act = {"silu": silu, "gelu": gelu}[self._recipe.activation]
        up = self._project(x, layer, "ffn_up")
        return np.asarray(act(self._project(x, layer, "ffn_gate")) * up if self._recipe.gated else act(up))

    def add(self, x: FloatArray, layer: int, name: str, inner: FloatArray) -> FloatArray:
        """Add the output of attn_output or ffn_down to the hidden states."""
        behind = {"attn_output": "post_attention_norm", "ffn_down": "post_ffw_norm"}[name]
        added = self._norm_if_any(self._project(inner, layer, name), f"blk.{layer}.{behind}")
        return np.asarray(x + added * np.float32(self._recipe.residual_scale))

    def _heads(self, x: FloatArray, norm: str = "") -> FloatArray:
        """[n, heads · head size] to [heads, n, head size], each head normalised where the model does so."""
        return self._norm_if_any(np.asarray(x.reshape(len(x), -1, self.spec.head_dim).swapaxes(0, 1)), norm)

    @_UNWARNED
    def head(self, x: FloatArray) -> FloatArray:
        return self.logits(self.norm(x, "output_norm"))

    def logits(self, normed: FloatArray) -> FloatArray:
        """Of final states that are normalised, [n, hidden]."""
        head = self.weights["token_embd" if self.spec.tied_head else "output"]
        product = np.asarray(normed @ head.T * np.float32(self._recipe.logit_scale))
        return soft_cap(product, self._recipe.logit_cap)

    def _project(self, x: FloatArray, layer: int, name: str) -> FloatArray:
        product = x @ self.weights[f"blk.{layer}.{name}"].T
        if pair := self._lora.get(f"blk.{layer}.{name}"):
            product = product + (x @ pair[0].T) @ pair[1].T
        bias = self.weights.get(f"blk.{layer}.{name}.bias")
        return np.asarray(product if bias is None else product + bias)

    def norm(self, x: FloatArray, name: str) -> FloatArray:
        if self._recipe.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.spec.norm_eps))
        return np.asarray(scaled * self.weights[name] + self.weights.get(f"{name}.bias", np.float32(0)))

    def _norm_if_any(self, x: FloatArray, name: str) -> FloatArray:
        return self.norm(x, name) if name in self.weights else x


def silu(x: FloatArray) -> FloatArray:
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: FloatArray) -> FloatArray:
    """In its tanh form."""
    return np.asarray(x * np.float32(0.5) * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3))))


def soft_cap(x: FloatArray, cap: float) -> FloatArray:
    return np.asarray(cap * np.tanh(x / np.float32(cap))) if cap else x


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@_UNWARNED
def _dequantize(file: GGUFFile, name: str) -> FloatArray:
    from gguf.constants import GGMLQuantizationType  # here and not above: gguf costs 6 MB that other engines save
    from gguf.quants import dequantize

    info = file.tensors[name]
    rows = int(np.prod(info.shape[1:], dtype=np.int64))
    data = file.tensor_bytes(info).reshape(rows, -1)
    try:
        values = dequantize(data, GGMLQuantizationType(info.type_id))
    except NotImplementedError:
        raise UnsupportedError(
            f"the reference engine cannot read {info.type} ({name}): use --backend llamacpp"
        ) from None
    return np.asarray(values, np.float32).reshape(tuple(reversed(info.shape)))
