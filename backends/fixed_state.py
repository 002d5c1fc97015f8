"""The fixed state of layers that sum up all tokens in a fixed number of values.

Tokens cannot be removed from such a state: it returns to an earlier point of the text only by a snapshot, which
`KVState.tail` carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.errors import EngineError, InputError
from edge.types import FloatArray


class FixedState:
    """The states of all layers, concatenated, float32, zeros before the first token.

    whole: whether the state matches the tokens in use; False while the snapshot of restored rows is missing.
    """

    def __init__(self, sizes: Sequence[int], values: FloatArray | None = None) -> None:
        """sizes: of each layer's state, 0 for layers without one. values: memory for them, provided by the engine."""
        ends = np.cumsum(sizes)
        self._places = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
        self.values: FloatArray = np.zeros(int(ends[-1]), np.float32) if values is None else values
        self.whole = True

    def __bool__(self) -> bool:
        return self.nbytes > 0

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def of(self, layer: int) -> FloatArray:
        """A layer's state, a view, float32 [size]."""
        return self.values[self._places[layer]]

    def clear(self) -> None:
        self._write(np.zeros(self.nbytes // 4, np.float32))
        self.whole = True

    def prepare(self) -> None:
        """Announce a pass that changes the state."""
        if not self.whole:
            raise EngineError("rows were appended to the KV cache without their tail, and no token can follow them")

    def save(self) -> bytes | None:
        """A snapshot; None if the state is not whole."""
        return self._read().tobytes() if self.whole else None

    def check(self, saved: bytes | memoryview) -> None:
        """Raise InputError for a snapshot of another size, or with values that are not finite."""
        if len(saved) != self.nbytes or not np.isfinite(np.frombuffer(saved, np.float32)).all():
            raise InputError("the saved state is damaged")

    def restore(self, saved: bytes | memoryview | None) -> None:
        """Restore a snapshot. None: it follows with the next rows."""
        self.whole = saved is not None
        if saved is not None:
            self._write(np.frombuffer(saved, np.float32))

    def _read(self) -> FloatArray:
        return self.values

    def _write(self, values: FloatArray) -> None:
        self.values[:] = values
