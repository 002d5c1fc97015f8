"""The fixed sizes of a Core ML program."""

from __future__ import annotations

from dataclasses import dataclass

from edge.backends.onnx.npu.form import CHUNK, ROWS
from edge.model.structure.spec import ModelSpec
from edge.plan.checks import check_static_sizes


@dataclass(frozen=True)
class ProgramSizes:
    """The sizes of a program."""

    rows: int  # of the KV cache
    chunk: int  # tokens of a prefill pass


@dataclass(frozen=True)
class Sizes:
    """Sizes as the user gives them; None: the defaults."""

    rows: int | None = None
    chunk: int | None = None

    def fitted(self, spec: ModelSpec) -> ProgramSizes:
        """The sizes for this model. Raises InputError for impossible ones."""
        rows = min(ROWS, spec.context) if self.rows is None else self.rows
        check_static_sizes(spec, rows, self.chunk)
        return ProgramSizes(rows, self.chunk or min(CHUNK, rows // 2))


USUAL = Sizes()
