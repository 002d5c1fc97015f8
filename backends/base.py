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
from edge.model.adapters.lora import Lora
from edge.model.cores import Core
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
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
    `observes`, `per_head`, `uneven`, `reads` and `pinned` from the KV policy. It passes `provider`, `gpu_layers`,
    `adapter` and `tuning` on unchanged. Engines that lack a feature ignore its field.
    """

    capacity: int  # KV rows per layer and KV head
    chunk: int  # most tokens that run at once in prefill
    kv_dtype: str
    threads: int
    logits_rows: int = 1  # most rows of logits that exist at once; forward_all works through longer inputs in steps
    sequences: int = 1  # cpu, gpu: sequences that run at once, each with `capacity` rows (`BatchedEngine`)
    observes: bool = False  # attention scores can be summed: cpu and onnx need memory for them, llamacpp is slower
    per_head: bool = False  # cpu, onnx: room for the bookkeeping of rows that differ from head to head
    uneven: bool = False  # heads may keep different numbers of rows (`Capabilities.uneven`)
    pinned: int = 16  # cpu, onnx: first rows whose original keys are kept, since closing gaps rotates them repeatedly

    repack: bool = False  # weights repacked in private memory (faster), not mapped (reclaimable): `Backend.can_repack`
    provider: str = "cpu"  # onnx: the execution provider of ONNX Runtime
    emulated: bool = False  # onnx: the CPU computes the NPU's graphs
    gpu_layers: int = 0  # llamacpp: layers whose weights are on a GPU
    adapter: str = ""  # gpu: the planned GPU and driver (`GPUMemory.adapter`); empty: the engine chooses
    frugal: bool = False  # cpu: compile in less memory, and before weights are packed, which takes longer
    resident: int = 0  # bytes of weights in memory at a time, the rest is streamed (`Footprint.least_weights`); 0: all
    tuning: dict[str, int] = field(default_factory=dict)  # values of `edge tune` that differ from the defaults
    crossed: int = 0  # most rows that cross attention reads, in each of its layers (`CrossEngine`)
    lora_rank: int = 0  # the largest rank of LoRA adapters that fits in the reserved memory; 0: no adapters
    lora_bytes: int = 0  # size of the adapters' files
    reads: int = 0  # cpu: most rows that a KV head reads for a single token, in pages that it selects; 0: all
    drafts: int = 0  # cpu, gpu: most drafted tokens that are verified at once (`VerifyingEngine`)
    mtp: bool = False  # for plans, not engines: a layer for multi-token prediction drafts (`StatesEngine`)
    # cpu: layers whose inputs are kept, for drafts (`StatesEngine.layer_states`)
    taps: list[int] = field(default_factory=list)
    loras: int = 1  # cpu: adapters held at once, for sequences with different ones

    @property
    def together(self) -> int:
        """Most tokens of one pass that are computed as if each ran alone."""
        return max(self.sequences, 1 + self.drafts)


# Parts of a pass, in its order; engines name their operators as they like, but put each into one of these.
PHASES = ("embed", "norm", "qkv", "attend", "output", "gate-up", "down", "head", "other")


@dataclass(frozen=True)
class Operator:
    """One piece of work of a pass, as an instrumented engine timed it: the median over passes, all calls together.

    Medians of operators may add up to less than the median pass, because disturbances hit different operators in
    different passes. Bytes and flops are computed from shapes; None where shapes do not determine them.
    """

    name: str  # the engine's own, the same in every layer
    phase: str  # one of `PHASES`
    layer: int | None  # None outside of layers
    calls: int  # in one pass
    seconds: float  # wall time, not summed over threads
    bytes: int | None  # of weights, KV rows and parts of results, each counted once a call
    flops: int | None  # of products and attention, 2 · m · n · k
    waited: float | None = None  # the share of all threads' time spent waiting for each other; None: unknown


@dataclass(frozen=True)
class Capabilities:
    """The abilities of an engine, by which options are checked and plans are made."""

    granularity: Granularity  # the finest unit that may keep rows of its own
    uneven: Granularity  # the finest that may keep a *number* of its own; "token": all heads keep equally many
    kv_dtypes: tuple[str, ...]  # the first is the default
    attention: bool  # policies may read attention scores
    keys: bool  # policies may read keys
    tunable: bool = False  # `edge tune` finds settings for it
    providers: bool = False  # it takes --provider
    folders: bool = False  # it runs folders in ONNX
    gpu_layers: bool = False  # it takes --gpu-layers
    lora: bool = False  # it runs adapters (`AdaptedEngine`)
    any_tokenizer: bool = False  # it runs models whose tokenizer edge does not know
    tops: bool = False  # it can return the largest logits alone (`TopEngine`)
    picks: bool = False  # it chooses tokens itself (`PickingEngine`)
    appends: bool = False  # it takes given keys and values (`GivenEngine.append_rows`)
    rounds: bool = False  # it multiplies matrices of floats as Q8_0 if the model says so (`ModelSpec.rounded`)
    encodes: bool = False  # it runs encoders of pictures and sounds (`HiddenEngine.hidden`)
    hidden: bool = False  # it hands out hidden states (`HiddenEngine`)
    rests: bool = False  # between passes it needs no scratch and no mapped weights (`CrossEngine.rest`)
    gpu: bool = False  # it runs on a GPU (`CardEngine`)
    sequences: bool = False  # it runs several sequences at once (`BatchedEngine`)
    pages: bool = False  # it can attend to a subset of the rows (`EngineConfig.reads`)
    verifies: bool = False  # it runs several tokens with the results of single-token passes (`VerifyingEngine`)


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
    """An engine that can accumulate attention scores in its cache."""

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """Accumulate the attention that the last `queries` tokens of every pass pay to each row; 0: none.

        votes: count instead the tokens that pay a row more than their average over the rows that they see.
        """
        ...


class GivenEngine(Engine, Protocol):
    """An engine that runs rows in place of tokens."""

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        """As `Engine.forward`; ids beyond the vocabulary are those of `given` rows. places: None for consecutive
        positions, and tokens that see those before them."""
        ...

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        """As `Engine.forward_all`, likewise."""
        ...

    def append_rows(self, rows: FloatArray) -> None:
        """Append rows of given keys and values, float32 [2, layers, KV heads, n, head], as though n tokens had run, in
        a cache whose layers all keep rows of all tokens. Keys are rotated to the next positions, their values in the
        order of the model's file. Only of engines with `Capabilities.appends`. Raises CapacityError if fewer than n
        rows are free."""
        ...


class CrossEngine(Engine, Protocol):
    """An engine that runs cross attention (`Attention.across`)."""

    def set_crossed(self, states: FloatArray) -> None:
        """Replace the rows that tokens see across by those of an encoder's states, float32 [n, hidden], n at most
        `EngineConfig.crossed`."""
        ...

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """These rows of a layer with cross attention: keys and values, float32 [heads, n, size]."""
        ...

    def rest(self) -> None:
        """Forget these rows, and return scratch memory and the pages of mapped weights to the system until the next
        pass, if the engine can. Tokens' rows stay."""
        ...


class BatchedEngine(Engine, Protocol):
    """An engine of `EngineConfig.sequences` separate sequences. Its own `kv` and passes are those of sequence 0."""

    def sequence(self, number: int) -> Engine:
        """Sequence `number`, from 0, as an engine with its own `kv` and passes. It is an `ObservedEngine`, and an
        `AdaptedEngine` with its own adapters, if this engine is one. Closed with this engine."""
        ...

    def forward_batch(self, tokens: IntArray, sequences: Sequence[int]) -> FloatArray:
        """Run the next token of each of several sequences, int [n]; append a row to each. Returns their logits, float32
        [n, vocab], bit for bit those of `forward` for each sequence alone; on some GPUs but for rounding (docs/gpu.md).

        Raises the errors of `forward`, and InputError for unknown or repeated sequences, or sequences with different
        adapters.
        """
        ...


class AdaptedEngine(Engine, Protocol):
    """An engine that runs LoRA adapters."""

    def set_lora(self, lora: Lora | None) -> None:
        """Apply these adapters, or none, from the next pass on. Empties the cache, whose `key` identifies them.

        Raises InputError, and changes nothing, if their rank exceeds `EngineConfig.lora_rank`. Raises ModelFormatError
        for values that are not finite, UnsupportedError for adapters that the engine cannot run: none remain then.
        """
        ...


class HiddenEngine(Engine, Protocol):
    """An engine that returns hidden states, from which embeddings are made."""

    def hidden(self, tokens: IntArray, places: Places | None = None, given: GivenRows | None = None) -> FloatArray:
        """As `forward`, but returns the normalised state of every token after the last layer, the head's input, float32
        [n, hidden]; of encoders without a last norm, the last layer's output. places: of an encoder's texts that run in
        one pass (`Places.of_texts`), at most a chunk; None: a single text. given: rows of ids beyond the
        vocabulary."""
        ...


class CardEngine(Engine, Protocol):
    """An engine that may run on a graphics card. card: one with its own energy counter; None: there is none."""

    card: Card | None


class TopEngine(Engine, Protocol):
    """An engine that computes the largest logits with less work than all.

    most_candidates: the most logits for which this holds; 0: it never does.
    """

    most_candidates: int

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """As `forward`, but returns only the `count` largest logits (all, if there are fewer): ids int32 [n] and logits
        float32 [n], the largest first, ties by id, NaN before all numbers. −0 may be returned as 0. Invalidates arrays
        that the engine returned before."""
        ...


class PickingEngine(TopEngine, Protocol):
    """An engine that can choose tokens on its device, so that the host neither waits for each nor reads all logits.

    `forward_top` and `run_greedy` append rows as `forward` does, and invalidate arrays that the engine returned before.
    most_banned: the most tokens that `run_greedy` can exclude.
    """

    most_banned: int

    def run_greedy(self, token: int, count: int, banned: IntArray) -> IntArray:
        """Run `token`, then the likeliest token after it, and so on. Equivalent to `count` calls of `forward` with one
        token each, the argmax of the previous logits (the lowest id among ties), with −∞ for the tokens in `banned`.

        Returns the likeliest token after each token that ran, int32 [n], 1 ≤ n ≤ count; n < count if `count` tokens
        cannot run at once, or could not be truncated again. Appends n rows; the last returned token has no row yet.
        `kv.truncate` can leave any number of the new rows but 0; observed attention stays.

        Raises the errors of `forward`; CapacityError if fewer than `count` rows are free; EngineError (`NOT_FINITE`)
        for NaN in the first logits. If later logits have NaN, it returns the tokens before them.
        """
        ...


class ChoosingEngine(Engine, Protocol):
    """An engine that attends to a subset of its rows in single-token passes (`EngineConfig.reads`). `forward_all` then
    runs its tokens one by one."""

    def choose_rows(self, *, on: bool) -> None:
        """Attend to a subset of the rows (the initial state), or, if not `on`, to all rows."""
        ...


class VerifyingEngine(Engine, Protocol):
    """An engine that runs several tokens at once with the results of single-token passes."""

    def verify(self, tokens: IntArray) -> FloatArray:
        """Run the first n of the tokens, int [at most 1 + `EngineConfig.drafts`], where n is the most that can be
        truncated again; append n rows. Returns the logits after each, float32 [n, vocab]. Logits and rows are bit for
        bit those of n calls of `forward` with one token each.

        Raises the errors of `forward`.
        """
        ...

    def verify_top(self, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """As `verify`, but returns only the `count` largest logits after each, as `TopEngine.forward_top` does."""
        ...


class LoadProgress(Protocol):
    def __call__(self, part: float, doing: str = "", /) -> None:
        """Called with the loaded fraction, and the current task if it is more than reading a file."""


class Backend(ABC):
    """An engine before a model is loaded: its abilities, its footprint, and loading.

    An engine's folder defines one subclass, and `ENGINE`, an instance of it. Methods import the engine's libraries,
    because a run reads the capabilities of all engines and uses few.
    """

    NAME: str
    CAPABILITIES: Capabilities
    EFFICIENCY: Efficiency
    PACKAGES: tuple[str, ...]  # the distributions that it runs on, for reports
    DRIVER_BYTES = 0  # memory of GPU drivers, which `check_supported` and `gpu_memory` load to list GPUs
    MOST_SNAPSHOTS = 4  # saved ends of a conversation, for caches with tails: two for each turn
    DRAFTS_ELSEWHERE = False  # whether plans for other devices may have a drafter
    DRAFTS_ASKED = False  # whether it verifies drafts only if asked to: their gain was not measured

    def around_bytes(self, spec: ModelSpec) -> int | None:
        """Bytes of an assistant or an EAGLE-3 head without its layers; None: NumPy computes there."""
        return None

    def check_installed(self) -> None:  # noqa: B027 - nothing to do where the base install is enough
        """Raise MissingExtraError if the engine's package is not there."""

    @abstractmethod
    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """Raise UnsupportedError if the engine cannot run this model."""

    def check_elsewhere(self, file: GGUFFile, spec: ModelSpec, system: str) -> None:
        """Raise UnsupportedError if the engine cannot run this model on another device. system: such as "android"."""
        self.check_supported(file, spec)

    def supports(self, core: Core) -> str | None:
        """None if the engine runs the core; else its name in a refusal, such as "gated delta nets"."""
        return None

    def weight_kind(self, weight_type: str, config: EngineConfig) -> Kind:
        """How the engine multiplies weights of a block type."""
        return "floats" if weight_type in FLOATS else "integers"

    def most_rows(self, spec: ModelSpec, expected: int | None) -> MostRows:
        """The most rows, by default the context that the model was trained for. expected: the tokens of the run, if
        known."""
        return MostRows(spec.context, f"the model knows {spec.context} positions")

    def keeps_all(self, spec: ModelSpec) -> str | None:
        """Why the engine can evict no rows of this model, so that policy `full` is the only one; None if it can."""
        return "an encoder sees whole texts" if spec.encoder else None

    def most_drafts(self, spec: ModelSpec, tuning: Mapping[str, int]) -> int:
        """The most drafted tokens worth verifying at once (`VerifyingEngine`); 0 if the engine cannot verify, or cannot
        undo rejected tokens exactly. tuning: `EngineConfig.tuning`."""
        return 0

    def sees(self, spec: ModelSpec, *, whole: bool, provider: str | None = None) -> str | None:
        """None if the engine runs prompts for this model with rows of pictures or sounds in them; else why not, as the
        rest of a sentence. whole: these rows see all of each other. provider: of ONNX Runtime."""
        return None

    def encodes_elsewhere(self) -> str | None:
        """Why the CPU encodes pictures and sounds by default, though this engine can; None if it does."""
        return None

    def runs_mtp(self, spec: ModelSpec) -> bool:
        """Whether the model has a layer for multi-token prediction that the engine runs (`StatesEngine`)."""
        return False

    def one_sequence(self, spec: ModelSpec, *, observes: bool = False, lora: bool = False) -> str | None:
        """None if the engine runs several sequences of this model at once (`BatchedEngine`); else of what it runs one,
        as the rest of a sentence, "" for any model. observes: a policy observes attention. lora: there are adapters."""
        return None if self.CAPABILITIES.sequences else ""

    def can_repack(self, spec: ModelSpec) -> bool:
        """Whether `EngineConfig.repack` speeds this model up."""
        return False

    def fixed_sizes(self, spec: ModelSpec, provider: str | None, *, elsewhere: bool) -> FixedSizes | None:
        """The constraints of static graphs; None for providers that run graphs of any size. elsewhere: on another
        device.

        Raises InputError for unknown providers, MissingExtraError for one that is not installed, UnsupportedError if
        the model was compiled for another.
        """
        return None

    @abstractmethod
    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Bytes that the engine will take. Raises UnsupportedError for a configuration that it cannot run."""

    def expert_forecast(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> ExpertForecast | None:
        """The expected use of experts; None if all experts stay in memory."""
        return None

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes that a first run needs besides `footprint`, mostly in a child process, to compile or to try a model. 0
        once the cache folder holds the result."""
        return 0

    def most_first(self) -> int:
        """Bytes of drivers and of a first run on a GPU, before any driver has listed its GPUs."""
        return 0

    def bounded(self) -> bool:
        """Whether plans bound the memory of a first run, too: GPU drivers compile in this process, and not all of them
        were measured. Raises UnsupportedError if there is no GPU."""
        return True

    def gpu_memory(self) -> GPUMemory | None:
        """The memory of the GPU that `load` uses by default; None for engines on the CPU. Raises UnsupportedError if
        there is no GPU."""
        return None

    def used_memory(self, adapter: str) -> int | None:
        """Bytes that this process holds on that GPU, as the system reports them; None if it reports none."""
        return None

    def tuned(self, spec: ModelSpec, kv_dtype: str) -> Tuned | None:
        """Settings that `edge tune` found for this model and device, or for the most similar; None if none apply."""
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
        """Time the operators of a pass of `tokens` tokens after `context` cached rows, repeated `passes` times.

        Loads a separate, instrumented engine, which is somewhat slower, and closes it. Returns operators in the order
        of their first run. Raises InputError for figures that do not fit `config.capacity`, UnsupportedError if the
        engine cannot time operators, and the errors of `load`.
        """
        raise UnsupportedError(f"the {self.NAME} engine does not tell where its time goes: choose another --backend")

    def versions(self) -> dict[str, str]:
        """Versions of the installed `PACKAGES`, by name."""
        return {name: version for name in self.PACKAGES if (version := version_of(name)) is not None}
