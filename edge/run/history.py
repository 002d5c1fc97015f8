"""The history: figures of earlier runs on this device, from which `edge/lab/prediction` predicts later ones.

A session appends a line of JSON after each generation; `edge bench` does so for each phase. Prompts and answers are not
recorded. EDGE_HISTORY=0 disables the history, EDGE_HISTORY=DIR keeps it in DIR. The newest _MOST_BYTES are kept.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends.base import EngineConfig
from edge.devices.host import processor
from edge.devices.output import new_file
from edge.devices.private import is_private_file, make_private_folder, read_private
from edge.errors import CacheError, InputError
from edge.model.structure.spec import ModelSpec, model_key
from edge.records import dataclass
from edge.storage.cache import cache_folder
from edge.storage.lock import file_lock
from edge.values import parse

if TYPE_CHECKING:
    from edge.plan.plan import Plan
    from edge.run.decoding.generation import Generation
    from edge.run.report import RunReport, Team

_MOST_BYTES = 1 << 18  # about 500 runs
_MOST_LINE = 4096
_OFF = ("0", "off", "no", "false")
_TOO_LARGE = 1e18  # for a count, bytes or seconds
_RECENT = 20  # runs that predictions use: what a device did months ago may no longer hold

# Held while a line is written, and never waited for: the garbage collector may end a stream in the thread that writes.
_writing = threading.Lock()


@dataclass(frozen=True)
class Phase:
    """The prompt or the answer of a run. tokens: run in it. context: mean rows in the cache meanwhile. joules: None if
    not metered. Raises ValueError for impossible figures."""

    tokens: int
    seconds: float
    context: float
    joules: float | None = None

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens

    def __post_init__(self) -> None:
        figures = (self.tokens, self.seconds, self.context, self.joules or 0.0)
        if not self.tokens or not self.seconds or not all(map(_is_possible, figures)):
            raise ValueError("no run has such a phase")


@dataclass(frozen=True)
class Setting:
    """The circumstances on which the speed of a model depends."""

    cpu: str
    model: str  # `model_key`: models of the same shape and block types run alike
    backend: str
    kv_dtype: str
    threads: int
    variant: str = ""  # other settings of the engine

    @classmethod
    def of(cls, spec: ModelSpec, backend: str, config: EngineConfig) -> Setting:
        variant = [name for name in ("repack", "observes", "per_head") if getattr(config, name)]
        sizes = ("provider", "resident", "lora_rank", "adapter")
        variant += [f"{name}={value}" for name in sizes if (value := getattr(config, name))]
        return cls(processor().name, model_key(spec), backend, config.kv_dtype, config.threads, " ".join(variant))


@dataclass(frozen=True)
class Run:
    """The figures of one run. at: seconds since 1970. peak: the process's, in bytes. energy_kind, energy_source: of the
    joules. Raises ValueError for impossible figures."""

    at: float
    setting: Setting
    label: str
    policy: str
    capacity: int
    prefill: Phase | None
    decode: Phase | None
    energy_kind: str | None = None
    energy_source: str | None = None
    peak: int | None = None
    busy: bool = False  # other programs wanted the cores

    def __post_init__(self) -> None:
        if not all(map(_is_possible, (self.at, self.capacity, self.peak or 0))):
            raise ValueError("no run has such figures")


def history_path() -> Path:
    chosen = os.environ.get("EDGE_HISTORY", "")
    folder = cache_folder() / "history" if chosen.lower() in ("", "1", *_OFF) else Path(chosen)
    return folder / "runs.jsonl"


def remember_run(spec: ModelSpec, run: Generation, plan: Plan, report: RunReport) -> None:
    """A session observer: keep the figures of a report. Skips runs that say nothing about others: the caller was slow,
    or the run paused to hold a limit, returned memory, or ended within its prompt (a budget shortens the last chunks).
    """
    tokens, timings, kv, energy = report.tokens, report.timings, report.kv, report.energy
    if not run.is_typical or timings.paused_s or report.actions or tokens.cut:
        return
    fed, steps = tokens.ran, max(0, tokens.generated - 1)
    before = max(0, kv.rows - steps - fed)  # rows of earlier turns, of a cache that has evicted nothing
    prefill = _phase(fed, timings.prefill_tok_s, before + fed / 2, energy.prefill)
    decode = _phase(steps, timings.decode_tok_s, max(0.0, kv.rows - steps / 2), energy.decode)
    _remember(spec, plan, prefill, decode, energy.kind, energy.source, report.memory.peak_rss, report.team)


def remember_phase(
    spec: ModelSpec, plan: Plan, phase: Phase, *, prompt: bool, kind: str | None, source: str | None,
    team: Team | None = None,
) -> None:  # fmt: skip
    """Keep a phase that was measured alone, as `edge bench` does. kind, source: of its joules."""
    _remember(spec, plan, phase if prompt else None, None if prompt else phase, kind, source, None, team)


def _phase(tokens: int, speed: float | None, context: float, joules: float | None) -> Phase | None:
    return None if tokens < 1 or not speed else Phase(tokens, tokens / speed, context, joules)


def _remember(
    spec: ModelSpec, plan: Plan, prefill: Phase | None, decode: Phase | None, kind: str | None, source: str | None,
    peak: int | None, team: Team | None,
) -> None:  # fmt: skip
    if prefill is None and decode is None:
        return
    setting = Setting.of(spec, plan.backend, plan.config)
    label, policy, capacity = spec.label, plan.kv_policy, plan.config.capacity
    busy = team is not None and team.crowded
    append(Run(time.time(), setting, label, policy, capacity, prefill, decode, kind, source, peak, busy))


def append(run: Run) -> None:
    """Append a line. Never fails: a folder that is not writable, or that other users may write to, keeps no history.
    If runs end at the same moment in several threads of a process, only one may be kept."""
    if os.environ.get("EDGE_HISTORY", "").lower() in _OFF:
        return
    line = (json.dumps(asdict(run), ensure_ascii=False, separators=(",", ":")) + "\n").encode()
    if len(line) > _MOST_LINE or not _writing.acquire(blocking=False):
        return
    try:
        with suppress(OSError, InputError, CacheError):
            _write(line)
    finally:
        _writing.release()


def _write(line: bytes) -> None:
    path = history_path()
    make_private_folder(path.parent)
    with file_lock(path.with_name(".runs.lock")):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if is_private_file(os.fstat(descriptor)):
                os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _MOST_BYTES:
            _halve(path)


def earlier_runs(setting: Setting) -> list[Run]:
    """The runs of the same setting, newest first, at most _RECENT. Skips damaged lines."""
    found = [run for run in map(_read, reversed(_lines())) if run is not None and run.setting == setting]
    return found[:_RECENT]


def last_run(model: str) -> float | None:
    """The time of the last run of a model with this key (`model_key`), in seconds since 1970; None if there is none."""
    return max((run.at for run in map(_read, _lines()) if run is not None and run.setting.model == model), default=None)


def history_size() -> tuple[int, int]:
    """The number of runs that are kept, and the size of their file in bytes."""
    return sum(_read(line) is not None for line in _lines()), _bytes()


def clear_history() -> tuple[int, int]:
    """Forget all runs: (runs, bytes freed). Raises CacheError."""
    size = history_size()
    try:
        history_path().unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"{history_path()} cannot be removed ({error.strerror})") from None
    return size


def _bytes() -> int:
    try:
        return history_path().stat().st_size
    except OSError:
        return 0


def _lines() -> list[bytes]:
    try:
        return read_private(history_path(), 2 * _MOST_BYTES).splitlines()
    except OSError:
        return []


def _halve(path: Path) -> None:
    """Keep the newer half. Called with the lock held."""
    data = path.read_bytes()[-_MOST_BYTES // 2 :]
    with new_file(path, private=True) as temporary:
        temporary.write_bytes(data[data.find(b"\n") + 1 :])


@lru_cache(maxsize=1024)
def _read(line: bytes) -> Run | None:
    """None if the line is damaged, or from another version of edge."""
    try:
        fields = json.loads(line)
        return parse(Run, fields) if fields.keys() <= Run.__dataclass_fields__.keys() else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _is_possible(figure: float) -> bool:
    """Whether a run can have this count, or these bytes or seconds."""
    return 0 <= figure < _TOO_LARGE
