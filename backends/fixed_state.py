"""The fixed state of layers that sum up all tokens in a fixed number of values.

Tokens cannot be removed from such a state: it returns to an earlier point of the text only by a snapshot, which
`KVState.tail` carries. An engine that verifies drafts keeps their inputs, and adds accepted tokens to the state later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.errors import EngineError, InputError
from edge.types import FloatArray


class FixedState:
    """The states of all layers, concatenated, float32, zeros before the first token.

    whole: whether the state matches the tokens in use; False while the snapshot of restored rows is missing.
    """

    def __init__(
        self, sizes: Sequence[int], values: FloatArray | None = None,
        apply: Callable[[int], object] | None = None, most: int = 1,
    ) -> None:  # fmt: skip
        """sizes: of each layer's state, 0 for layers without one. values: memory for them, provided by the engine.
        apply: adds the first tokens of the last pass, at most `most`, to the state, from inputs that the engine keeps.
        """
        self._apply, self._most, self._drafted = apply, most, 0
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
        self.whole, self._drafted = True, 0

    def at_once(self, count: int) -> int:
        """The most of `count` tokens that a pass may `draft`."""
        return min(count, self._most)

    def draft(self, count: int) -> None:
        """Record that a pass has run `count` tokens that are not in the state yet. `settle` adds the remaining ones."""
        self._drafted = count

    def forget(self, count: int) -> bool:
        """Forget the last `count` tokens. Returns False if the state contains them already."""
        if count > self._drafted:
            return False
        self._drafted -= count
        return True

    def settle(self) -> None:
        """Add the drafted tokens that have not been forgotten to the state."""
        count, self._drafted = self._drafted, 0
        if count and self._apply:
            self._apply(count)

    def prepare(self) -> None:
        """Announce a pass that changes the state."""
        if not self.whole:
            raise EngineError("rows were appended to the KV cache without their tail, and no token can follow them")
        self.settle()

    def save(self) -> bytes | None:
        """A snapshot; None if the state is not whole."""
        self.settle()
        return self._read().tobytes() if self.whole else None

    def check(self, saved: bytes | memoryview) -> None:
        """Raise InputError for a snapshot of another size, or with values that are not finite."""
        if len(saved) != self.nbytes or not np.isfinite(np.frombuffer(saved, np.float32)).all():
            raise InputError("the saved state is damaged")

    def restore(self, saved: bytes | memoryview | None) -> None:
        """Restore a snapshot. None: it follows with the next rows."""
        self.whole, self._drafted = saved is not None, 0
        if saved is not None:
            self._write(np.frombuffer(saved, np.float32))

    def _read(self) -> FloatArray:
        return self.values

    def _write(self, values: FloatArray) -> None:
        self.values[:] = values
