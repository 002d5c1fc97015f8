"""RunReport: what a run did and what it cost. The names are an interface: `schema` 1, see docs/report.md."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any, Literal

from edge.devices.power.base import Certainty, MeterKind, Scope, certainty
from edge.model.parts.prompt import Looks
from edge.records import dataclass

SCHEMA = 1

StopReason = Literal[
    "eos", "length", "stop", "tool_calls", "capacity", "interrupted", "terminated", "failed",
    "time", "memory", "energy", "power", "thermal",
]  # fmt: skip
BUDGETS: tuple[StopReason, ...] = ("time", "memory", "energy", "power", "thermal")
Given = Literal["shrink", "chunk", "prompt cache", "snapshots"]


@dataclass(frozen=True)
class Tokens:
    """Token counts. reused: prompt tokens whose rows came from the prompt cache, or from a prefix. ran: prompt tokens
    that were run: all others, unless something ended the run first. unread: the prompt has more tokens than `prompt`,
    because the rest of its text was not read. forced: generated tokens that the grammar left no choice of; they take
    no pass of their own. prefix: rows of `--prefix`, which the other numbers include.
    """

    prompt: int
    generated: int
    reused: int
    ran: int
    unread: bool = False
    forced: int = 0
    prefix: int = 0

    @property
    def cut(self) -> bool:
        """Whether the prompt was not run to its end."""
        return self.unread or self.reused + self.ran < self.prompt

    @property
    def prompt_words(self) -> str:
        """`636` or `more than 8192`."""
        return f"more than {self.prompt}" if self.unread else f"{self.prompt}"


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens per second, measured. None where nothing was measured (no second token, say).

    total_s: of this generation. budget_s: the stated budget. before_s: the part that loading and the like took of it.
    prepared_s: the part of `before_s` that only a first run takes.
    """

    load_s: float
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    paused_s: float = 0.0  # waited, to hold --power or --max-temp
    total_s: float = 0.0
    before_s: float = 0.0
    budget_s: float | None = None
    prepared_s: float = 0.0


@dataclass(frozen=True)
class ExpertUse:
    """Use of experts in a run that holds only some of them in memory, measured. slots: experts held at a time, of
    `experts` in all layers. hit_rate: share of the choices for generated tokens whose expert was in memory.
    read_per_token: bytes read per generated token. Both are None without such tokens. read: bytes, for all tokens."""

    slots: int
    experts: int
    hit_rate: float | None
    read_per_token: float | None
    read: int


@dataclass(frozen=True)
class Memory:
    """Bytes. peak_rss, anonymous and file are measured on this process, peak_rss including processes that compiled for
    it; the plan counts the others.

    weights: resident at a time. streamed: read from the file again by every pass, where not all weights are resident,
    if all experts are chosen equally often. experts: their use, measured. lora: adapters. draft: a draft model, or the
    model's own layer that drafts. gpu: the part of weights, kv, scratch and adapters in buffers of a GPU. on_card:
    whether that is memory of the GPU's own, outside the process. gpu_used: as the system reports it, measured; None
    where it does not. gpu_budget: stated.
    """

    peak_rss: int
    budget: int | None
    weights: int
    kv: int
    scratch: int
    interpreter: int
    anonymous: int | None
    file: int | None
    streamed: int = 0
    experts: ExpertUse | None = None
    lora: int = 0
    draft: int = 0
    gpu: int = 0
    on_card: bool = False
    gpu_used: int | None = None
    gpu_budget: int | None = None
    measured: tuple[str, ...] = ("peak_rss", "anonymous", "file", "gpu_used", "experts")


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens that were verified, several in a pass, measured: copied from earlier text, or from a draft model
    or the model's own layer for multi-token prediction. accepted: those that the model chose. gain: speedup over passes
    of one token each; None if none ran so. by: drafts had to pay by "seconds", or by "seconds and joules"."""

    tokens: int
    accepted: int
    gain: float | None
    by: str = "seconds"


@dataclass(frozen=True)
class Team:
    """The threads that took part in passes, measured. passes: those of 1, 2, … threads. The engine leaves out threads
    whose cores other programs want, as each barrier would wait for them."""

    passes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether all passes had all threads."""
        return not any(self.passes[:-1])

    @property
    def crowded(self) -> bool:
        """Whether more than a tenth of the passes had fewer threads."""
        return sum(self.passes[:-1]) > sum(self.passes) / 10

    @property
    def shares(self) -> dict[int, float]:
        """The shares of the passes that had these numbers of threads, most threads first."""
        counted = reversed(list(enumerate(self.passes, 1)))
        return {threads: count / sum(self.passes) for threads, count in counted if count}

    @property
    def why(self) -> str:
        """Why some passes had fewer threads; empty if none had."""
        return "" if self.whole else "other programs wanted the cores"

    def __str__(self) -> str:
        shares = ", ".join(f"{threads} in {share:.0%}" for threads, share in self.shares.items())
        return f"threads {shares} of {sum(self.passes):,} passes" + (f": {self.why} (measured)" if self.why else "")


def team_since(before: tuple[int, ...], now: tuple[int, ...]) -> Team | None:
    """The team of the passes between two counts; None without passes."""
    passes = tuple(count - old for count, old in zip(now, before, strict=True)) if now else ()
    return Team(passes) if any(passes) else None


@dataclass(frozen=True)
class AdapterUse:
    """A LoRA adapter that the model ran with. sha256: of its file; rank: the largest of its matrices."""

    name: str
    rank: int
    scale: float
    sha256: str


@dataclass(frozen=True)
class PrefixUse:
    """The soft prompt before the prompt. name: of its folder. rows: in the KV cache. sha256: of its file of tensors."""

    name: str
    rows: int
    sha256: str


@dataclass(frozen=True)
class KVUse:
    """The KV cache at the end of the run. rows: in use. evicted: rows so far."""

    policy: str
    capacity: int
    rows: int
    dtype: str
    evicted: int


@dataclass(frozen=True)
class Energy:
    """Joules of this generation: in all, of the prompt, of the answer, and of each of its tokens.

    kind: "counter" (the device counts joules), "integrated" (it reports watts) or "estimate" (nothing is measured).
    samples: distinct values that the sensor showed. budget: joules, of which loading and the like took `before`.
    prepared: joules that only a first run takes, to compile and the like, outside the budget. watts: on average.
    """

    joules: float
    budget: float | None
    prefill: float | None
    decode: float | None
    per_token: float | None
    source: str
    kind: MeterKind
    scope: Scope
    samples: int
    before: float = 0.0
    watts: float = 0.0
    watts_limit: float | None = None
    prepared: float = 0.0

    @property
    def certainty(self) -> Certainty:
        return certainty(self.kind)


@dataclass(frozen=True)
class Heat:
    """highest, limit: °C, measured at `sensor` during this generation."""

    sensor: str
    highest: float | None
    limit: float | None


@dataclass(frozen=True)
class Thoughts:
    """The model's thoughts before or within its answer, apart from it."""

    text: str | None  # None if the caller asked not to keep it
    tokens: int  # generated while it thought, marks included; part of Tokens.generated
    seconds: float
    joules: float  # of these seconds, by the meter of Energy
    cut: bool = False  # a thinking budget ended them …
    added: int = 0  # … by this number of tokens that were fed to the model


@dataclass(frozen=True)
class ToolCall:
    """A complete call in the answer. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and the likeliest tokens in its place with theirs, likeliest
    first. thought: whether it belongs to the model's thoughts, with the marks around them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    thought: bool = False


@dataclass(frozen=True)
class Beam:
    """An answer that a beam search found. score: the log-probability of its tokens, divided by their number to the
    power of the length penalty. tokens: with the one that ended it."""

    text: str
    score: float
    tokens: tuple[int, ...]


def label_of(title: str, heading: str) -> str:
    """Title and headings of a passage, as they stand before its text."""
    return " › ".join(dict.fromkeys(each for each in (title, heading) if each))


def place_of(file: str, place: int, unit: str) -> str:
    """The file of a passage, and the line or page (`unit`)."""
    return f"{file}:{place}" if unit == "line" else f"{file}, page {place}"


@dataclass(frozen=True)
class Cited:
    """A passage of the user's own documents in the prompt, by the number that it has there. place: a line or a page
    (`unit`) of the file. score: of the joined ranks, of which `words` and `vectors` are the ranks in each list; None:
    not found there. relevance: by a reranker."""

    number: int
    title: str
    heading: str
    file: str
    place: int
    unit: str
    text: str
    score: float
    words: int | None = None
    vectors: int | None = None
    relevance: float | None = None

    @property
    def label(self) -> str:
        return label_of(self.title, self.heading)

    @property
    def where(self) -> str:
        return place_of(self.file, self.place, self.unit)


@dataclass(frozen=True)
class Pruned:
    """What `--prune` left out of the texts before a question. before, after: their tokens. left: the sentences that
    left, in their order. by: what ranked them: a model, or BM25."""

    before: int
    after: int
    left: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class Branched:
    """The generations of which `vote` or `outline` made the answer. side_by_side: those that ran in common passes, at
    most. route: what the model said that the question needs: "points", "steps" or "text"; None: it was not asked.
    one_piece: why an outline was answered in one piece."""

    by: Literal["vote", "outline"]
    branches: tuple[BranchUse, ...]
    side_by_side: int
    route: str | None = None
    one_piece: str | None = None


@dataclass(frozen=True)
class BranchUse:
    """One of them. part: "answer", "route", "outline" or "point". votes: answers of the same words; 0 for others. ran:
    tokens of the prompt that were run, beside those that it shared."""

    part: str
    text: str
    generated: int
    ran: int
    joules: float
    stop_reason: StopReason
    votes: int = 0


@dataclass(frozen=True)
class Action:
    """A step that returned memory to the system. token: tokens generated by then. seconds: since the run began. action:
    the reduced part: KV rows, chunks of the prompt, the prompt cache or snapshots. left: rows, tokens per chunk, bytes
    or snapshots from then on.

    bytes: returned, counted. reason: "limit" (of a cgroup), "free memory", "pressure" or "trim" (Session.trim).
    """

    token: int
    seconds: float
    action: Given
    bytes: int
    left: int
    reason: str


@dataclass(frozen=True)
class RunReport:
    """The report of one answer (docs/report.md).

    `text` is None if the caller asked not to keep it, `heat` where the device shows no temperature, `thoughts` where
    the model did not think. `stop_text`: the stop string before which the answer ended. `incomplete`: the stop reason,
    if it cut the answer where its grammar allowed no end. `logprobs`: of the tokens that were drawn, if the caller
    asked for them. `beams`: of a beam search, the best first. `media`: pictures and sounds that were encoded for this
    answer.
    """

    text: str | None
    tokens: Tokens
    timings: Timings
    stop_reason: StopReason
    memory: Memory
    kv: KVUse
    plan: dict[str, Any]
    versions: dict[str, str]
    energy: Energy
    heat: Heat | None = None
    actions: tuple[Action, ...] = ()
    thoughts: Thoughts | None = None
    media: Looks | None = None
    seed: int | None = None
    lora: tuple[AdapterUse, ...] = ()
    prefix: PrefixUse | None = None
    drafted: Drafted | None = None  # where drafts may be verified
    team: Team | None = None  # of engines whose threads give way
    tool_calls: tuple[ToolCall, ...] = ()
    stop_text: str | None = None
    incomplete: StopReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    beams: tuple[Beam, ...] | None = None
    sources: tuple[Cited, ...] = ()  # passages of `documents` that stand in the prompt
    pruned: Pruned | None = None
    branched: Branched | None = None
    schema: int = field(default=SCHEMA)

    @property
    def unanswered(self) -> bool:
        """Whether a budget ended before the first token of the answer."""
        thoughts = 0 if self.thoughts is None else self.thoughts.tokens
        return self.tokens.generated == thoughts and self.stop_reason in BUDGETS

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)
