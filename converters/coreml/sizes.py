"""The sizes of a Core ML program, in which nothing may vary."""

from __future__ import annotations

from dataclasses import dataclass

from edge.backends.onnx.npu.form import CHUNK, ROWS
from edge.model.spec import ModelSpec
from edge.plan.checks import check_count, least_rows


@dataclass(frozen=True)
class FixedSizes:
    """rows: of the KV cache. chunk: tokens of a prompt that run at once."""

    rows: int
    chunk: int


@dataclass(frozen=True)
class Sizes:
    """Sizes as a user states them; None: the usual ones."""

    rows: int | None = None
    chunk: int | None = None

    def fitted(self, spec: ModelSpec) -> FixedSizes:
        """For this model. Raises InputError for impossible sizes."""
        known = f" ({spec.context} positions is all it knows)"
        check_count("--max-kv-size", self.rows, least_rows(0), spec.context, known)
        rows = self.rows or min(ROWS, spec.context)
        check_count("--prefill-step-size", self.chunk, 2, rows // 2, " (half of the KV rows)")
        return FixedSizes(rows, self.chunk or min(CHUNK, rows // 2))


USUAL = Sizes()
