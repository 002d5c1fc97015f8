"""LLM.int8() (arXiv:2208.07339): keep the few input channels with outliers in float, since they spoil the rounding of
the others.

Channels whose inputs exceed a threshold in calibration stay float; the others are multiplied in int8, with a scale for
every token and one for every row of the matrix.
"""

from __future__ import annotations

import numpy as np

from edge.types import FloatArray

THRESHOLD = 6.0  # the paper's
MOST = 0.1  # of all channels: the paper finds a thousandth, but some models' inputs are larger throughout


def outliers_of(largest: FloatArray, threshold: float = THRESHOLD) -> tuple[int, ...]:
    """Channels that stay float; the largest, if there are too many. largest: max |input| of each, float32 [columns]."""
    chosen = np.argsort(-largest, kind="stable")[: int(MOST * largest.size)]
    return tuple(sorted(int(index) for index in chosen if largest[index] > threshold))
