"""A table with a row for each token of the vocabulary. It may be the largest part of a model, and stays in the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge.backends.checks import check_whole
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.types import AnyArray, FloatArray, IntArray

DEQUANTIZE_BYTES = 8 << 20  # gguf's module, and what it makes on the way
_AT_ONCE = 16  # rows that are dequantized together, which takes several times their memory


class TokenTable:
    """A matrix of the file whose rows are read on demand; none stays in memory."""

    def __init__(self, file: GGUFFile, tensor: str) -> None:
        self._info, self._path = file.tensors[tensor], file.path
        self._file = file.path.open("rb", buffering=0)
        self.row_bytes = self._info.nbytes // self._info.shape[-1]

    def read(self, tokens: IntArray) -> Iterator[tuple[slice, FloatArray]]:
        """Yield the rows of a few tokens at a time: their slice of `tokens`, and float32 [n, columns].

        Raises EngineError if the file has become shorter.
        """
        for at in range(0, tokens.size, _AT_ONCE):
            part = slice(at, min(at + _AT_ONCE, tokens.size))
            yield part, dequantize(self._read_rows(tokens[part]), self._info.type) * np.float32(self._info.factor)

    def _read_rows(self, tokens: IntArray) -> AnyArray:
        """uint8 [n, row bytes]."""
        data = np.empty((tokens.size, self.row_bytes), np.uint8)
        for row, token in zip(data, tokens.tolist(), strict=True):
            self._file.seek(self._info.offset + token * self.row_bytes)
            check_whole(self._path, self._file.readinto(row.data), self.row_bytes)
        return data

    def close(self) -> None:
        self._file.close()
