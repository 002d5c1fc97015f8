"""An engine's side of tuning: fields to choose, and a record's values. `edge tune` (edge/lab/tuning/) measures them."""

from __future__ import annotations

from typing import Any

from edge.backends.counts import Tuned
from edge.devices.records import Record
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

STEP, CHUNK = "step", "chunk"  # the two parts of a run: decode, prefill
PARTS = (STEP, CHUNK)

Values = dict[str, int]


@dataclass(frozen=True)
class Field:
    """A setting to choose."""

    name: str
    about: str
    default: int
    choices: tuple[int, ...]
    parts: tuple[str, ...]  # those whose speed it affects
    compiled: bool = True  # whether it changes the code


def defaults(space: tuple[Field, ...]) -> Values:
    return {field.name: field.default for field in space}


def relevant(space: tuple[Field, ...], values: Values, parts: tuple[str, ...]) -> Values:
    """The values that affect the speed of any of these parts."""
    return {field.name: values[field.name] for field in space if set(parts) & set(field.parts)}


def model_shape(spec: ModelSpec) -> dict[str, Any]:
    """A model's shape, for the subject of a record."""
    return {
        "layers": spec.layers, "hidden": spec.hidden, "heads": spec.heads, "kv_heads": spec.kv_heads,
        "head": spec.head_dim, "ffn": spec.ffn, "vocab": spec.vocab, "window": spec.window, "type": spec.weight_type,
    }  # fmt: skip


def tuned_by(record: Record) -> Tuned:
    """The tuned settings of a record."""
    if record.kept != "tuned":
        return Tuned(f"default (record {record.name})", {}, None, None)
    values = dict(record.values)
    threads, chunk = values.pop("threads", None), values.pop("chunk", None)
    doubt = "" if record.comparison else " (interrupted: not compared with the defaults)"
    return Tuned(f"record {record.name}{doubt}", values, threads, chunk)
