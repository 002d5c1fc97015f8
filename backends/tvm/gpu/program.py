"""What the generator makes for a GPU: kernels in the source language of a device, and the dispatches of each pass.

A program is data: it is cached as JSON, exported for apps and pages, and run by any host (`hosts/`). TVM is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LANGUAGES = ("wgsl", "opencl", "cuda", "metal")


@dataclass(frozen=True)
class Kernel:
    """A compute kernel, whose entry point has its name.

    source: complete, of one module. threads: of a workgroup, in x and y. buffers: parameters that are arrays, in the
    order of their bindings. written: of these, those that the kernel writes. scalars: int32 parameters behind the
    buffers; in WGSL the members of a uniform, which ends with a uint32: workgroups in x minus 1. shared: bytes of
    workgroup memory.
    """

    name: str
    source: str
    threads: tuple[int, int]
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    scalars: tuple[str, ...]
    shared: int


@dataclass(frozen=True)
class Slice:
    """A part of a buffer in bytes. Offsets are multiples of 256; size 0: all behind the offset."""

    buffer: str
    offset: int = 0
    size: int = 0


@dataclass(frozen=True)
class Dispatch:
    """A kernel's run.

    slices: by `Kernel.buffers`. scalars: by `Kernel.scalars`. groups: workgroups in x and y. per: tokens of a workgroup
    in y, where their number depends on that of a pass's tokens: ceil(tokens / per) instead of groups[1]; else 0.
    phase: of `backends.base.PHASES`. layer: None outside of layers.
    """

    kernel: str
    slices: tuple[Slice, ...]
    scalars: tuple[int, ...]
    groups: tuple[int, int]
    phase: str
    layer: int | None = None
    per: int = 0

    def workgroups(self, tokens: int) -> tuple[int, int]:
        return (self.groups[0], -(-tokens // self.per)) if self.per else self.groups


@dataclass(frozen=True)
class Program:
    """kernels: by name. buffers: bytes by name. passes: dispatches in their order, by the name of the pass."""

    language: str
    kernels: dict[str, Kernel]
    buffers: dict[str, int]
    passes: dict[str, tuple[Dispatch, ...]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` has not written."""
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
    return Dispatch(
        **fields | {"slices": slices, "scalars": tuple(fields["scalars"]), "groups": tuple(fields["groups"])}
    )
