"""Trials: measurements that any machine with the same files can make, each in a child process, and remembered.

The cache folder keeps results, and converted models, under hashes of everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge.backends import engine_named
from edge.converters.calibrate import OWN_TEXT, TOKENS, calibration_tokens, column_importance
from edge.converters.gguf.ggml import quantize_file
from edge.devices.child import run_child
from edge.devices.host import processor
from edge.devices.memory import memory_use
from edge.devices.power import find_meter
from edge.errors import CacheError, EdgeError, InputError
from edge.formats.gguf import read_gguf
from edge.lab.quality.material import Setup
from edge.lab.quality.matrix import FULL, Cell, open_cell
from edge.lab.quality.windows import Windows, divergence
from edge.lab.searching.elsewhere import Machine, measure_there
from edge.lab.searching.space import Weights
from edge.model.model import Model
from edge.run.sampling.sampler import greedy
from edge.run.session import Session
from edge.run.starting.opening import open_model
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.storage.versions import edge_version, own_versions
from edge.types import FloatArray
from edge.values import parse

_STEPS = 64  # tokens whose speed is measured
_SCHEMA = 2


@dataclass(frozen=True)
class Trial:
    """One measurement. reference: the weights whose predictions, with a full cache, are compared with."""

    what: Literal["quality", "speed"]
    reference: Weights
    weights: Weights
    cell: Cell
    tokens: tuple[int, ...]  # of the text
    backend: str
    threads: int | None = None  # None: the plan's; predictions do not depend on them
    machine: Machine | None = None  # the machine that measures the speed; None: this one

    @property
    def label(self) -> str:
        cell = " ".join(part for part in (self.cell.policy, self.cell.kv_dtype, self.cell.size) if part)
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.weights.label}, {cell}{threads}: {self.what}"

    def key(self) -> str:
        """A hash of all that the result depends on."""
        weights, versions = self.weights, engine_named(self.backend).versions()
        here: list[object] = []
        if self.machine is not None:
            here = list(astuple(self.machine))
        elif self.what == "speed":
            here = [processor().name, find_meter().read().source]
        of = [
            _SCHEMA, self.what, self.reference.sha256, weights.sha256, weights.type, weights.by_importance,
            asdict(self.cell), self.tokens, self.backend, self.threads, own_versions(), versions, here,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(of).encode()).hexdigest()


@dataclass(frozen=True)
class Quality:
    """Divergence from the reference; see edge.likelihood.Divergence."""

    kl: float
    kl_stderr: float
    top1: float
    ratio: float
    ratio_stderr: float
    tokens: int


@dataclass(frozen=True)
class Speed:
    """The speed and energy of tokens in the middle of the answer."""

    tok_s: float
    joules: float  # per token; 0: the sensor missed them
    energy_kind: str  # "counter", "integrated" or "estimate"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial, or the reason why there is none."""

    quality: Quality | None = None
    speed: Speed | None = None
    peak: int = 0  # resident set of the trial's process, bytes
    reason: str = ""


Runner = Callable[[Sequence[Trial]], Iterator[tuple[Trial, Outcome]]]
"""Runs trials, and yields each with its outcome, in any order."""


def full_dtype(backend: str) -> str:
    """The dtype of the cache that losses are measured against."""
    has = engine_named(backend).CAPABILITIES.kv_dtypes
    return "f16" if "f16" in has else has[0]


def recall(trial: Trial) -> Outcome | None:
    """The outcome of an equal trial in an earlier search; None if there is none."""
    with suppress(CacheError, OSError, ValueError):
        if path := cache.find("searches", trial.key(), ".json"):
            return parse(Outcome, json.loads(path.read_bytes()))
    return None


def remember(trial: Trial, outcome: Outcome) -> None:
    """Keep an outcome for later searches. Failures are not kept: later searches try again."""
    if outcome.reason:
        return
    with suppress(CacheError), cache.create("searches", trial.key(), ".json", about=trial.label) as path:
        path.write_text(json.dumps(asdict(outcome), allow_nan=False), encoding="utf-8")


def run_here(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
    """Run trials on this machine, one after the other, within the memory that the system grants."""
    for trial in trials:
        yield trial, run_trial(trial)


def run_trial(trial: Trial, memory: int | None = None) -> Outcome:
    """Run a trial in a child process. memory: its limit in bytes; None: the system's."""
    request = {"trial": asdict(trial), "memory": memory}
    try:
        found = run_child("edge.lab.searching.child", request, lambda said: None, failure=f"{trial.label} failed")
    except EdgeError as error:
        return Outcome(reason=str(error))
    return parse(Outcome, found)


def answer(request: Any) -> dict[str, Any]:
    """The child's part of `run_trial`: an Outcome, for JSON. Raises EdgeError."""
    trial = parse(Trial, request["trial"])
    model = open_weights(trial.weights)
    if trial.machine is not None:
        return asdict(replace(_speed_there(trial, model, trial.machine), peak=memory_use().peak))
    setup = Setup(model, trial.backend, threads=trial.threads, memory=request["memory"])
    found = _quality(trial, setup) if trial.what == "quality" else _speed(trial, setup)
    return asdict(replace(found, peak=memory_use().peak))


def _quality(trial: Trial, setup: Setup) -> Outcome:
    base, count = open_weights(trial.reference), len(trial.tokens)
    bos = base.tokenizer.bos_id if base.tokenizer.add_bos else None
    windows = Windows(np.array(trial.tokens, np.int32), count, bos=bos)
    with (
        open_cell(replace(setup, model=base), Cell(FULL, full_dtype(trial.backend)), count) as reference,
        open_cell(setup, trial.cell, count) as session,
    ):
        found = divergence(reference, session, windows)
    return Outcome(Quality(found.kl_mean, found.kl_stderr, found.top1, found.ratio, found.ratio_stderr, found.tokens))


def _speed(trial: Trial, setup: Setup) -> Outcome:
    tokens = np.array(trial.tokens, np.int32)
    steps = _steps(tokens.size)
    with open_cell(setup, trial.cell, tokens.size) as session:
        context = tokens[: tokens.size * 3 // 4 - steps // 2]  # the middle of the answer
        _read(session, context)
        meter, step = find_meter(), tokens[:1].copy()
        before, started = meter.read().joules, time.perf_counter()
        for _ in range(steps):
            session.make_room(1)
            step[0] = greedy(session.forward(step, upcoming=1))
        seconds, reading = time.perf_counter() - started, meter.read()
    return Outcome(speed=Speed(steps / seconds, (reading.joules - before) / steps, reading.kind))


def _speed_there(trial: Trial, model: Model, machine: Machine) -> Outcome:
    tokens = len(trial.tokens)
    found = measure_there(model, trial.weights.label, machine, trial.cell, tokens, _steps(tokens), trial.threads)
    return Outcome(speed=Speed(found.decode.tok_s, found.decode.joules_per_token or 0.0, found.energy.kind))


def _steps(tokens: int) -> int:
    return min(_STEPS, max(1, tokens // 4))


def _read(session: Session, context: Any) -> None:
    session.reset()
    chunk = session.plan.config.chunk
    for start in range(0, context.size, chunk):
        part = context[start : start + chunk]
        session.make_room(part.size)
        session.forward(part, upcoming=chunk)


def open_weights(weights: Weights) -> Model:
    """Open a model of the search, converted if necessary. Raises InputError if its file differs here or is missing."""
    path = Path(weights.path)
    if not path.exists():
        raise InputError(f"{path}: no such file here: every machine of a search needs the model in the same place")
    if fingerprint(path).sha256 != weights.sha256:
        raise InputError(f"{path} is another file here than where the search runs")
    if weights.type is None:
        return open_model(path)
    kind = weights.type

    def write(target: Path) -> None:
        quantize_file(read_gguf(path), target, kind, importance=_importance(weights) if weights.by_importance else None)

    key = _key(weights, kind, weights.by_importance)
    return open_model(cache.find_or_make("searches", key, ".gguf", write, about=weights.label, expected=weights.nbytes))


def _importance(weights: Weights) -> dict[str, FloatArray]:
    """The importance matrix by edge's own text, computed once for all types of a model."""
    model = open_model(Path(weights.path))

    def write(target: Path) -> None:
        ids = calibration_tokens(model.tokenizer, [OWN_TEXT], TOKENS)
        np.savez(target, **column_importance(model.file, model.spec, ids))  # type: ignore[arg-type]

    path = cache.find_or_make(
        "searches", _key(weights, "importance"), ".npz", write, about=f"{model.spec.label} imatrix"
    )
    with np.load(path) as found:
        return dict(found)


def _key(weights: Weights, *what: object) -> str:
    """A key for files that this version of edge derives from a model's file and its own text."""
    depends = (weights.sha256, *what, edge_version(), OWN_TEXT.read_bytes())
    return hashlib.sha256(repr(depends).encode()).hexdigest()
