"""What is counted or looked up of an engine before it is loaded, for the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes that an engine adds to the process: predicted before load, by counting.

    Of the weights, where they are streamed, only `EngineConfig.resident` at a time.
    """

    weights: int
    kv: int
    scratch: int  # compute buffers and logits
    runtime: int  # the engine's libraries and its own copy of the vocabulary
    streamed: int = 0  # of the weights, what every pass reads anew
    fixed_kv: int = 0  # of `kv`, what does not depend on the capacity (`KVCache.fixed`)
    least_weights: int | None = None  # the least that `EngineConfig.resident` may be; None: this engine streams nothing
    lora: int = 0  # adapters, never streamed
    gpu: int = 0  # of weights, kv and scratch, what lies in buffers of a GPU


@dataclass(frozen=True)
class GPUMemory:
    """Where the buffers of an engine's GPU lie.

    adapter: the GPU and its driver, as `EngineConfig.adapter`. unified: in the process's main memory. free: bytes of a
    card's own memory that are free; None: its driver does not tell, or the memory is unified.
    """

    adapter: str
    unified: bool
    free: int | None = None


@dataclass(frozen=True)
class Tuned:
    """What a tuning record says of a model on this device. `about` names the record.

    values: `EngineConfig.tuning`. threads, chunk: None where the record leaves them open.
    """

    about: str
    values: dict[str, int]
    threads: int | None
    chunk: int | None


@dataclass(frozen=True)
class MostRows:
    """The most KV rows with which an engine's answers are the model's own, and why no more."""

    rows: int
    why: str


@dataclass(frozen=True)
class FixedSizes:
    """What graphs of fixed sizes, as NPUs want them, say of a plan. rows, chunk: the default KV rows and tokens in
    prefill; the most, if compiled: those that the model was compiled for. context: the most rows otherwise. kv_dtypes:
    the first is the default. emulated: `EngineConfig.emulated`. tuned: what was found for this device, of which `chunk`
    is a part."""

    rows: int
    chunk: int
    context: int
    kv_dtypes: tuple[str, ...]
    compiled: bool
    emulated: bool
    tuned: Tuned | None = None
