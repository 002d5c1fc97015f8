"""A llama of any row shape in float64, written as its formulas stand; rows keep their keys before RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from small_models import Small, random_weights

from edge.types import AnyArray

_EPSILON, _BASE = 1e-5, 10_000.0


class Plain:
    """keys, values, positions: of each layer and KV head, those that it keeps. attention: what they have received.

    shared: a value is the beginning of its key, and RoPE rotates the rest of keys and queries, as in latent attention.
    """

    def __init__(self, small: Small, *, shared: bool = False) -> None:
        self.small, self._shared = small, shared
        self._first = small.value if shared else 0  # rotated value of a head
        self.weights = {name: each.astype(np.float64) for name, each in random_weights(small).items()}
        heads = small.layers * small.kv_heads
        self.keys: list[AnyArray] = [np.zeros((0, small.head))] * heads
        self.values: list[AnyArray] = [np.zeros((0, small.value or small.head))] * heads
        self.positions: list[AnyArray] = [np.zeros(0, np.int64)] * heads
        self.attention: list[AnyArray] = [np.zeros(0)] * heads
        self.next_position = 0

    def run(self, tokens: AnyArray, positions: AnyArray | None = None, sees: AnyArray | None = None) -> AnyArray:
        """Logits after each token."""
        count, w = len(tokens), self.weights
        positions = self.next_position + np.arange(count) if positions is None else positions
        sees = np.arange(count) if sees is None else sees
        x = w["token_embd"][tokens]
        for layer in range(self.small.layers):
            at = f"blk.{layer}."
            x = x + self._attend(layer, _rms(x) * w[f"{at}attn_norm"], positions, sees) @ w[f"{at}attn_output"].T
            normed = _rms(x) * w[f"{at}ffn_norm"]
            gate = normed @ w[f"{at}ffn_gate"].T
            x = x + gate / (1 + np.exp(-gate)) * (normed @ w[f"{at}ffn_up"].T) @ w[f"{at}ffn_down"].T
        self.next_position = int(positions.max()) + 1
        return np.asarray(_rms(x) * w["output_norm"] @ w["token_embd"].T)

    def _attend(self, layer: int, x: AnyArray, positions: AnyArray, sees: AnyArray) -> AnyArray:
        small, found = self.small, []
        q, k, v = (x @ self.weights[f"blk.{layer}.attn_{name}"].T for name in "qkv")
        group, value = small.heads // small.kv_heads, small.value or small.head
        for kv_head in range(small.kv_heads):
            own = layer * small.kv_heads + kv_head
            before = len(self.keys[own])
            self.keys[own] = np.concatenate([self.keys[own], k[:, kv_head * small.head :][:, : small.head]])
            made = self.keys[own][before:] if self._shared else v[:, kv_head * value :]
            self.values[own] = np.concatenate([self.values[own], made[:, :value]])
            self.positions[own] = np.concatenate([self.positions[own], positions])
            self.attention[own] = np.concatenate([self.attention[own], np.zeros(len(x))])
            keys = _rotated(self.keys[own], self.positions[own], self._first)
            for head in range(kv_head * group, (kv_head + 1) * group):
                queries = _rotated(q[:, head * small.head :][:, : small.head], positions, self._first)
                scores = queries @ keys.T / np.sqrt(small.head)
                scores[np.arange(len(keys)) > before + sees[:, None]] = -np.inf
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                shares /= shares.sum(axis=1, keepdims=True)
                self.attention[own] = self.attention[own] + shares.sum(axis=0) / group
                found.append(shares @ self.values[own])
        return np.concatenate(found, axis=1)

    def keep(self, rows: Sequence[AnyArray], *, close_gaps: bool = False) -> None:
        """Keep rows of each head, or the same rows of all."""
        rows = list(rows) * (len(self.keys) // len(rows))
        for each in (self.keys, self.values, self.positions, self.attention):
            each[:] = [array[own] for array, own in zip(each, rows, strict=True)]
        if close_gaps:
            self.positions = [np.arange(len(own)) for own in rows]
            self.next_position = len(rows[0])


def _rms(x: AnyArray) -> AnyArray:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPSILON))


def _rotated(x: AnyArray, positions: AnyArray, first: int) -> AnyArray:
    """Neighbouring values, from `first` on, as complex numbers."""
    plain, x = x[:, :first], x[:, first:]
    size = x.shape[1]
    angles = positions[:, None] * _BASE ** (-np.arange(0, size, 2) / size)
    rotated = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
    return np.concatenate([plain, np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)], axis=1)
