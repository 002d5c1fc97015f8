"""llama.cpp's attention scores and the cells of its rows, read by its evaluation callback.

llama.cpp calls back for every node of its graph before it runs it. We observe the softmax of each layer's attention, in
observed passes only. Its columns are *cells*. llama.cpp chooses the cell of each new row and fills the holes of evicted
rows; the index tensor of the node that writes keys names the chosen cells.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge.backends.llamacpp.tensors import NAME, Reader, Tensor
from edge.errors import UnsupportedError
from edge.types import AnyArray, FloatArray, IntArray

_SOFTMAX, _KEY_CELLS = b"kq_soft_max", b"attn_inp_k_idxs"  # beginnings of the names of tensors
_F32, _I64 = 0, 27  # ggml_type


class Scores:
    """The attention that every cell has received, averaged over all layers and heads.

    Each pass: `begin`, `llama_decode`, `finish`. The object owns `callback`, so it must live as long as the context.
    """

    def __init__(self, low_level: Any, layers: int, cells: int) -> None:
        self.by_cell: FloatArray = np.zeros(cells, np.float32)
        self.callback = low_level.ggml_backend_sched_eval_callback(self._receive)
        self._pass: FloatArray = np.zeros(cells, np.float32)
        self._reader, self._layers = Reader(low_level), layers
        self._queries = self._seen = 0
        self._average: FloatArray | None = None
        self._written: IntArray | None = None
        self._error: BaseException | None = None

    def begin(self, queries: int, *, votes: bool, visible: int) -> None:
        """Announce a pass whose last `queries` tokens are observed; the very last will see `visible` rows.

        votes: count the queries that pay a cell more than their average.
        """
        self._queries, self._seen, self._written, self._error = queries, 0, None, None
        sees = np.arange(visible - queries + 1, visible + 1, dtype=np.float32)
        self._average = np.reciprocal(sees)[:, None] if votes else None
        self._pass[:] = 0

    def finish(self) -> IntArray:
        """Add the attention paid in the pass to `by_cell`; return the cells of the pass's tokens.

        Raises an error that occurred in the callback, and UnsupportedError if llama.cpp did not show the tensors.
        """
        queries, self._queries = self._queries, 0
        if self._error is not None:
            raise self._error
        if self._written is None:
            raise UnsupportedError("llama.cpp does not show where it puts the KV rows of this model")
        if queries and self._seen != self._layers:
            raise UnsupportedError(f"llama.cpp shows the attention of {self._seen} of {self._layers} layers")
        self.by_cell[self._written] = 0  # the attention of evicted rows
        self.by_cell += self._pass
        return self._written

    def _receive(self, tensor: int, asks: bool, _user_data: int | None) -> bool:
        """The callback. asks: the node's first call, whose result says whether to observe it. The second returns True:
        False would end the pass."""
        try:
            if asks:
                return bool(self._queries or self._written is None) and self._wants(tensor)
            self._add(Tensor.from_address(tensor))
        except BaseException as error:  # it cannot pass through C code: `finish` raises it
            self._error = self._error or error
        return not asks

    def _wants(self, tensor: int) -> bool:
        self._reader.check(tensor)
        if self._written is None and self._reader.operation(tensor) == b"SET_ROWS":
            self._read_cells(Tensor.from_address(tensor).src[1])
        return bool(self._queries) and ctypes.string_at(tensor + NAME, len(_SOFTMAX)) == _SOFTMAX

    def _read_cells(self, address: int) -> None:
        """Read the cells. Indices are an input, so they are known before the node is computed."""
        indices = Tensor.from_address(address)
        if indices.name == _KEY_CELLS:
            self._written = _values(indices, _I64, np.int64).reshape(-1).astype(np.int32)

    def _add(self, softmax: Tensor) -> None:
        """Accumulate a softmax [1, heads, tokens, cells], whose memory is llama.cpp's and valid until the callback
        returns."""
        shares = _values(softmax, _F32, np.float32)[0]
        observed = shares[:, -self._queries :]
        if self._average is not None:
            observed = observed > self._average
        self._pass[: shares.shape[-1]] += observed.sum(axis=(0, 1)) / np.float32(len(shares) * self._layers)
        self._seen += 1


def _values(tensor: Tensor, kind: int, dtype: type[Any]) -> AnyArray:
    """A view of the tensor's memory, the outermost dimension first."""
    shape, size = tuple(tensor.ne)[::-1], np.dtype(dtype).itemsize
    strides = tuple(int(np.prod(shape[place + 1 :])) * size for place in range(4))
    if tensor.type != kind or tuple(tensor.nb)[::-1] != strides or not tensor.data:
        raise UnsupportedError("llama.cpp shows attention in a form that is not understood")
    memory = (ctypes.c_char * (strides[0] * shape[0])).from_address(tensor.data)
    return np.frombuffer(memory, dtype).reshape(shape)
