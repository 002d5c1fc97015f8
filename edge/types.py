"""Shared types: arrays, progress, and the granularity at which KV rows are evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
AnyArray: TypeAlias = npt.NDArray[Any]

Progress: TypeAlias = Callable[[float], None]  # is called with the fraction of a task that is done

Granularity: TypeAlias = Literal["token", "layer", "head"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "layer", "head")  # from coarse to fine
