"""Figures that plans need about an engine before it is loaded."""

from __future__ import annotations

from dataclasses import replace

from edge.records import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes that an engine adds to the process, counted before load.

    Streamed weights count only `EngineConfig.resident` bytes at a time.
    """

    weights: int
    kv: int
    scratch: int  # compute buffers and logits
    runtime: int  # the engine's libraries and its own copy of the vocabulary
    streamed: int = 0  # of the weights: read again by every pass
    fixed_kv: int = 0  # of `kv`: independent of the capacity (`KVCache.fixed`)
    least_weights: int | None = None  # the least that `EngineConfig.resident` may be; None: this engine streams nothing
    lora: int = 0  # adapters, never streamed
    on_disk: int = 0  # not in `weights`: tables that stay in the file, of which a pass reads one row per token
    gpu: int = 0  # the part of weights, kv, scratch and adapters that is in GPU buffers


@dataclass
class ExpertCounts:
    """Expert counters of an engine that holds only some experts in memory. They grow while it is loaded."""

    slots: int  # experts that it holds at a time
    experts: int  # of all layers
    steps: int = 0  # passes of one token
    choices: int = 0  # experts chosen in steps
    misses: int = 0  # of these, experts that were not in memory
    read: int = 0  # bytes read in steps
    read_in_chunks: int = 0  # bytes read in all other passes

    def add(self, choices: int, misses: int, read: int, *, single: bool) -> None:
        if single:
            self.choices, self.misses, self.read = self.choices + choices, self.misses + misses, self.read + read
        else:
            self.read_in_chunks += read

    def since(self, before: ExpertCounts) -> ExpertCounts:
        """The counts since an earlier state."""
        fields = ("steps", "choices", "misses", "read", "read_in_chunks")
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in fields})

    @property
    def hit_rate(self) -> float | None:
        """The share of choices whose expert was in memory; None before the first step."""
        return 1 - self.misses / self.choices if self.choices else None

    @property
    def read_per_token(self) -> float | None:
        """Bytes read per step; None before the first step."""
        return self.read / self.steps if self.steps else None


@dataclass(frozen=True)
class ExpertForecast:
    """The expected use of experts by an engine that will hold only some of them in memory."""

    slots: int  # experts that it will hold at a time
    experts: int  # of all layers
    hit_rate: float  # the share of choices whose expert is in memory
    streamed: int  # bytes that a token reads, other weights included
    source: str  # of the hit rate


@dataclass(frozen=True)
class GPUMemory:
    """The memory of an engine's GPU."""

    adapter: str  # the GPU and its driver, as `EngineConfig.adapter`
    unified: bool  # buffers lie in the process's main memory
    free: int | None = None  # free bytes of a card's own memory; None: unified, or not reported by the driver


@dataclass(frozen=True)
class Tuned:
    """The tuned settings of a model on this device."""

    about: str  # names the record
    values: dict[str, int]  # `EngineConfig.tuning`
    threads: int | None  # None: left open
    chunk: int | None  # None: left open


@dataclass(frozen=True)
class MostRows:
    """The most KV rows for which the engine computes the model correctly, and the reason for the limit."""

    rows: int
    why: str


@dataclass(frozen=True)
class FixedSizes:
    """The constraints of static graphs, for NPUs, on a plan."""

    rows: int  # default KV rows; if compiled, also the most
    chunk: int  # default tokens of a prefill pass; if compiled, also the most
    context: int  # most rows, if not compiled
    kv_dtypes: tuple[str, ...]  # the first is the default
    compiled: bool
    emulated: bool  # see `EngineConfig.emulated`
