"""PyramidKV: SnapKV with more rows for the lower layers.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv:2406.02069. Low
layers spread their attention, high ones concentrate it on a few rows. So the number of rows, apart from the observed
window, falls linearly from the first layer to the last, at the same total.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.errors import InputError
from edge.kv.policy import KVView, Needs
from edge.kv.snapkv import SnapKV
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """The PyramidKV policy."""

    slope: float = 20  # the last layer gets 1 / slope of the mean; 20 in the paper, 1 is SnapKV
    name: ClassVar[str] = "pyramidkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slope < 1:
            raise InputError(f"slope must be 1 or more, not {self.slope}")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window, uneven="layer")

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[AnyArray, int]:
        layers, heads, _ = scores.shape
        most = min(view.longest, view.length)  # the pyramid rises while its first layers fill
        rows = pyramid(layers, budget, min(max(self.window, self.sinks), budget), self.slope, most)
        return np.repeat(rows, heads), self.window


def pyramid(layers: int, mean: int, window: int, slope: float, most: int) -> IntArray:
    """Rows for each layer, int32 [layers]: `window` plus a linearly falling number, at most `most`."""
    least = (mean - window) / slope
    reach = min(mean - window - least, most - mean) if layers > 1 else 0.0
    return (mean + np.linspace(reach, -reach, layers)).astype(np.int32)
