"""The work of one pass of a model: bytes read from memory, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edge.backends.base import EngineConfig
from edge.backends.counts import ExpertForecast, Footprint
from edge.devices.memory.paging import measure_paging
from edge.model.structure.spec import ModelSpec
from edge.storage.cache import cache_folder, entries


@dataclass(frozen=True)
class Work:
    """The work of a pass."""

    weight_bytes: float  # read from memory, each once
    kv_bytes: float  # read from memory, each once
    flops: float  # additions and multiplications, as with unquantized weights
    attention_flops: float = 0.0  # part of flops: products of queries with keys, and of scores with values

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
    """The work of a pass of `tokens` tokens with `context` rows in the cache. footprint: the engine's for `config`.

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
    """Bytes of lookup tables, of which a pass reads a negligible number of rows: the token embedding, unless it is the
    head."""
    tables = spec.table_bytes - footprint.on_disk
    if spec.tied_head:  # llama.cpp keeps the embedding in both layouts
        return tables + (spec.embedding_bytes if config.repack else 0.0)
    per_value = footprint.weights / max(1, spec.parameters)
    return tables + min(spec.vocab * spec.hidden * per_value, float(spec.largest_tensor))


def _idle_bytes(spec: ModelSpec, tokens: int) -> float:
    """Bytes of the experts that no token of a pass uses."""
    return spec.expert_bytes * (1 - spec.experts_read(tokens))


class _Reader(NamedTuple):
    """A layer that reads KV rows, its own or an earlier layer's."""

    window: int  # rows that it reads, at most; 0: all
    values: int  # of keys and values in a row
    width: int  # values of all heads' queries


def _readers(spec: ModelSpec) -> list[_Reader]:
    if spec.network is not None:
        cores = filter(None, spec.network.attention)
        return [_Reader(core.window, core.row.values, core.width) for core in cores]
    rows = zip(spec.windows, spec.kv_values, strict=True)
    return [_Reader(window, values, spec.heads * spec.head_dim) for window, values in rows if values]


def _kv_bytes(spec: ModelSpec, config: EngineConfig, footprint: Footprint, rows: int) -> float:
    """Bytes of the rows that the layers read, of `rows` in the cache, and of recurrent states."""
    values = list(zip(spec.windows, spec.kv_values, strict=True))
    in_rings = bool(footprint.fixed_kv) and not spec.recurrent  # window layers keep their rows in rings of fixed size
    stored = sum(count for window, count in values if not (in_rings and window))
    row = (footprint.kv - footprint.fixed_kv) / config.capacity
    seen = sum(each.values * min(rows, each.window or rows) for each in _readers(spec))
    return row * seen / max(1, stored) + (footprint.fixed_kv if spec.recurrent else 0)


def _pairs(window: int, tokens: int, context: int) -> float:
    """Pairs of a token and a row that it reads in a layer: token i reads context + i + 1 rows, or the window's."""
    whole = tokens if not window else max(0, min(tokens, window - context))  # tokens that read all rows
    return whole * context + whole * (whole + 1) / 2 + (tokens - whole) * window


@dataclass(frozen=True)
class Streaming:
    """The cost of weights that every pass reads again: each token of an answer, each chunk of a prompt."""

    bytes: int  # read by each pass
    cached_s: float | None  # seconds added to a pass while the page cache holds the file; measured here, or None
    disk_s: float | None  # the same, if it does not
    from_disk: bool  # the system's memory has no room for them
    experts: ExpertForecast | None = None  # where a part of the experts stays in memory

    @property
    def added_s(self) -> float | None:
        """The seconds that a pass is expected to take longer; None: unknown."""
        return self.disk_s if self.from_disk else self.cached_s


def streaming_cost(
    streamed: int, threads: int, model: str = "", *, room: int | None = None, here: bool = True
) -> Streaming | None:
    """The cost of a plan's `bytes.streamed`; None if there are none. Measured in the cache folder, where such weights
    lie.

    model: name of its file; if its weights have been packed, the packed file is measured. room: bytes that the system
    has beyond the plan's needs; None: enough. here: whether the plan is for this device; else the cost is unknown.
    """
    if not streamed:
        return None
    from_disk = room is not None and room < streamed
    paging = measure_paging(cache_folder(), threads, _packed(model)) if here else None
    if paging is None:
        return Streaming(streamed, None, None, from_disk)
    return Streaming(streamed, streamed * paging.cached, streamed * paging.disk, from_disk)


def _packed(model: str) -> Path | None:
    """The newest packed weights file of a model."""
    found = [entry for entry in entries("weights") if entry.about == model]
    return max(found, key=lambda entry: entry.last_used).path if found else None
