"""Evaluate a text in windows, each from an empty cache: two models side by side, or one alone.

Memory holds a block of logits rows per model, and a few numbers per token. A journal records whole windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge.backends.base import Engine
from edge.errors import InputError, several
from edge.lab.quality.journal import Journal, are_numbers
from edge.lab.quality.material import checksum_of
from edge.lab.quality.perplexity import Advance, Perplexity
from edge.likelihood import Compared, Divergence, Doubles, compare, negative_log_likelihoods, summarize
from edge.run.session import Session
from edge.types import FloatArray, IntArray

CONTEXT = 512  # tokens of a window, as in llama.cpp's perplexity tool

Score = TypeVar("Score")

_COMPARED = tuple(Compared.__dataclass_fields__)

OnProgress = Callable[[int, int], None]
"""Called with the number of tokens that have been read, and their total."""


@dataclass(frozen=True)
class Windows:
    """`tokens`, int32 [n], in windows of `context`; the last one may be shorter.

    Raises InputError for a text without scored predictions.
    """

    tokens: IntArray
    context: int = CONTEXT
    second_half: bool = False  # score only the second half of windows, as llama.cpp does; else all but the first token
    bos: int | None = None  # replaces every window's first token

    def __post_init__(self) -> None:
        if self.context < 2 or not any(self.scored(number) for number in range(len(self))):
            raise InputError(f"{self.tokens.size} tokens in windows of {self.context} leave nothing to predict")

    def __len__(self) -> int:
        return -(-self.tokens.size // self.context)

    def read(self, number: int) -> IntArray:
        """The input tokens of a window, int32 [n]: all but the last."""
        window: IntArray = self._window(number)[:-1].copy()
        if window.size and self.bos is not None:
            window[0] = self.bos
        return window

    def targets(self, number: int) -> IntArray:
        """The token that follows each input token of a window."""
        return self._window(number)[1:]

    @property
    def first(self) -> int:
        """The number of unscored predictions at a window's start."""
        return self.context // 2 if self.second_half else 0

    def scored(self, number: int) -> int:
        """The number of scored predictions in a window."""
        return max(0, self._window(number).size - 1 - self.first)

    @property
    def settings(self) -> dict[str, Any]:
        """The text's identity and the settings of its windows, for JSON."""
        return {
            "tokens_crc32": checksum_of(self.tokens),
            "tokens_read": self.tokens.size,
            "context": self.context,
            "scored": "second half" if self.second_half else "all but the first",
        }

    @property
    def words(self) -> str:
        """The settings in words."""
        half = "the second half of " if self.second_half else ""
        return f"in {half}{several(len(self), 'window')} of {self.context} tokens"

    def _window(self, number: int) -> IntArray:
        return self.tokens[number * self.context : (number + 1) * self.context]


def divergence(
    reference: Session | Engine,
    other: Session | Engine,
    windows: Windows | IntArray,
    *,
    journal: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> Divergence:
    """Measure the divergence of `other`'s predictions from `reference`'s; see Divergence.

    windows: windows, or token ids, int32 [n], read in windows of CONTEXT. Load sessions with `logits_rows=LOGITS_ROWS`.
    journal: a file of every window's figures; with `resume`, its windows are not measured again, provided that it has
    the same `settings`. Raises InputError for models of different vocabularies, a window longer than a cache that may
    not evict, and a journal of another measurement.
    """
    windows = windows if isinstance(windows, Windows) else Windows(windows)
    if reference.spec.vocab != other.spec.vocab:
        raise InputError(
            f"predictions of {reference.spec.vocab} tokens cannot be compared with predictions of {other.spec.vocab}"
        )
    _check_room(reference, windows)
    _check_room(other, windows)

    def measure(number: int, advance: Advance) -> dict[str, list[float]]:
        def score(logits: Sequence[FloatArray], targets: IntArray) -> Compared:
            return compare(logits[0], logits[1], targets)

        parts = _scored((reference, other), windows, number, advance, score)
        return {name: np.concatenate([getattr(each, name) for each in parts]).tolist() for name in _COMPARED}

    found = _in_windows(windows, _COMPARED, measure, journal, settings, resume, on_progress)
    return summarize(Compared(**{name: np.array(each) for name, each in found.items()}))


@dataclass(frozen=True)
class Diverged:
    """The divergence of several documents, each read in one window."""

    tokens: list[int]  # predictions per document
    kl: list[float]  # mean per document, nats
    stderr: list[float]  # of kl

    @property
    def total(self) -> tuple[float, float, int]:
        """Mean over all predictions, its standard error, and their number."""
        shares = np.array(self.tokens) / sum(self.tokens)
        return float(shares @ self.kl), float(np.linalg.norm(shares * self.stderr)), sum(self.tokens)


def diverge_documents(
    reference: Session | Engine, other: Session | Engine, documents: Sequence[IntArray], advance: Advance
) -> Diverged:
    """`divergence` of every document, from an empty cache."""
    found = []
    for tokens in documents:
        before = 0

        def on_progress(done: int, _: int) -> None:
            nonlocal before
            advance(done - before)
            before = done

        found.append(divergence(reference, other, Windows(tokens, tokens.size), on_progress=on_progress))
    return Diverged([each.tokens for each in found], [each.kl_mean for each in found],
                    [each.kl_stderr for each in found])  # fmt: skip


def windowed_perplexity(
    source: Session | Engine,
    windows: Windows,
    *,
    journal: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> Perplexity:
    """Like `perplexity`, but in windows, each from an empty cache. Arguments and errors as for `divergence`."""
    _check_room(source, windows)

    def measure(number: int, advance: Advance) -> dict[str, list[float]]:
        def score(logits: Sequence[FloatArray], targets: IntArray) -> Doubles:
            return negative_log_likelihoods(logits[0], targets)

        return {"nll": np.concatenate(_scored((source,), windows, number, advance, score)).tolist()}

    found = _in_windows(windows, ("nll",), measure, journal, settings, resume, on_progress)
    return Perplexity.of(np.array(found["nll"]))


def _scored(
    sources: Sequence[Session | Engine],
    windows: Windows,
    number: int,
    advance: Advance,
    score: Callable[[Sequence[FloatArray], IntArray], Score],
) -> list[Score]:
    """Score a window block by block: `score` takes every model's logits, float32 [n, vocab], and the next tokens.

    Only one block's logits exist at a time, as plans assume.
    """
    read, targets = windows.read(number), windows.targets(number)
    step = min(_step(source) for source in sources)
    for source in sources:
        _start(source)
        _engine(source).kv.announce(read.size)
    found = []
    for start in range(0, read.size, step):
        part, skipped = read[start : start + step], max(0, windows.first - start)
        following = targets[start : start + part.size][skipped:]
        found.append(score([_run(source, part, step)[skipped:] for source in sources], following))
        advance(part.size)
    return found


def _in_windows(
    windows: Windows,
    names: tuple[str, ...],
    measure: Callable[[int, Advance], dict[str, list[float]]],
    journal: Path | None,
    settings: Mapping[str, Any] | None,
    resume: bool,
    on_progress: OnProgress | None,
) -> dict[str, list[float]]:
    """The concatenated figures of all windows, by name; windows in the journal are not measured again."""

    def parse(record: Any) -> tuple[int, dict[str, list[float]]]:
        figures = {name: record[name] for name in names}
        if any(not are_numbers(each) or len(each) != windows.scored(record["window"]) for each in figures.values()):
            raise ValueError
        return record["window"], figures

    kept = Journal(journal, settings or {}, parse, resume=resume)
    found: dict[str, list[float]] = {name: [] for name in names}
    done, total = 0, sum(windows.read(number).size for number in range(len(windows)))

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    for number in filter(windows.scored, range(len(windows))):
        figures = kept.find(number)
        if figures is None:
            figures = measure(number, advance)
            kept.add(number, figures, {"window": number, **figures})
        else:
            advance(windows.read(number).size)
        for name in names:
            found[name] += figures[name]
    return found


def _engine(source: Session | Engine) -> Engine:
    return source.engine if isinstance(source, Session) else source


def _step(source: Session | Engine) -> int:
    config = _engine(source).config
    return min(config.chunk, config.logits_rows)


def _start(source: Session | Engine) -> None:
    if isinstance(source, Session):
        source.reset()
    else:
        source.kv.truncate(0)


def _run(source: Session | Engine, tokens: IntArray, upcoming: int) -> FloatArray:
    """Logits after every token, float32 [n, vocab]."""
    if not isinstance(source, Session):
        return source.forward_all(tokens)
    source.make_room(tokens.size)
    return source.forward(tokens, upcoming=upcoming, every=True)


def _check_room(source: Session | Engine, windows: Windows) -> None:
    capacity, longest = _engine(source).kv.capacity, min(windows.context, windows.tokens.size) - 1
    if longest > capacity and not (isinstance(source, Session) and source.may_evict):
        raise InputError(
            f"a window has {longest} tokens to read, and the KV cache {capacity} rows: raise --max-kv-size, use "
            f"--kv-policy=streaming, or shorten windows with --context"
        )
