"""The interfaces of engines: describing, planning, loading and running one.

An engine knows nothing of prompts, budgets or policies. It runs tokens and keeps the KV rows it is told to keep
(`kv_cache.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from edge.backends.counts import ExpertForecast, FixedSizes, Footprint, GPUMemory, MostRows, Tuned
from edge.backends.efficiency import Efficiency, Kind
from edge.backends.kv_cache import KVCache
from edge.errors import UnsupportedError
from edge.formats.blocks import FLOATS
from edge.formats.gguf import GGUFFile
from edge.model.cores import Core
from edge.model.lora import Lora
from edge.model.spec import ModelSpec
from edge.records import dataclass
from edge.storage.versions import version_of
from edge.types import FloatArray, Granularity, IntArray

if TYPE_CHECKING:
    from edge.devices.power.nvml import Card


@dataclass(frozen=True)
class EngineConfig:
    """The plan's decisions for an engine. All memory is allocated at load; nothing grows afterwards.

    One flat record for all engines, because plans, reports and saved profiles show it so, and profiles are read back
    without their engine. The plan weighs `repack` and `resident` against KV rows within the budget, and derives
    `observes`, `per_head`, `uneven`, `reads` and `pinned` from the KV policy. It only passes `provider`, `gpu_layers`,
    `adapter` and `tuning` on. Engines that lack a feature ignore its field.
    """

    capacity: int  # KV rows per layer and KV head
    chunk: int  # most tokens that run at once in prefill
    kv_dtype: str
    threads: int
    logits_rows: int = 1  # most rows of logits that exist at once; forward_all works through longer inputs in steps
    sequences: int = 1  # cpu: that run at once, each with as many rows (`BatchedEngine`)
    observes: bool = False  # attention scores can be summed: cpu and onnx need room for them, llamacpp is slower
    per_head: bool = False  # cpu, onnx: room for the bookkeeping of rows that differ from head to head
    uneven: bool = False  # heads may keep different numbers of rows (`Capabilities.uneven`)
    pinned: int = 16  # cpu, onnx: first rows whose exact keys are remembered, since closing gaps rotates them again

    repack: bool = False  # weights repacked in private memory (faster), not mapped (reclaimable): `Backend.can_repack`
    provider: str = "cpu"  # onnx: the execution provider of ONNX Runtime
    emulated: bool = False  # onnx: on the CPU, which computes what an NPU would
    gpu_layers: int = 0  # llamacpp: layers whose weights are on a GPU
    adapter: str = ""  # gpu: the one that the plan is for (`GPUMemory.adapter`); empty: the engine's own choice
    frugal: bool = False  # cpu: compile in less memory, and before weights are packed, which takes longer
    resident: int = 0  # bytes of weights in memory at a time, the rest is streamed (`Footprint.least_weights`); 0: all
    tuning: dict[str, int] = field(default_factory=dict)  # what `edge tune` chose, where it differs from the defaults
    lora_rank: int = 0  # the largest rank of adapters that there is room for; 0: the engine is loaded without any
    lora_bytes: int = 0  # of their files
    reads: int = 0  # cpu: most rows that a KV head reads for a token alone, in pages that it chooses; 0: all
    drafts: int = 0  # cpu: most drafted tokens that are verified at once (`VerifyingEngine`)
    mtp: bool = False  # the plan's, no engine reads it: a layer for multi-token prediction drafts (`StatesEngine`)
    loras: int = 1  # cpu: adapters that there is room for, of sequences with different ones

    @property
    def together(self) -> int:
        """Most tokens of one pass that are computed as if each ran alone."""
        return max(self.sequences, 1 + self.drafts)


# Parts of a pass, in its order; engines name their operators as they like, but put each into one of these.
PHASES = ("embed", "norm", "qkv", "attend", "output", "gate-up", "down", "head", "other")


@dataclass(frozen=True)
class Operator:
    """One piece of work of a pass, as an instrumented engine timed it: the median over passes, all calls together.

    Medians of parts add up to less than the median pass where something disturbs now this part, now that. Bytes and
    operations are counted from shapes, and None where that says nothing.
    """

    name: str  # the engine's own, the same in every layer
    phase: str  # one of `PHASES`
    layer: int | None  # None outside of layers
    calls: int  # in one pass
    seconds: float  # wall time, not summed over threads
    bytes: int | None  # of weights and KV rows, each counted once a call
    flops: int | None  # of products and attention, 2 · m · n · k
    waited: float | None = None  # the share of all threads' time spent waiting for each other; None: unknown


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an engine, by which options are checked and plans are made."""

    granularity: Granularity  # the finest unit that may keep rows of its own
    uneven: Granularity  # the finest that may keep a *number* of its own; "token": all heads keep equally many
    kv_dtypes: tuple[str, ...]  # the first is the default
    attention: bool  # policies may see it
    keys: bool  # likewise
    tunable: bool = False  # `edge tune` finds settings for it
    providers: bool = False  # it takes --provider
    folders: bool = False  # it runs folders in ONNX
    gpu_layers: bool = False  # it takes --gpu-layers
    lora: bool = False  # it runs adapters (`AdaptedEngine`)
    any_tokenizer: bool = False  # it runs models whose tokenizer edge does not know
    tops: bool = False  # it can return the largest logits alone (`TopEngine`)
    picks: bool = False  # it chooses tokens itself (`PickingEngine`)
    hidden: bool = False  # it hands out hidden states (`HiddenEngine`)
    gpu: bool = False  # it runs on a GPU (`CardEngine`)
    sequences: bool = False  # it runs several at once (`BatchedEngine`)
    pages: bool = False  # it can read some of the rows for a token (`EngineConfig.reads`)
    verifies: bool = False  # it runs several tokens with the results of single ones (`VerifyingEngine`)


class Engine(Protocol):
    """A model, loaded. Arrays that `forward` returns are valid until the next call; the caller may write to them."""

    spec: ModelSpec
    config: EngineConfig
    capabilities: Capabilities

    @property
    def kv(self) -> KVCache: ...

    def forward(self, tokens: IntArray) -> FloatArray:
        """Run tokens, int [n]; append n rows. Returns logits after the last, float32 [vocab].

        Raises CapacityError if fewer than n rows are free, InputError for token ids outside the vocabulary.
        """
        ...

    def forward_all(self, tokens: IntArray) -> FloatArray:
        """As `forward`, with the logits after every token, float32 [n, vocab]."""
        ...

    def close(self) -> None: ...


class ObservedEngine(Engine, Protocol):
    """An engine that can add up attention in its cache."""

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """Add up what the last `queries` tokens of every pass pay to each row; 0 observes nothing.

        votes: count instead how many of them paid it more than the average of what they see.
        """
        ...


class BatchedEngine(Engine, Protocol):
    """An engine that keeps `EngineConfig.sequences` sequences apart. Its own `kv` and passes are those of the first."""

    def sequence(self, number: int) -> Engine:
        """One of the sequences, from 0: its `kv`, and passes of its tokens alone; an `ObservedEngine`, and an
        `AdaptedEngine`, if this is one, that changes its own adapters alone. Closed with the engine."""
        ...

    def forward_batch(self, tokens: IntArray, sequences: Sequence[int]) -> FloatArray:
        """Run the next token of each of several sequences, int [n]; append a row to each. Returns their logits, float32
        [n, vocab], the same to the last bit as `forward` of each alone.

        Raises what `forward` raises, and InputError for sequences that are not there, not different, or with different
        adapters.
        """
        ...


class AdaptedEngine(Engine, Protocol):
    """An engine that runs LoRA adapters."""

    def set_lora(self, lora: Lora | None) -> None:
        """Run these adapters from here on, or none; empties the cache, whose `key` names them.

        Raises InputError if their rank is more than `EngineConfig.lora_rank`, ModelFormatError for values that are not
        finite; then the adapters stay those before.
        """
        ...


class HiddenEngine(Engine, Protocol):
    """An engine that hands out hidden states, from which embeddings are made."""

    def hidden(self, tokens: IntArray) -> FloatArray:
        """As `forward`, with the normalised state behind the last layer after every token, float32 [n, hidden], of
        which logits are made."""
        ...


class CardEngine(Engine, Protocol):
    """An engine that may run on a graphics card. card: one whose own counter tells its joules; None: there is none."""

    card: Card | None


class TopEngine(Engine, Protocol):
    """An engine for which the largest logits are less work than all.

    most_candidates: logits that are; 0 where none are.
    """

    most_candidates: int

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """As `forward`, but returns only the `count` largest logits (all, if there are fewer): ids int32 [n] and logits
        float32 [n], the largest first, equal ones by their ids, NaN before all others. −0 may come as 0. Arrays that
        the engine returned before are invalid."""
        ...


class MTPEngine(TopEngine, Protocol):
    """An engine of a layer for multi-token prediction, as a model of its own (`ModelSpec.mtp`). Its own states are a
    draft of those of its model, so that it can go on from them."""

    def states(self, count: int) -> FloatArray:
        """The normalised states behind the last layer after the last tokens of the newest pass, float32 [at most
        `count`, hidden]."""
        ...

    def give(self, states: FloatArray) -> None:
        """The model's states behind the tokens before those that `forward` runs next, float32 [n, hidden], at most a
        chunk. The embeddings of these tokens join them (`NextToken`)."""
        ...


class StatesEngine(HiddenEngine, Protocol):
    """An engine that hands out the states of each pass, and runs the layer that drafts from them."""

    def states(self, count: int) -> FloatArray:
        """As `MTPEngine.states`."""
        ...

    def open_mtp(self, file: GGUFFile, config: EngineConfig, progress: LoadProgress | None = None) -> MTPEngine:
        """The engine of `ModelSpec.mtp`, which reads this one's embedding and head. file: `mtp_file` of the model's.
        Raises what `Backend.load` raises."""
        ...


class PickingEngine(TopEngine, Protocol):
    """An engine that can choose tokens where its logits are, so that the host neither waits after each nor reads all.

    Both methods append rows as `forward` does, and leave no logits: arrays that it returned before are invalid.
    most_banned: tokens that `run_greedy` can exclude.
    """

    most_banned: int

    def run_greedy(self, token: int, count: int, banned: IntArray) -> IntArray:
        """Run `token`, then the likeliest token after it, and so on: as `count` calls of `forward` with one token each,
        where the next token is the argmax of the logits (the lowest id of equal ones), with −∞ for those of `banned`.

        Returns the likeliest token after each of those that were run, int32 [n], with 1 ≤ n ≤ count: fewer where that
        many cannot run at once, or could not be forgotten again. n rows are appended; the last token that is returned
        has none yet. `kv.truncate` can leave any number of the new rows but 0; attention that was observed stays.

        Raises what `forward` raises; CapacityError if fewer than `count` rows are free; EngineError (`NOT_FINITE`) for
        NaN among the first logits. It returns what comes before NaN among later ones.
        """
        ...


class ChoosingEngine(Engine, Protocol):
    """An engine that reads some of its rows for a token that runs alone, as those of `forward_all` then do
    (`EngineConfig.reads`)."""

    def choose_rows(self, *, on: bool) -> None:
        """Whether it does so, as at first, or reads all rows."""
        ...


class VerifyingEngine(Engine, Protocol):
    """An engine that runs several tokens at once with the results of single ones."""

    def verify(self, tokens: IntArray) -> FloatArray:
        """Run the first n of the tokens, int [at most 1 + `EngineConfig.drafts`], as many as can be forgotten again;
        append n rows. Returns the logits after each, float32 [n, vocab]. They and the rows are to the last bit those of
        n calls of `forward` with one token each.

        Raises what `forward` raises.
        """
        ...


class LoadProgress(Protocol):
    def __call__(self, part: float, doing: str = "", /) -> None:
        """Called with the fraction that is loaded, and the present task if it is more than reading a file."""


class Backend(ABC):
    """An engine before a model is loaded: its abilities, its footprint, and loading.

    An engine's folder holds one subclass, and `ENGINE`, an object of it. Libraries are imported in the methods: all
    engines are asked for their capabilities, and most are not used.
    """

    NAME: str
    CAPABILITIES: Capabilities
    EFFICIENCY: Efficiency
    PACKAGES: tuple[str, ...]  # the distributions that it runs on, for reports
    DRIVER_BYTES = 0  # of GPU drivers, even to show their GPUs: `check_supported` and `gpu_memory` load them
    MOST_SNAPSHOTS = 4  # of a conversation's ends, where caches have tails: two of each turn

    def check_installed(self) -> None:  # noqa: B027 - nothing to do where the base install is enough
        """Raise MissingExtraError if the engine's package is not there."""

    @abstractmethod
    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """Raise UnsupportedError if the engine cannot run this model."""

    def check_elsewhere(self, file: GGUFFile, spec: ModelSpec, system: str) -> None:
        """Raise UnsupportedError if the engine cannot run this model on another device, of such a system."""
        self.check_supported(file, spec)

    def supports(self, core: Core) -> str | None:
        """None if the engine runs the core; else its name in a refusal, such as "gated delta nets"."""
        return None

    def weight_kind(self, weight_type: str, config: EngineConfig) -> Kind:
        """How the engine multiplies weights of a block type."""
        return "floats" if weight_type in FLOATS else "integers"

    def most_rows(self, spec: ModelSpec, expected: int | None) -> MostRows:
        """The context that the model was trained for, where engines do not limit it further. expected: the tokens of
        the run, if they are known."""
        return MostRows(spec.context, f"the model knows {spec.context} positions")

    def keeps_all(self, spec: ModelSpec) -> str | None:
        """Why the engine can evict no rows of this model, so that policy `full` is the only one; None if it can."""
        return "an encoder sees whole texts" if spec.encoder else None

    def most_drafts(self, spec: ModelSpec, tuning: Mapping[str, int]) -> int:
        """Drafted tokens that are worth verifying at once (`VerifyingEngine`); 0 where that cannot be, or where wrong
        ones could not be forgotten without a trace. tuning: `EngineConfig.tuning`."""
        return 0

    def runs_mtp(self, spec: ModelSpec) -> bool:
        """Whether the model has a layer for multi-token prediction that the engine runs (`StatesEngine`)."""
        return False

    def can_repack(self, spec: ModelSpec) -> bool:
        """Whether `EngineConfig.repack` speeds this model up."""
        return False

    def fixed_sizes(self, spec: ModelSpec, provider: str | None, *, elsewhere: bool) -> FixedSizes | None:
        """None for providers that run graphs of any size. elsewhere: on another device.

        Raises InputError for unknown providers, MissingExtraError for one that is not installed, UnsupportedError if
        the model was compiled for another.
        """
        return None

    @abstractmethod
    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Raises UnsupportedError for a configuration that the engine cannot have."""

    def expert_forecast(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> ExpertForecast | None:
        """None where all experts of the model stay in memory."""
        return None

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes that a first run takes before `load` allocates what `footprint` counts, mostly in a process of its own:
        to compile, or to try a model. 0 once the cache folder has what it makes."""
        return 0

    def most_first(self) -> int:
        """Bytes of drivers and of `first_run`, for GPUs that no driver has shown yet."""
        return 0

    def bounded(self) -> bool:
        """Whether plans count all that `load` takes in a first run, too: drivers of GPUs compile in the process, and
        not all were measured. Raises UnsupportedError if there is no GPU."""
        return True

    def gpu_memory(self) -> GPUMemory | None:
        """Of the GPU that `load` takes by default; None for engines on the CPU. Raises UnsupportedError if there is no
        GPU."""
        return None

    def used_memory(self, adapter: str) -> int | None:
        """Bytes that the system says this process holds on that GPU; None if it does not tell."""
        return None

    def tuned(self, spec: ModelSpec, kv_dtype: str) -> Tuned | None:
        """Settings that `edge tune` found for this model and device, or for the most alike; None if none apply."""
        return None

    @abstractmethod
    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> Engine:
        """Load weights and allocate everything, on the GPU of `config.adapter` where there is one."""

    def operators(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
        progress: Callable[[float], None] | None = None,
    ) -> list[Operator]:  # fmt: skip
        """Time what a pass of `tokens` tokens is made of, with `context` rows in the cache before it, `passes` times.

        Loads an engine of its own, which is instrumented and so somewhat slower, and closes it; the ordinary one is as
        it was. In the order in which they first run. Raises InputError for figures that do not fit `config.capacity`,
        UnsupportedError where an engine cannot tell, and what `load` raises.
        """
        raise UnsupportedError(f"the {self.NAME} engine does not tell where its time goes: choose another --backend")

    def versions(self) -> dict[str, str]:
        """Of `PACKAGES`, as far as they are installed."""
        return {name: version for name in self.PACKAGES if (version := version_of(name)) is not None}


NOT_FINITE = "the model produced NaN logits: its weights are damaged or overflow"
