"""The sizes of a Core ML program, in which nothing may vary."""

from __future__ import annotations

from dataclasses import dataclass

from edge.backends.onnx.npu.form import CHUNK, ROWS
from edge.model.spec import ModelSpec
from edge.plan.checks import check_static_sizes


@dataclass(frozen=True)
class ProgramSizes:
    """rows: of the KV cache. chunk: tokens of a prompt that run at once."""

    rows: int
    chunk: int


@dataclass(frozen=True)
class Sizes:
    """Sizes as a user states them; None: the usual ones."""

    rows: int | None = None
    chunk: int | None = None

    def fitted(self, spec: ModelSpec) -> ProgramSizes:
        """For this model. Raises InputError for impossible sizes."""
        rows = self.rows or min(ROWS, spec.context)
        check_static_sizes(spec, rows, self.chunk)
        return ProgramSizes(rows, self.chunk or min(CHUNK, rows // 2))


USUAL = Sizes()
