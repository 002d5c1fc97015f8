"""What every engine is: the protocols that sessions, policies and tests rely on.

An engine knows nothing of prompts, budgets or policies. It runs tokens and keeps the KV rows it is told to keep.
Two counters are never one: the *row* a token has in the cache, and the *position* it has for RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from edge.backends.efficiency import Efficiency, Kind
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.layers import Core
from edge.model.lora import Lora
from edge.model.spec import ModelSpec
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray, Granularity, IntArray

if TYPE_CHECKING:
    from edge.devices.power.nvml import Card


@dataclass(frozen=True)
class EngineConfig:
    """The plan's decisions for an engine. All memory is allocated at load; nothing grows afterwards.

    One flat record for all engines, because plans, reports and saved profiles show it so, and profiles are read back
    without their engine. The plan weighs `repack` and `resident` against KV rows within the budget, and derives
    `observes`, `per_head`, `uneven` and `pinned` from the KV policy. It only passes `provider`, `gpu_layers`, `adapter`
    and `tuning` on. Engines that lack a feature ignore its field.
    """

    capacity: int  # KV rows per layer and KV head
    chunk: int  # most tokens that run at once in prefill
    kv_dtype: str
    threads: int
    logits_rows: int = 1  # most rows of logits that exist at once; forward_all works through longer inputs in steps
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
    on_disk: int = 0  # beside the weights: tables of which a pass reads a row for each token, from the file
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


# What a pass is made of, in its order; engines name their operators as they like, but put each into one of these.
PHASES = ("embed", "norm", "qkv", "attend", "output", "gate-up", "down", "head", "other")


@dataclass(frozen=True)
class Operator:
    """One piece of work of a pass, as an instrumented engine timed it: the median over passes, all calls together.

    Medians of parts add up to less than the median pass where something disturbs now this part, now that.
    name: as the engine calls it, the same in every layer. phase: one of `PHASES`. layer: None outside of layers.
    calls: in one pass. seconds: wall time, not summed over threads. bytes: weights and KV rows, each counted once a
    call. flops: of products and attention, 2 · m · n · k. Both counted from shapes; None where that says nothing.
    waited: share of all threads' time that went by in waiting for each other; None where the engine does not tell.
    """

    name: str
    phase: str
    layer: int | None
    calls: int
    seconds: float
    bytes: int | None
    flops: int | None
    waited: float | None = None


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do with its KV rows.

    granularity: the finest unit that may keep rows of its own. uneven: the finest unit that may keep a *number* of rows
    of its own; "token" means that all heads of all layers keep equally many. attention, keys: what policies may see.
    tunable: `edge tune` finds settings for it. providers: it takes --provider. folders: it runs folders in ONNX.
    gpu_layers: it takes --gpu-layers.
    lora: it runs adapters (`AdaptedEngine`). any_tokenizer: also models whose tokenizer edge does not know.
    picks: it chooses tokens itself (`PickingEngine`). gpu: it runs on a GPU (`GPUBackend`, `CardEngine`).
    """

    granularity: Granularity
    uneven: Granularity
    kv_dtypes: tuple[str, ...]  # the first is the default
    attention: bool
    keys: bool
    tunable: bool = False
    providers: bool = False
    folders: bool = False
    gpu_layers: bool = False
    lora: bool = False
    any_tokenizer: bool = False
    picks: bool = False
    gpu: bool = False


@dataclass(frozen=True)
class KVState:
    """Saved rows, one behind the other. They fit a cache of any capacity whose `KVCache.key` is the same.

    tail: what the next token needs besides these rows, and what holds only directly behind the last of them: the newest
    rows of layers with sliding windows, or a recurrent state. None if the engine has no such thing
    (`KVCache.has_tail`), or if the rows end before those of the cache did: then a state with a tail must follow before
    tokens can run. A state without rows, `save(kv.length)`, is the place to which `truncate` returns by its tail.
    """

    key: str
    positions: IntArray  # [rows], in row order
    next_position: int
    data: bytes | memoryview  # as the engine likes it; its length follows from the number of rows
    tail: bytes | memoryview | None = None


class KVCache(Protocol):
    """The rows that an engine remembers: `length` of `capacity` are in use; `nbytes` is what is allocated.

    Layers with sliding windows may keep the rows of the newest tokens, whatever the policy: the rows here, and all that
    is said of them, are then those of the other layers.

    capacity: rows per head; on average, where heads keep different numbers of rows. has_tail: see `KVState.tail`.
    key: names all that rows depend on: engine, weights, dtype, and what else changes their numbers or their layout.
    """

    capacity: int
    has_tail: bool

    @property
    def nbytes(self) -> int: ...

    @property
    def fixed(self) -> int:
        """Of `nbytes`, what does not depend on the capacity: the rows of sliding windows, a recurrent state."""
        ...

    @property
    def key(self) -> str: ...

    @property
    def length(self) -> int:
        """Rows in use; of the head that keeps most, where heads differ."""
        ...

    @property
    def free(self) -> int:
        """Rows that every head still has room for."""
        ...

    @property
    def positions(self) -> IntArray:
        """Position of every row in use, int32 [length], in row order."""
        ...

    @property
    def earliest(self) -> int:
        """The fewest rows, but for 0, that `truncate` can leave without a saved end; 0 if it can leave any number.
        More than `length` while the tail of appended rows is missing."""
        ...

    @property
    def foresight(self) -> int:
        """How many of the tokens to come `expect` has to count, if there are so many, to decide for all of them; 0 once
        it has, or where nothing depends on it."""
        ...

    def expect(self, count: int) -> None:
        """So many tokens are about to be run, in one pass or in several: where a model rotates long texts otherwise
        than short ones, this decides (see rope.py), and rows in use are rotated anew if need be."""
        ...

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        """Evict all rows but `rows` (strictly increasing, int [n]), in place.

        close_gaps: the kept rows get the positions 0…n-1, as though the evicted ones had never been
        (StreamingLLM); otherwise they keep their distances, and new tokens their own positions.
        Raises InputError if a row is out of range or repeated, UnsupportedError where an engine cannot leave a gap
        behind its newest row.
        """
        ...

    def truncate(self, length: int, end: KVState | None = None) -> None:
        """Forget all rows from `length` on: the next one comes right behind those left. 0 empties the cache; where
        nothing is forgotten, nothing changes, a gap behind the newest row neither.

        end: what was saved, `save(length)`, when the cache had these `length` rows.
        Raises RewindError, and changes nothing, for fewer rows than `earliest` without `end`.
        """
        ...

    def shrink(self, capacity: int) -> None:
        """Have room for so many rows from here on, and give the memory of the others back to the system, as far as
        the engine can: `nbytes` says what is left. Rows in use stay as they are; more than `capacity` changes nothing.

        Raises InputError if more rows are in use.
        """
        ...

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        """A copy of the rows first … last − 1 (None: of all from `first` on); nothing changes.

        Raises InputError if there are no such rows, UnsupportedError where heads keep different rows.
        """
        ...

    def append(self, state: KVState) -> None:
        """Put saved rows behind those in use, as though their tokens had just been run. (All of a saved cache comes
        back by `truncate(0)` and `append`.) They have no attention yet.

        Raises InputError, and changes nothing, if they belong to another `key` or do not come after the rows in use;
        CapacityError if there are more than free ones.
        """
        ...


class HeadKVCache(KVCache, Protocol):
    """A cache that policies may look into. Arrays are [layers, KV heads, …], with 0 behind a head's last row.

    An engine of token granularity shows one layer with one head: the mean over all.
    """

    @property
    def head_lengths(self) -> IntArray:
        """Rows in use, int32 [layers, KV heads]."""
        ...

    @property
    def ages(self) -> IntArray:
        """Tokens since each row came, int32 [layers, KV heads, length]: 1 for the newest."""
        ...

    @property
    def attention(self) -> FloatArray:
        """What observed queries paid to each row since `clear_attention`, float32 [layers, KV heads, length]."""
        ...

    def keys(self, layer: int) -> FloatArray:
        """A layer's, as they are stored, float32 [KV heads, length, head]."""
        ...

    @property
    def longest(self) -> int:
        """Rows that one head may hold: more than `capacity` where heads keep different numbers."""
        ...

    def clear_attention(self) -> None: ...

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """As `keep`, with rows for every KV head of every layer (layer by layer); their positions stay.

        Where the engine's `uneven` allows, heads keep different numbers of rows, at most `capacity` on average, and
        what is left of the cache is shared out so that all have equally many free rows.
        """
        ...

    @property
    def next_position(self) -> int: ...

    def renumber(self) -> None:
        """Close all gaps: each head's rows get consecutive positions, the newest of all heads the same.

        Rows become younger; their attention shrinks likewise, so that it stays what it was per query.
        """
        ...


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


class AdaptedEngine(Engine, Protocol):
    """An engine that runs LoRA adapters."""

    def set_lora(self, lora: Lora | None) -> None:
        """Run these adapters from here on, or none; empties the cache, whose `key` names them.

        Raises InputError if their rank is more than `EngineConfig.lora_rank`, ModelFormatError for values that are not
        finite; then the adapters stay those before.
        """
        ...


class CardEngine(Engine, Protocol):
    """An engine that may run on a graphics card. card: one whose own counter tells its joules; None: there is none."""

    card: Card | None


class PickingEngine(Engine, Protocol):
    """An engine that can choose tokens where its logits are, so that the host neither waits after each nor reads all.

    Both methods append rows as `forward` does, and leave no logits: arrays that it returned before are invalid.
    most_candidates: logits that `forward_top` can return. most_banned: tokens that `run_greedy` can exclude.
    """

    most_candidates: int
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

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """As `forward`, but returns only the `count` largest logits (all, if there are fewer): ids int32 [n] and logits
        float32 [n], the largest first, equal ones by their ids, NaN before all others. −0 may come as 0."""
        ...


class LoadProgress(Protocol):
    def __call__(self, part: float, doing: str = "", /) -> None:
        """The fraction that is loaded, and what takes the time, if that is more than reading a file."""


class Backend(Protocol):
    """The module of one engine. Register it in `backends/__init__.py`."""

    NAME: str
    CAPABILITIES: Capabilities
    EFFICIENCY: Efficiency

    def check_installed(self) -> None:
        """Raise MissingExtraError if the engine's package is not there."""

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """Raise UnsupportedError if the engine cannot run this model."""

    def check_elsewhere(self, file: GGUFFile, spec: ModelSpec, system: str) -> None:
        """Raise UnsupportedError if the engine cannot run this model on another device, of such a system."""

    def supports(self, core: Core) -> str | None:
        """What the engine does not run, such as "gated delta nets"; None if it runs the core."""
        ...

    def weight_kind(self, weight_type: str, config: EngineConfig) -> Kind:
        """How the engine multiplies weights of a block type."""
        ...

    def most_rows(self, spec: ModelSpec, expected: int | None) -> MostRows:
        """expected: the tokens of the run, if they are known."""
        ...

    def keeps_all(self, spec: ModelSpec) -> str | None:
        """Why the engine can evict no rows of this model, so that policy `full` is the only one; None if it can."""
        ...

    def can_repack(self, spec: ModelSpec) -> bool:
        """Whether `EngineConfig.repack` speeds this model up."""
        ...

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Raises UnsupportedError for a configuration that the engine cannot have."""
        ...

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes that a first run takes before `load` allocates what `footprint` counts, mostly in a process of its own:
        to compile, or to try a model. 0 once the cache folder has what it makes."""
        ...

    def tuned(self, spec: ModelSpec, kv_dtype: str) -> Tuned | None:
        """What `edge tune` found for this model and device, or for the most alike; None if nothing applies."""
        ...

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> Engine:
        """Load weights and allocate everything."""
        ...

    def operators(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        config: EngineConfig,
        *,
        tokens: int,
        context: int,
        passes: int,
        progress: Callable[[float], None] | None = None,
    ) -> list[Operator]:
        """Time what a pass of `tokens` tokens is made of, with `context` rows in the cache before it, `passes` times.

        Loads an engine of its own, which is instrumented and so somewhat slower, and closes it; the ordinary one is as
        it was. In the order in which they first run. Raises InputError for figures that do not fit `config.capacity`,
        UnsupportedError where an engine cannot tell, and what `load` raises.
        """
        ...

    def versions(self) -> dict[str, str]: ...


class GPUBackend(Backend, Protocol):
    """The module of an engine with `Capabilities.gpu`. Its `load` takes the GPU of `EngineConfig.adapter`.

    DRIVER_BYTES: what drivers take of the process, even to show their GPUs: `check_supported` and `gpu_memory` load
    them.
    """

    DRIVER_BYTES: int

    def most_first(self) -> int:
        """Bytes of drivers and of `first_run`, for GPUs that no driver has shown yet."""
        ...

    def gpu_memory(self) -> GPUMemory:
        """Raises UnsupportedError if there is no GPU."""
        ...

    def used_memory(self, adapter: str) -> int | None:
        """Bytes that the system says this process holds on that GPU; None if it does not tell."""
        ...


class ProviderBackend(Backend, Protocol):
    """The module of an engine with `Capabilities.providers`."""

    def fixed_sizes(
        self, spec: ModelSpec, provider: str | None, kv_dtype: str | None, *, elsewhere: bool
    ) -> FixedSizes | None:
        """None for providers that run graphs of any size. kv_dtype: None: the usual one. elsewhere: on another device.

        Raises InputError for unknown providers, MissingExtraError for one that is not installed, UnsupportedError if
        the model was compiled for another.
        """
        ...


NOT_FINITE = "the model produced NaN logits: its weights are damaged or overflow"


class RewindError(EngineError):
    """The tail of a cache cannot go back that far: run the tokens again."""


class CapacityError(EngineError):
    """More tokens than free rows: make room with `kv.keep` first."""


def all_positions(spec: ModelSpec) -> MostRows:
    """Of engines that run the model as it is: what it was trained for."""
    return MostRows(spec.context, f"the model knows {spec.context} positions")


def end_of(kv: KVCache) -> KVState | None:
    """What `truncate` needs to come back to here from far behind, if anything."""
    return kv.save(kv.length) if kv.has_tail else None


def state_key(backend: str, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> str:
    """What saved rows depend on: the model, by all of its file, and settings.

    Capacity is not among them. The file is read if nobody has read it yet.
    """
    shape = (spec.name, spec.layers, spec.hidden, spec.kv_heads, spec.head_dim, spec.vocab, spec.weight_bytes)
    return repr((backend, shape, config.kv_dtype, fingerprint(file.path).sha256))
