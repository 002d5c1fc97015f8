"""The surroundings of a core that runs: its place in the pass, and the engine's parts that all cores share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edge.backends.reference.kv import ReferenceKV
from edge.model.structure.spec import ModelSpec
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class At:
    """A layer of a pass, and the rows and positions of the tokens that run. positions: [n], or [n, components].

    begins, sees: the first and the last row that each token sees, [n]. inputs: the tokens' vectors for this layer
    (`PerLayerInput`), [n, size]. given: states (`NextToken`), [n, hidden], or features (`Features`), [n, size].
    """

    layer: int
    rows: slice = field(default_factory=lambda: slice(0))
    positions: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    sees: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    inputs: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    given: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    begins: IntArray | int = 0

    def name(self, tensor: str) -> str:
        return f"blk.{self.layer}.{tensor}"


class Context(Protocol):
    """The engine as cores see it. weights: float32, by the names of `find_tensors`."""

    spec: ModelSpec
    kv: ReferenceKV
    weights: dict[str, FloatArray]
    across: dict[int, tuple[FloatArray, FloatArray]]  # of layers with cross attention: see `CrossEngine.crossed`
    joined: FloatArray  # by `Features`, [n, 2 · hidden]

    def project(self, x: FloatArray, at: At, name: str) -> FloatArray:
        """The product with a matrix of a layer, its adapter and its bias."""
        ...

    def norm(self, x: FloatArray, name: str) -> FloatArray: ...
