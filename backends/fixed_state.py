"""The state of layers that sum up all tokens in a fixed number of values, whatever the length of the text.

No token can be taken back out of such a state: it returns to an earlier end of the text only by a snapshot, which
`KVState.tail` carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.errors import EngineError, InputError
from edge.types import FloatArray


class FixedState:
    """values: float32, those of all layers one behind the other, zeros before the first token.

    whole: whether the state is that of the tokens in use: not while a snapshot has yet to follow restored rows.
    """

    def __init__(self, sizes: Sequence[int], values: FloatArray | None = None) -> None:
        """sizes: of each layer's state, 0 for layers without one. values: memory of an engine for them."""
        ends = np.cumsum(sizes)
        self._places = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
        self.values: FloatArray = np.zeros(int(ends[-1]), np.float32) if values is None else values
        self.whole = True

    def __bool__(self) -> bool:
        return self.values.size > 0

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def of(self, layer: int) -> FloatArray:
        """A view, float32 [size]."""
        return self.values[self._places[layer]]

    def clear(self) -> None:
        self.values[:] = 0
        self.whole = True

    def prepare(self) -> None:
        """A pass is about to change the state."""
        if not self.whole:
            raise EngineError("rows were appended to the KV cache without their tail, and no token can follow them")

    def save(self) -> bytes | None:
        """None if it is not whole."""
        return self.values.tobytes() if self.whole else None

    def check(self, saved: bytes | memoryview) -> None:
        """Raises InputError for a snapshot of another size, or with values that are not finite."""
        if len(saved) != self.nbytes or not np.isfinite(np.frombuffer(saved, np.float32)).all():
            raise InputError("the saved state is damaged")

    def restore(self, saved: bytes | memoryview | None) -> None:
        """None: a snapshot will come with the next rows."""
        self.whole = saved is not None
        if saved is not None:
            self.values[:] = np.frombuffer(saved, np.float32)
