"""The generator's output for a GPU: kernels in the device's source language, and the dispatches of each pass.

A program is data: it is cached as JSON, exported for apps and pages, and run by any host (`hosts/`). TVM is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any

from edge.records import dataclass

LANGUAGES = ("wgsl", "opencl", "cuda", "metal")


@dataclass(frozen=True)
class Kernel:
    """A compute kernel, whose entry point has its name."""

    name: str
    source: str  # a complete module
    threads: tuple[int, int]  # of a workgroup, in x and y
    buffers: tuple[str, ...]  # array parameters, in the order of their bindings
    written: tuple[str, ...]  # the buffers that the kernel writes
    scalars: tuple[str, ...]
    shared: int  # bytes of workgroup memory


@dataclass(frozen=True)
class Slice:
    """A part of a buffer, in bytes. Offsets are multiples of 256; size 0: to the buffer's end."""

    buffer: str
    offset: int = 0
    size: int = 0


@dataclass(frozen=True)
class Dispatch:
    """A run of a kernel."""

    kernel: str
    slices: tuple[Slice, ...]  # for `Kernel.buffers`
    scalars: tuple[int, ...]  # for `Kernel.scalars`
    groups: tuple[int, int]  # workgroups in x and y
    phase: str  # of `backends.base.PHASES`
    layer: int | None = None  # None outside of layers
    per: int = 0  # if not 0: tokens of a workgroup in y, of which there are ceil(tokens / per), not groups[1]
    product: tuple[str, ...] = ()  # matrices that LoRA adapters may change …
    adapted: bool | None = None  # … and whether the dispatch runs if they do, or if not; None: always

    def workgroups(self, tokens: int) -> tuple[int, int]:
        return (self.groups[0], -(-tokens // self.per)) if self.per else self.groups


@dataclass(frozen=True)
class Program:
    """A model's program."""

    language: str
    kernels: dict[str, Kernel]  # by name
    buffers: dict[str, int]  # bytes by name
    passes: dict[str, tuple[Dispatch, ...]]  # dispatches in order, by name of the pass

    def dispatches(self, name: str, changed: AbstractSet[tuple[int, str]] = frozenset()) -> tuple[Dispatch, ...]:
        """The dispatches of a pass with adapters that change these matrices, each a layer and a name."""

        def runs(each: Dispatch) -> bool:
            found = any((each.layer, matrix) in changed for matrix in each.product)
            return each.adapted is None or each.adapted == found

        return tuple(filter(runs, self.passes[name]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Parse the output of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(text)
        return cls(
            fields["language"],
            {name: _kernel(each) for name, each in fields["kernels"].items()},
            {str(name): int(size) for name, size in fields["buffers"].items()},
            {name: tuple(map(_dispatch, each)) for name, each in fields["passes"].items()},
        )


def _kernel(fields: Mapping[str, Any]) -> Kernel:
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
    return Kernel(**values)


def _dispatch(fields: dict[str, Any]) -> Dispatch:
    slices = tuple(Slice(**each) for each in fields["slices"])
    tuples = {name: tuple(fields[name]) for name in ("scalars", "groups", "product")}
    return Dispatch(**fields | {"slices": slices} | tuples)
