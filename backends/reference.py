"""The oracle: a Llama-family decoder in NumPy float32, written to be read.

Every weight is dequantized to float32 at load, every formula stands as in the paper. It is slow and large on
purpose; it is what the other engines are compared with.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np

from edge.backends.base import (
    Capabilities,
    EngineConfig,
    Footprint,
    KVState,
    Tuned,
    check_rows,
    check_tokens,
    state_key,
)
from edge.errors import EngineError, InputError, UnsupportedError
from edge.gguf_file import GGUFFile
from edge.model import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

NAME = "reference"
KV_DTYPES = ("f32",)

_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_GLOBAL_TENSORS = ("token_embd", "output_norm", "output", "rope_freqs")


def check_installed() -> None:
    """NumPy and gguf are part of the base install."""


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """Llama-family tensors only, no RoPE scaling but llama3's factors."""
    if spec.architecture != "llama":
        raise UnsupportedError(
            f"the reference engine runs llama models, not {spec.architecture}: use --backend llamacpp"
        )
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", ""):
        raise UnsupportedError(f"the reference engine has no RoPE scaling {scaling!r}: use --backend llamacpp")
    known = {f"{name}.weight" for name in _GLOBAL_TENSORS}
    known |= {f"blk.{layer}.{name}.weight" for layer in range(spec.layers) for name in _LAYER_TENSORS}
    if unknown := sorted(set(file.tensors) - known):
        raise UnsupportedError(f"the reference engine does not know tensor {unknown[0]}: use --backend llamacpp")
    if missing := sorted(known - set(file.tensors) - {"output.weight", "rope_freqs.weight"}):
        raise UnsupportedError(f"the model has no tensor {missing[0]}")


def can_repack(spec: ModelSpec) -> bool:
    return False


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Weights in float32; the widest intermediate results of one chunk."""
    attention = spec.heads * (config.capacity + 3 * spec.head_dim)
    widest = 3 * spec.ffn + 4 * spec.hidden + 2 * attention
    return Footprint(
        weights=4 * spec.parameters,
        kv=4 * spec.kv_values_per_row * config.capacity,
        scratch=4 * (config.chunk * widest + 2 * config.logits_rows * spec.vocab) + 2 * spec.largest_tensor,
        runtime=8 << 20,
    )


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    return None


def load(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> ReferenceEngine:
    """Dequantize every tensor and allocate the cache."""
    return ReferenceEngine(file, spec, config, progress)


def versions() -> dict[str, str]:
    return {"numpy": np.__version__}


class ReferenceKV:
    """Rotated keys, and values, float32 [layers, KV heads, capacity, head size]."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, frequencies: AnyArray) -> None:
        shape = (spec.layers, spec.kv_heads, config.capacity, spec.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.capacity = config.capacity
        self.nbytes = self.keys.nbytes + self.values.nbytes
        self.next_position = 0
        self._positions = np.zeros(config.capacity, np.int32)
        self._length = 0
        self._frequencies = frequencies
        self._key = state_key(NAME, file, spec, config)

    @property
    def length(self) -> int:
        return self._length

    @property
    def positions(self) -> IntArray:
        return self._positions[: self._length]

    def append(self, count: int) -> tuple[slice, IntArray]:
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
            self.keys[:, :, :count] = rotate(self.keys[:, :, :count], moved, self._frequencies)
            self._positions[:count] += moved
            self.next_position = count

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise InputError(f"cannot truncate {self._length} rows to {length}")
        self._length = length
        self.next_position = int(self._positions[length - 1]) + 1 if length else 0

    def save(self) -> KVState:
        data = io.BytesIO()
        np.save(data, np.stack([self.keys[:, :, : self._length], self.values[:, :, : self._length]]))
        return KVState(self._key, self.positions.copy(), self.next_position, data.getvalue())

    def restore(self, state: KVState) -> None:
        if state.key != self._key:
            raise InputError("the saved KV state belongs to another model, engine, KV dtype or capacity")
        keys, values = np.load(io.BytesIO(state.data), allow_pickle=False)
        count = state.positions.size
        self.keys[:, :, :count], self.values[:, :, :count] = keys, values
        self._positions[:count], self._length, self.next_position = state.positions, count, state.next_position


class ReferenceEngine:
    """Engine protocol over plain NumPy."""

    capabilities = Capabilities(granularity="token", kv_dtypes=KV_DTYPES)

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config = spec, config
        self._weights: dict[str, FloatArray] = {}
        for done, name in enumerate(file.tensors, start=1):
            self._weights[name.removesuffix(".weight")] = _dequantize(file, name)
            if progress:
                progress(done / len(file.tensors))
        self._frequencies: AnyArray = spec.rope_base ** (-np.arange(0, spec.rope_dim, 2) / spec.rope_dim)
        if "rope_freqs" in self._weights:  # llama3: long wavelengths are stretched
            self._frequencies = self._frequencies / self._weights["rope_freqs"]
        self.kv = ReferenceKV(file, spec, config, self._frequencies)

    def forward(self, tokens: IntArray) -> FloatArray:
        return self._head(self._run(tokens)[-1:]).reshape(-1)

    def forward_all(self, tokens: IntArray) -> FloatArray:
        hidden, step = self._run(tokens), self.config.logits_rows
        return np.concatenate([self._head(hidden[at : at + step]) for at in range(0, len(hidden), step)])

    def close(self) -> None:
        self._weights.clear()

    def _run(self, tokens: IntArray) -> FloatArray:
        """Final hidden states of all tokens, [n, hidden], chunk by chunk."""
        if not self._weights:
            raise EngineError("the engine is closed")
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.capacity - self.kv.length)
        chunks = [tokens[at : at + self.config.chunk] for at in range(0, tokens.size, self.config.chunk)]
        return np.concatenate([self._run_chunk(chunk) for chunk in chunks])

    def _run_chunk(self, tokens: IntArray) -> FloatArray:
        rows, positions = self.kv.append(tokens.size)
        x = self._weights["token_embd"][tokens]
        for layer in range(self.spec.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), rows, positions)
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        return x

    def _attention(self, layer: int, x: FloatArray, rows: slice, positions: IntArray) -> FloatArray:
        spec, count = self.spec, len(x)
        queries = self._project(x, layer, "attn_q").reshape(count, spec.heads, spec.head_dim).swapaxes(0, 1)
        keys = self._project(x, layer, "attn_k").reshape(count, spec.kv_heads, spec.head_dim).swapaxes(0, 1)
        values = self._project(x, layer, "attn_v").reshape(count, spec.kv_heads, spec.head_dim).swapaxes(0, 1)
        self.kv.keys[layer, :, rows] = rotate(keys, positions, self._frequencies)
        self.kv.values[layer, :, rows] = values
        seen_keys, seen_values = self.kv.keys[layer, :, : rows.stop], self.kv.values[layer, :, : rows.stop]

        # Each KV head serves a group of query heads: [KV heads, group, n, rows].
        queries = rotate(queries, positions, self._frequencies)
        queries = queries.reshape(spec.kv_heads, spec.heads // spec.kv_heads, count, spec.head_dim)
        scores = queries @ seen_keys[:, None].swapaxes(-1, -2) / np.float32(np.sqrt(spec.head_dim))
        future = np.arange(rows.stop)[None, :] > np.arange(rows.start, rows.stop)[:, None]
        mixed = softmax(np.where(future, np.float32(-np.inf), scores)) @ seen_values[:, None]
        merged = mixed.reshape(spec.heads, count, spec.head_dim).swapaxes(0, 1).reshape(count, -1)
        return self._project(merged, layer, "attn_output")

    def _feed_forward(self, layer: int, x: FloatArray) -> FloatArray:
        gate, up = self._project(x, layer, "ffn_gate"), self._project(x, layer, "ffn_up")
        return self._project(gate / (1 + np.exp(-gate)) * up, layer, "ffn_down")

    def _head(self, x: FloatArray) -> FloatArray:
        head = self._weights["token_embd" if self.spec.tied_head else "output"]
        return np.asarray(self._norm(x, "output_norm") @ head.T)

    def _project(self, x: FloatArray, layer: int, name: str) -> FloatArray:
        return np.asarray(x @ self._weights[f"blk.{layer}.{name}"].T)

    def _norm(self, x: FloatArray, name: str) -> FloatArray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.spec.norm_eps))
        return np.asarray(x * scale * self._weights[name])


def rotate(x: FloatArray, positions: IntArray, frequencies: AnyArray) -> FloatArray:
    """RoPE: turn the pairs (2i, 2i+1) of x [..., n, head size] by position · frequency_i.

    GGUF stores Llama's Q and K rows so that neighbours form a pair. Angles are float64, so that position 10^7 is
    as exact as position 10. Values beyond 2 · len(frequencies) are left as they are (partial rotation).
    """
    angles = positions[:, None].astype(np.float64) * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    width = 2 * frequencies.size
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    out = np.array(x)
    out[..., 0:width:2] = even * cos - odd * sin
    out[..., 1:width:2] = even * sin + odd * cos
    return out


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


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
