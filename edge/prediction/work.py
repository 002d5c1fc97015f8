"""What one pass of a model asks of a device: bytes that memory must deliver, and arithmetic. Counted, not measured."""

from __future__ import annotations

from dataclasses import dataclass

from edge.backends.base import EngineConfig, Footprint
from edge.model.spec import ModelSpec


@dataclass(frozen=True)
class Work:
    """weight_bytes, kv_bytes: read from memory, each once. flops: additions and multiplications, as though nothing were
    quantized; attention_flops: those of them that multiply queries with keys and weights with values."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    attention_flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.flops + other.flops,
            self.attention_flops + other.attention_flops,
        )


def work_of(spec: ModelSpec, config: EngineConfig, footprint: Footprint, tokens: int, context: int) -> Work:
    """Of one pass of `tokens` tokens when `context` rows are in the cache. footprint: the engine's for `config`.

    The head runs for the last token alone. A pass reads every row once, whatever the number of its tokens.
    """
    head = spec.vocab * spec.hidden
    layers = max(0, spec.parameters - head * (1 if spec.tied_head else 2))
    rows = footprint.kv / config.capacity * _seen_share(spec, context + tokens)
    attention = 4.0 * spec.heads * spec.head_dim * _pairs(spec, tokens, context)
    return Work(
        weight_bytes=footprint.weights - _looked_up(spec, config, footprint),
        kv_bytes=rows * (context + tokens),
        flops=2.0 * layers * tokens + 2.0 * head + attention,
        attention_flops=attention,
    )


def _looked_up(spec: ModelSpec, config: EngineConfig, footprint: Footprint) -> float:
    """Bytes of the token embedding where it is a table of its own, of which a pass reads a few rows: nothing."""
    if spec.tied_head:
        return spec.largest_tensor if config.repack else 0.0  # llama.cpp keeps the table in both layouts
    per_value = footprint.weights / max(1, spec.parameters)
    return min(spec.vocab * spec.hidden * per_value, float(spec.largest_tensor))


def _windows(spec: ModelSpec) -> list[int]:
    """How far back each layer sees, 0: all."""
    return list(spec.recipe.windows) if spec.recipe else [spec.window] * spec.layers


def _seen_share(spec: ModelSpec, rows: int) -> float:
    """Of the rows of all layers, those within the layers' windows."""
    return sum(min(rows, window or rows) / rows for window in _windows(spec)) / spec.layers


def _pairs(spec: ModelSpec, tokens: int, context: int) -> float:
    """Tokens × rows that they see, over all layers: token i sees context + i + 1 rows, or its window."""
    total = 0.0
    for window in _windows(spec):
        whole = tokens if not window else max(0, min(tokens, window - context))  # tokens that see all there is
        total += whole * context + whole * (whole + 1) / 2 + (tokens - whole) * window
    return total
