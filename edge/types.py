"""Shared types: arrays, and the granularity at which KV rows are evicted."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
AnyArray: TypeAlias = npt.NDArray[Any]

Granularity: TypeAlias = Literal["token", "layer", "head"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "layer", "head")  # from coarse to fine
