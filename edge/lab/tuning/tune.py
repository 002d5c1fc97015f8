"""A tuning run: search, comparison with the defaults, record."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from types import FrameType
from typing import NoReturn

from edge.backends.tuning import Values, defaults
from edge.devices.private import make_private_folder
from edge.devices.records import Comparison, Record, read_records, record_name, trials_path, write_record
from edge.errors import InputError
from edge.lab.tuning.races import Found, Limits, OutOfTime, Trial, compare, is_significant, search
from edge.lab.tuning.setting import Setting
from edge.lab.tuning.table import Table
from edge.storage.lock import file_lock
from edge.storage.versions import own_versions

_LONGEST_S = 1e6  # of an alarm; systems do not take any number


@dataclass(frozen=True)
class Status:
    """The progress of a tuning run."""

    doing: str
    trials: int
    best: float  # predicted time / that of the defaults
    seconds_left: float  # until --time is over


@dataclass(frozen=True)
class Result:
    record: Record
    interrupted: bool
    measured: int  # trials that no earlier tuning had done
    late: bool = False  # there was no time for all trials, or for the comparison


def tune(
    model: str, setting: Setting, *, device: str = "host", trials: int, seconds: float, seed: int = 0,
    force: bool = False, on_status: Callable[[Status], None] = lambda status: None,
) -> Result:  # fmt: skip
    """Search, compare, and write the record with its table of trials. Ctrl-C ends it early and keeps the results so
    far.

    model: its label. seconds: for everything, including compilation and the comparison. force: discard earlier trials.
    Raises InputError if the folder of records cannot be written.
    """
    name, started = record_name(setting.subject, model), time.monotonic()
    space, usual = setting.space, defaults(setting.space)
    table = Table(trials_path(name), _key(setting, seed))
    progress = _Progress(on_status, started + seconds)
    new: list[Trial] = []

    def on_trial(trial: Trial, is_new: bool) -> None:
        progress.count += 1
        if trial.fate == "better" and trial.score is not None:
            progress.best = trial.score
        if is_new:
            new.append(trial)
            table.add(trial)
        progress.say(f"{_text(trial.changes)}: {trial.fate}")

    try:
        make_private_folder(table.path.parent)
        with file_lock(table.path.with_suffix(".lock")):  # a second tuning of the same waits for the first
            known = [] if force else table.known()
            table.start(known)
            limits = Limits(trials, started + seconds, time.monotonic, _alarm)
            comparison = None
            with setting.open(lambda: progress.say("compiling")) as measurer:
                found = search(space, measurer.measure, limits, seed=seed, known=known, on_trial=on_trial)
                interrupted, late = found.interrupted, found.late
                if not interrupted and found.values != usual:
                    try:
                        with limits.cut_off():
                            comparison = compare(
                                measurer.measure, usual, found.values,
                                lambda pair: progress.say(f"the best against the defaults, pair {pair + 1}"),
                            )  # fmt: skip
                    except OutOfTime:
                        late = True
                    except KeyboardInterrupt:
                        interrupted = True
            if comparison and not is_significant(comparison):
                table.distrust(found.trials)
            record = _record(name, device, setting, model, found, comparison, time.monotonic() - started)
            if comparison or not (interrupted or late) or (found.trials and _is_worth_more(record)):
                write_record(record)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(table.path.parent)):
            raise
        raise InputError(
            f"the folder of tuning records {table.path.parent} cannot be written ({error.strerror}): "
            f"set EDGE_TUNING to one that can"
        ) from None
    return Result(record, interrupted, len(new), late)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after `seconds`, where signals work: in the main thread, except on Windows. Elsewhere, work that
    has begun finishes."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    if seconds <= 0:
        raise OutOfTime

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST_S))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class _Progress:
    on_status: Callable[[Status], None]
    deadline: float
    count: int = 0
    best: float = 1.0

    def say(self, doing: str) -> None:
        left = max(0.0, self.deadline - time.monotonic())
        self.on_status(Status(doing, self.count, self.best, left))


def _record(
    name: str, device: str, setting: Setting, model: str, found: Found, comparison: Comparison | None,
    seconds: float,
) -> Record:  # fmt: skip
    """The record of the result. Values that do not beat the defaults beyond noise are dropped, with a gain of 1."""
    usual = defaults(setting.space)
    estimate = 1 / found.estimate if found.interrupted or comparison is None else 0.0
    gain = comparison.median if comparison and is_significant(comparison) else max(1.0, estimate)
    kept = "tuned" if gain > 1 and found.values != usual else "default"
    return Record(
        name=name, device=device, subject=setting.subject, model=model, score=setting.score,
        values=found.values if kept == "tuned" else usual, kept=kept,
        gain=round(gain, 4), comparison=comparison, trials=len(found.trials), seconds=round(seconds, 1),
        date=date.today().isoformat(), versions={**own_versions(), **setting.versions},
    )  # fmt: skip


def _is_worth_more(record: Record) -> bool:
    """Whether an unfinished tuning's record may replace the existing one: not if that was compared with the
    defaults."""
    return all(other.comparison is None for other in read_records() if other.name == record.name)


def _key(setting: Setting, seed: int) -> str:
    """The conditions of trials: a change of space, engine or compiler invalidates them."""
    engine = setting.sources, sorted(setting.versions.items())
    text = repr((setting.space, setting.subject.key, setting.score, seed, *engine))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text(changes: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items())
