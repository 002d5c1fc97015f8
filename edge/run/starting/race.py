"""CPU against GPU, once per model and device: on phones above all, a GPU is often the slower one.

Both engines are loaded with the plans that a run would have, and take turns at a chunk of a prompt and a few tokens of
an answer. `edge/plan/engines.py` chooses by the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

import numpy as np

from edge.backends.base import Backend, Engine, LoadProgress
from edge.devices.memory import release_free_memory
from edge.errors import NOT_FINITE, EdgeError, EngineError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.plan.engines import PROMPT, Pace
from edge.plan.plan import Plan
from edge.types import IntArray

ROUNDS = 2  # per engine, in turns
STEPS = 16  # answer tokens per round
_MOST_S = 2.0  # approximate limit of a round
FEW = 16  # prompt tokens whose time predicts that of more

_log = logging.getLogger("edge")

Entry = tuple[Backend, Plan]
Result = TypeVar("Result")


def race(file: GGUFFile, spec: ModelSpec, entries: Sequence[Entry], progress: LoadProgress | None = None) -> list[Pace]:
    """Each engine's pace. Engines are loaded together if both fit the limit of their plans, otherwise one after the
    other. An engine that fails or produces NaN has the pace 0."""
    shown = progress or (lambda _part, _doing="": None)
    names = [backend.NAME for backend, _ in entries]
    shown(0.0, f"timing {' and '.join(names)}, once for this model")
    groups = [list(range(len(entries)))] if _fit_together([plan for _, plan in entries]) else [[0], [1]]
    laps: list[list[Pace]] = [[] for _ in entries]
    for group in groups:
        with ExitStack() as opened:
            engines = {}
            for number in group:
                backend, plan = entries[number]
                engine = _tried(backend.NAME, partial(backend.load, file, spec, plan.config))
                if engine is not None:
                    engines[number] = opened.enter_context(closing(engine))
            for turn in range(ROUNDS * len(engines)):
                number = list(engines)[turn % len(engines)]
                pace = _tried(names[number], partial(lap, engines[number]))
                laps[number].append(pace or Pace(0.0, 0.0))
                shown((turn + 1) / (ROUNDS * len(engines)))
        release_free_memory()
    return [min(each, key=lambda pace: pace.seconds, default=Pace(0.0, 0.0)) for each in laps]


def lap(engine: Engine) -> Pace:
    """Time a prompt and the first tokens after it, on an empty cache, which is left empty. Slow engines run fewer.

    Raises EngineError, also for NaN or infinite logits.
    """
    capacity, longest = engine.kv.capacity, min(engine.config.chunk, PROMPT)
    tokens = np.random.default_rng(0).integers(0, engine.spec.vocab, PROMPT).astype(np.int32)
    few = min(FEW, longest, capacity // 2)
    _timed(engine, tokens[: min(2, few)])  # warm-up: the driver compiles its kernels
    count, seconds = few, _timed(engine, tokens[:few])
    many = min(longest, capacity // 2)
    if many > few and seconds * many / few < _MOST_S / 2:
        engine.kv.truncate(0)
        count, seconds = many, _timed(engine, tokens[:many])
    _timed(engine, tokens[:1])
    steps, spent = 0, 0.0
    while steps < min(STEPS, capacity // 4) and (not steps or spent < _MOST_S / 2):
        spent += _timed(engine, tokens[steps : steps + 1])
        steps += 1
    engine.kv.truncate(0)
    return Pace(count / seconds, steps / spent)


def _timed(engine: Engine, tokens: IntArray) -> float:
    started = time.perf_counter()
    logits = engine.forward(tokens)
    seconds = time.perf_counter() - started
    if not np.isfinite(logits).all():
        raise EngineError(NOT_FINITE)
    return seconds


def _tried(name: str, work: Callable[[], Result]) -> Result | None:
    try:
        return work()
    except EdgeError as error:
        _log.warning("%s takes no part in the choice of an engine: %s", name, error)
        return None


def _fit_together(plans: Sequence[Plan]) -> bool:
    """Whether the plans fit together within the limit of each, with the process itself counted once."""
    together = sum(plan.bytes.total for plan in plans) - min(plan.bytes.interpreter for plan in plans)
    return all(together + plan.bytes.reserve <= plan.limit for plan in plans)
