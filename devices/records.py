"""Records of tuning: the results of `edge tune` for a model on a device, one small JSON file each.

They lie in EDGE_TUNING, or in the system's folder for data. NAME.trials.jsonl beside a record holds all trials, a line
each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from edge.devices.output import new_file
from edge.devices.private import make_private_folder, read_private

SCHEMA = 1

_MOST_BYTES = 1 << 16  # no record of ours is longer
_TOO_LARGE = 1e18  # for any figure of a record
_FAR = 2.0  # a model whose hidden size is more than this times another's is tuned on its own

_log = logging.getLogger("edge")
_complained: set[Path] = set()


@dataclass(frozen=True)
class Subject:
    """The subject of a record: a processor, and a model's shape as the engine sees it."""

    cpu: str
    family: str  # of the processor
    cores: int
    isa: str
    kv_dtype: str
    shape: dict[str, Any]  # sizes, and the block type of most weights; `hidden` must be among them

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Comparison:
    """Defaults against the best candidate, in turns: time of the former / time of the latter, pair by pair."""

    median: float
    floor: float  # the true median is above it, with 97.5 % certainty
    low: float  # 10 % of the pairs are below
    high: float  # 90 %
    pairs: int


@dataclass(frozen=True)
class Record:
    """What was found. `gain` is a ratio of times and never below 1: where nothing beat the defaults, they stay.

    comparison: None if the search was interrupted before it; `gain` is then the product of the races that were won.
    """

    name: str
    device: str
    subject: Subject
    model: str
    score: str  # what was timed
    values: dict[str, int]
    kept: str  # "tuned" or "default"
    gain: float
    comparison: Comparison | None
    trials: int
    seconds: float
    date: str
    versions: dict[str, str]
    schema: int = field(default=SCHEMA)


def user_folder() -> Path:
    import platformdirs

    chosen = os.environ.get("EDGE_TUNING") or Path(platformdirs.user_data_dir("edge")) / "tuning"
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def record_name(subject: Subject, model: str) -> str:
    """A readable file name that no two subjects share."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{subject.cpu} {model} {subject.kv_dtype}".lower()).strip("-")
    return f"{words[:80]}-{subject.key}"


def trials_path(name: str) -> Path:
    """The table of trials beside a record."""
    return user_folder() / f"{name}.trials.jsonl"


def write_record(record: Record) -> Path:
    """Into the user's folder, whole or not at all. Raises OSError, InputError."""
    path = user_folder() / f"{record.name}.json"
    make_private_folder(path.parent)
    with new_file(path, private=True) as temporary:
        temporary.write_text(json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_records() -> list[Record]:
    """Of the user's folder. Files that are no records are left out, with one warning each."""
    with suppress(OSError):
        return [record for path in sorted(user_folder().glob("*.json")) if (record := _read(path))]
    return []


def nearest(records: Iterable[Record], subject: Subject) -> Record | None:
    """The record that says most about `subject`, or None.

    Never from another instruction set or KV dtype: those are other kernels. Then, in this order: the same processor,
    its family, the same shape, the nearest hidden size (at most twice or half).
    """

    def distance(record: Record) -> tuple[bool, bool, bool, float]:
        other = record.subject
        return (
            other.cpu != subject.cpu or other.cores != subject.cores,
            other.family != subject.family,
            other.shape != subject.shape,
            abs(math.log(other.shape["hidden"] / subject.shape["hidden"])),
        )

    like = [
        record
        for record in records
        if (record.subject.isa, record.subject.kv_dtype) == (subject.isa, subject.kv_dtype)
        and distance(record)[3] <= math.log(_FAR)
    ]
    return min(like, key=distance, default=None)


def set_aside(path: Path, why: str) -> None:
    """Say once that a record is not used."""
    if path not in _complained:
        _complained.add(path)
        _log.warning("tuning record %s is ignored: %s", path, why)


def _read(path: Path) -> Record | None:
    try:
        read = read_private(path, _MOST_BYTES + 1)
        if len(read) > _MOST_BYTES:
            raise ValueError("too long for a record")
        record: Record = _parse(Record, json.loads(read.decode()))
        if record.schema != SCHEMA:
            raise ValueError(f"schema {record.schema} is not {SCHEMA}")
        if record.name != path.stem or record.gain < 1 or not _has_hidden(record.subject):
            raise ValueError("its figures contradict each other")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        set_aside(path, why or type(error).__name__)
        return None
    return record


def _is_whole(value: Any) -> bool:
    """A truth value is one here: settings of two kinds are tuned like others."""
    return isinstance(value, int) and abs(value) < _TOO_LARGE


def _has_hidden(subject: Subject) -> bool:
    hidden = subject.shape.get("hidden", 0)
    return _is_number(hidden, int) and bool(hidden > 0)


def _parse(kind: Any, data: Any) -> Any:
    """A dataclass from JSON, with every field of its type. Raises ValueError, KeyError."""
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} is no object")
    hints, values = get_type_hints(kind), {}
    for each in fields(kind):
        value, hint = data[each.name], hints[each.name]
        if hint in (Subject, Comparison) or (hint == (Comparison | None) and value is not None):
            value = _parse(Subject if hint is Subject else Comparison, value)
        elif hint == dict[str, int]:
            _check(isinstance(value, dict) and all(map(_is_whole, value.values())), each.name)
        elif hint is str:
            _check(isinstance(value, str), each.name)
        elif hint in (int, float):
            _check(_is_number(value, hint), each.name)
        elif hint != (Comparison | None) or value is not None:
            _check(isinstance(value, dict), each.name)
        values[each.name] = value
    return kind(**values)


def _is_number(value: Any, kind: type) -> bool:
    """Neither NaN nor a truth value, nor so large that figures with it overflow."""
    kinds = (int,) if kind is int else (int, float)
    return type(value) in kinds and abs(value) < _TOO_LARGE


def _check(right: bool, name: str) -> None:
    if not right:
        raise ValueError(f"{name} is of the wrong kind")
