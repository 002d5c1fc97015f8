"""What one pass of a model asks of a device: bytes that memory must deliver, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edge.backends.base import EngineConfig, Footprint
from edge.devices.paging import measure_paging
from edge.model.spec import ModelSpec
from edge.storage.cache import cache_folder, entries


@dataclass(frozen=True)
class Work:
    """weight_bytes, kv_bytes: read from memory, each once. flops: additions and multiplications, as of unquantized
    weights; attention_flops: those of them that multiply queries with keys and weights with values."""

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
    idle = spec.expert_parameters * (1 - spec.experts_used / spec.experts) if spec.experts else 0.0
    layers = max(0, spec.parameters - spec.table_parameters - idle - head * (1 if spec.tied_head else 2))
    attention = sum(4.0 * each.width * _pairs(each.window, tokens, context) for each in _readers(spec))
    return Work(
        weight_bytes=footprint.weights - _looked_up(spec, config, footprint) - _idle_bytes(spec, tokens),
        kv_bytes=_kv_bytes(spec, config, footprint, context + tokens),
        flops=2.0 * layers * tokens + 2.0 * head + attention,
        attention_flops=attention,
    )


def _looked_up(spec: ModelSpec, config: EngineConfig, footprint: Footprint) -> float:
    """Bytes of tables, of which a pass reads a few rows: nothing. The token embedding is one unless it is the head."""
    tables = spec.table_bytes - footprint.on_disk
    if spec.tied_head:  # llama.cpp keeps the embedding in both layouts
        return tables + (spec.embedding_bytes if config.repack else 0.0)
    per_value = footprint.weights / max(1, spec.parameters)
    return tables + min(spec.vocab * spec.hidden * per_value, float(spec.largest_tensor))


def _idle_bytes(spec: ModelSpec, tokens: int) -> float:
    """Of the experts that no token of a pass needs."""
    return spec.expert_bytes * (1 - spec.experts_read(tokens))


class _Reader(NamedTuple):
    """A layer that reads KV rows, its own or an earlier layer's."""

    window: int  # how far back it sees; 0: all
    values: int  # of keys and values in a row
    width: int  # values of all heads' queries


def _readers(spec: ModelSpec) -> list[_Reader]:
    if spec.network is not None:
        cores = filter(None, spec.network.attention)
        return [_Reader(core.window, 2 * core.kv_heads * core.head_dim, core.width) for core in cores]
    rows = zip(spec.windows, spec.kv_values, strict=True)
    return [_Reader(window, values, spec.heads * spec.head_dim) for window, values in rows if values]


def _kv_bytes(spec: ModelSpec, config: EngineConfig, footprint: Footprint, rows: int) -> float:
    """Of so many rows, as far back as each layer sees, and of a recurrent state."""
    values = list(zip(spec.windows, spec.kv_values, strict=True))
    in_rings = bool(footprint.fixed_kv) and not spec.recurrent  # rows of layers with windows are not in every row
    stored = sum(count for window, count in values if not (in_rings and window))
    row = (footprint.kv - footprint.fixed_kv) / config.capacity
    seen = sum(each.values * min(rows, each.window or rows) for each in _readers(spec))
    return row * seen / max(1, stored) + (footprint.fixed_kv if spec.recurrent else 0)


def _pairs(window: int, tokens: int, context: int) -> float:
    """Tokens × rows that they see in a layer: token i sees context + i + 1 rows, or its window."""
    whole = tokens if not window else max(0, min(tokens, window - context))  # tokens that see all there is
    return whole * context + whole * (whole + 1) / 2 + (tokens - whole) * window


@dataclass(frozen=True)
class Streaming:
    """bytes: read anew by every pass, that is for every token of an answer and every chunk of a prompt.

    cached_s: seconds that this adds to a pass as long as the system keeps the file in its page cache; disk_s: if it
    does not. Both measured here; None where they cannot be. from_disk: the system's memory leaves no room for them.
    """

    bytes: int
    cached_s: float | None
    disk_s: float | None
    from_disk: bool

    @property
    def added_s(self) -> float | None:
        """Seconds that are to be expected."""
        return self.disk_s if self.from_disk else self.cached_s


def streaming_cost(
    streamed: int, threads: int, model: str = "", *, room: int | None = None, here: bool = True
) -> Streaming | None:
    """Of a plan's `bytes.streamed`; None if that is nothing. Measured in the cache folder, where such weights lie.

    model: the name of its file; if it has been packed already, the packed file is measured. room: bytes that the system
    has besides what the plan needs; None: enough. here: the plan is for this device; of others nothing is known.
    """
    if not streamed:
        return None
    from_disk = room is not None and room < streamed
    paging = measure_paging(cache_folder(), threads, _packed(model)) if here else None
    if paging is None:
        return Streaming(streamed, None, None, from_disk)
    return Streaming(streamed, streamed * paging.cached, streamed * paging.disk, from_disk)


def _packed(model: str) -> Path | None:
    """The newest packed weights of a model."""
    found = [entry for entry in entries("weights") if entry.about == model]
    return max(found, key=lambda entry: entry.last_used).path if found else None
