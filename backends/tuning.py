"""An engine's side of `edge tune`: fields to choose, and a measurer of candidates. See edge/lab/tuning/."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any, Generic, Protocol, TypeVar

from edge.backends.counts import Tuned
from edge.devices.records import Record, Subject
from edge.model.spec import ModelSpec
from edge.records import dataclass

STEP, CHUNK = "step", "chunk"  # the two parts of a run: decode, prefill
PARTS = (STEP, CHUNK)

_MOST_LOADED = 4  # the best and the candidate, for decode and for prefill

Values = dict[str, int]
Loaded = TypeVar("Loaded")


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


class Measurer(Protocol):
    """Times candidates, on the engine here or on a remote device."""

    def measure(self, values: Values, part: str) -> float:
        """Seconds of one part of the score. Raises EngineError if the values do not compile."""
        ...


@dataclass(frozen=True)
class Setting:
    """A tuning task."""

    subject: Subject
    space: tuple[Field, ...]
    score: str  # the timed workload, in words
    # starts the measurer; its argument is called before each compilation
    open: Callable[[Callable[[], None]], AbstractContextManager[Measurer]]
    sources: str = ""  # hash of the engine's code, which invalidates trials of other code
    versions: dict[str, str] = field(default_factory=dict)  # of the compiler


@dataclass
class Pool(Generic[Loaded]):
    """An LRU pool of loaded candidates. Candidates with the same values for a part of the score share one."""

    space: tuple[Field, ...]
    load: Callable[[Values], Loaded]
    unload: Callable[[Loaded], None]
    _held: list[tuple[Values, Loaded]] = field(default_factory=list)  # the most recently used last

    def get(self, values: Values, part: str) -> Loaded:
        """A candidate that shares the values that affect this part."""
        wanted = relevant(self.space, values, (part,))
        for index, (held, loaded) in enumerate(self._held):
            if relevant(self.space, held, (part,)) == wanted:
                self._held.append(self._held.pop(index))
                return loaded
        while len(self._held) >= _MOST_LOADED:
            self.unload(self._held.pop(0)[1])
        loaded = self.load(values)
        self._held.append((values, loaded))
        return loaded

    def close(self) -> None:
        while self._held:
            self.unload(self._held.pop()[1])
