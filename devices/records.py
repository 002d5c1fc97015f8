"""Records of `edge tune`: the settings found for a model's shape on a device, one small JSON file each.

They lie in EDGE_TUNING, or in the system's folder for data. NAME.trials.jsonl beside a record lists all trials, one a
line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from edge.devices.keys import key_of
from edge.devices.output import new_file
from edge.devices.platform import system_folder
from edge.devices.private import make_private_folder, read_private
from edge.records import dataclass
from edge.values import Rule, brief, parse

SCHEMA = 1

_MOST_BYTES = 1 << 16  # no record of ours is longer
_TOO_LARGE = 10**18  # larger figures could overflow
_FAR = 2.0  # a model whose hidden size is more than this times another's is tuned on its own

_log = logging.getLogger("edge")
_complained: set[Path] = set()

_Number = Annotated[float, Rule("a number between -1e18 and 1e18", lambda value: abs(value) < _TOO_LARGE)]
_Gain = Annotated[float, Rule("a number from 1 to 1e18", lambda value: 1 <= value < _TOO_LARGE)]
_Whole = Annotated[int, Rule("a whole number between -1e18 and 1e18", lambda value: abs(value) < _TOO_LARGE)]
_Setting = Annotated[int | bool, Rule("a whole number, true or false", lambda value: abs(value) < _TOO_LARGE)]


def _has_hidden(shape: dict[str, Any]) -> bool:
    hidden = shape.get("hidden")
    return type(hidden) is int and 0 < hidden < _TOO_LARGE


@dataclass(frozen=True)
class Subject:
    """The key of a record: a processor, and a model's shape as the engine sees it."""

    cpu: str
    family: str  # of the processor
    cores: _Whole
    isa: str
    kv_dtype: str
    shape: Annotated[dict[str, Any], Rule("a table with a hidden size", _has_hidden)]
    """sizes, and the block type of most weights"""

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return key_of(text, 8)


@dataclass(frozen=True)
class Comparison:
    """Quotients of paired times: the defaults' time / the best candidate's."""

    median: _Number
    floor: _Number  # lower bound of the true median, at 97.5 % confidence
    low: _Number  # 10th percentile of the pairs
    high: _Number  # 90th percentile
    pairs: _Whole


@dataclass(frozen=True)
class Record:
    """The result of one tuning run."""

    name: str
    device: str
    subject: Subject
    model: str
    score: str  # the timed workload
    values: dict[str, _Setting]
    kept: str  # "tuned" or "default"
    gain: _Gain  # a quotient of times, at least 1: settings that do not beat the defaults are not kept
    comparison: Comparison | None  # None: interrupted before it; `gain` is the product of the races won
    trials: _Whole
    seconds: _Number
    date: str
    versions: dict[str, str]
    schema: int = SCHEMA


def user_folder() -> Path:
    """The folder of the user's records; it need not exist."""
    chosen = os.environ.get("EDGE_TUNING") or Path(system_folder("data")) / "tuning"
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def record_name(subject: Subject, model: str) -> str:
    """A readable file name, unique for each subject."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{subject.cpu} {model} {subject.kv_dtype}".lower()).strip("-")
    return f"{words[:80]}-{subject.key}"


def trials_path(name: str) -> Path:
    """The path of the file of trials beside a record."""
    return user_folder() / f"{name}.trials.jsonl"


def write_record(record: Record) -> Path:
    """Write a record atomically into the user's folder and return its path. Raises OSError, InputError."""
    path = user_folder() / f"{record.name}.json"
    make_private_folder(path.parent)
    with new_file(path, private=True) as temporary:
        temporary.write_text(json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_records() -> list[Record]:
    """Read all records of the user's folder. Invalid files are skipped, with one warning each."""
    with suppress(OSError):
        return [record for path in sorted(user_folder().glob("*.json")) if (record := _read(path))]
    return []


def nearest(records: Iterable[Record], subject: Subject) -> Record | None:
    """The record that best applies to `subject`, or None.

    Records of another instruction set or KV dtype never apply: those run other kernels. Preference, in this order: same
    processor, same family, same shape, nearest hidden size (at most a factor of 2).
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
    """Log once that a record is ignored, and why."""
    if path not in _complained:
        _complained.add(path)
        _log.warning("tuning record %s is ignored: %s", path, why)


def _read(path: Path) -> Record | None:
    try:
        read = read_private(path, _MOST_BYTES + 1)
        if len(read) > _MOST_BYTES:
            raise ValueError("too long for a record")
        data = json.loads(read.decode())
        if isinstance(data, dict) and data.get("schema") != SCHEMA:
            raise ValueError(f"schema {brief(data.get('schema'))} is not {SCHEMA}")
        record = parse(Record, data)
        if record.name != path.stem:
            raise ValueError(f"it is the record of {brief(record.name)}")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        set_aside(path, why or type(error).__name__)
        return None
    return record
