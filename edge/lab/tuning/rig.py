"""Timing of tuning candidates on the engine itself: a prompt and an answer, usually of 512 and 128 tokens.

Half of the answer is decoded at a short context, half at a long one, since a value can suit one and not the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from edge.backends.base import Engine
from edge.backends.head_kv import HeadKV
from edge.backends.tuning import CHUNK, Field, Values
from edge.lab.tuning.setting import Pool
from edge.model.structure.spec import ModelSpec

PROMPT, ANSWER = 512, 128  # tokens of the score
SHORT, LONG = 64, 1024  # rows in the cache during each half of the answer
_BATCH_S = 0.03  # approximate time of the decode steps that are measured at once, at least two
_MOST_STEPS = 16
_SETTLE_S = 0.002  # for the threads of the previous engine to fall asleep


@dataclass(frozen=True)
class Depths:
    """Sizes of a measurement that fit a model's context."""

    prompt: int  # tokens
    short: int  # rows in the cache during the answer's first half
    long: int  # rows during the second half

    @classmethod
    def of(cls, context: int) -> Depths:
        most = max(2, context - _MOST_STEPS - 2)
        return cls(min(PROMPT, most), min(SHORT, most // 2), min(LONG, most))

    @property
    def capacity(self) -> int:
        return max(self.prompt, self.long) + _MOST_STEPS + 2

    def about(self) -> str:
        return f"{self.prompt}-token prompt and {ANSWER} tokens of answer at {self.short} and {self.long} rows"


class TunableEngine(Engine, Protocol):
    @property
    def kv(self) -> HeadKV[Any]: ...


class Rig:
    """Engines of one model with candidates' values, loaded on demand. `measure` is for `search`."""

    def __init__(
        self, spec: ModelSpec, space: tuple[Field, ...], load: Callable[[Values], TunableEngine],
        on_compile: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._depths, self._load_engine, self._on_compile = Depths.of(spec.context), load, on_compile
        self._engines: Pool[TunableEngine] = Pool(space, self._load, lambda engine: engine.close())
        self._steps = 2
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, spec.vocab, self._depths.prompt).astype(np.int32)

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engines.close()

    def measure(self, values: Values, part: str) -> float:
        """Seconds of the prompt, or of the answer. Raises EngineError if the values do not compile."""
        engine = self._engines.get(values, part)
        engine.kv.truncate(0)  # the previous measurement may have been interrupted
        time.sleep(_SETTLE_S)
        if part == CHUNK:
            engine.forward(self._tokens[:2])  # warms the caches and wakes the threads
            engine.kv.truncate(0)
            return _timed(lambda: self._prefill(engine))
        return sum(self._decode(engine, rows) * ANSWER / 2 for rows in (self._depths.short, self._depths.long))

    def _prefill(self, engine: TunableEngine) -> None:
        chunk = engine.config.chunk
        for start in range(0, self._tokens.size, chunk):
            engine.forward(self._tokens[start : start + chunk])

    def _decode(self, engine: TunableEngine, rows: int) -> float:
        """Seconds of a decode step."""
        kv, token = engine.kv, self._tokens[:1]
        kv.truncate(0)
        for start in range(0, rows, engine.config.chunk):  # counted, not computed: only the time matters
            count = min(engine.config.chunk, rows - start)
            kv.prepare(count)
            kv.appended(count)
        warm = _timed(lambda: engine.forward(token))
        self._steps = max(2, min(_MOST_STEPS, int(_BATCH_S / warm)))

        def steps() -> None:
            for _ in range(self._steps):
                engine.forward(token)

        seconds = _timed(steps) / self._steps
        kv.truncate(0)
        return seconds

    def _load(self, values: Values) -> TunableEngine:
        self._on_compile()
        engine = self._load_engine(values)
        engine.forward(self._tokens[:2])
        engine.kv.truncate(0)
        return engine


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
