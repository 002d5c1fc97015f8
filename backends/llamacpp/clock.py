"""Times each node of ggml's graph: if its callback observes every node, ggml computes them one at a time.

The time runs from the end of the first call for a node to the beginning of the second, so it excludes this file's own
work. It includes the pauses between nodes, which an ordinary pass does not have: all nodes together take longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from typing import Any

from edge.backends.llamacpp.tensors import Reader, Tensor

_MOVES = (b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE")  # nodes that only name other tensors
_CHOOSES = b"MUL_MAT_ID"  # among experts: the weights that it reads depend on values
_PRODUCTS = (b"MUL_MAT", _CHOOSES)
_WEIGHTS = (b".weight", b".bias")  # ends of the names of the file's tensors


@dataclass(frozen=True)
class Node:
    """A node that was computed. weight: the file's tensor that it reads, or "".

    bytes: the part of that tensor that it reads; None without such a tensor, or if unknown.
    flops: 2 · m · n · k of a product, else 0.
    """

    name: str
    op: str
    weight: str
    seconds: float
    bytes: int | None
    flops: int


class NodeClock:
    """`running` switches it on. It owns `callback`, so it must live as long as the context."""

    def __init__(self, low_level: Any) -> None:
        self.callback = low_level.ggml_backend_sched_eval_callback(self._receive)
        self.running = False
        self._reader = Reader(low_level, "choose another --backend")
        self._nodes: list[Node] = []
        self._error: BaseException | None = None
        self._started = 0

    def take(self) -> list[Node]:
        """The nodes since the last call, in order. Raises an error that occurred in the callback."""
        nodes, error, self._nodes, self._error = self._nodes, self._error, [], None
        if error is not None:
            raise error
        return nodes

    def _receive(self, tensor: int, asks: bool, _user_data: int | None) -> bool:
        """asks: whether this is a node's first call, which returns whether to observe it. The second returns True:
        False would end the pass.
        """
        now = time.perf_counter_ns()
        try:
            if not asks:
                self._nodes.append(self._node(tensor, (now - self._started) / 1e9))
                return True
            if not self.running:
                return False
            self._reader.check(tensor)
            wanted = self._reader.operation(tensor) not in _MOVES
        except BaseException as error:  # it cannot pass through C code: `take` raises it
            self._error = self._error or error
            return not asks
        self._started = time.perf_counter_ns()
        return wanted

    def _node(self, address: int, seconds: float) -> Node:
        tensor, op = Tensor.from_address(address), self._reader.operation(address)
        sources = [(each, Tensor.from_address(each)) for each in tensor.src if each]
        flops = 2 * sources[0][1].ne[0] * prod(tensor.ne) if op in _PRODUCTS else 0
        weight, size = "", None
        for each, source in sources:
            if source.name.endswith(_WEIGHTS):
                weight, size = source.name.decode(errors="replace"), self._reader.nbytes(each)
                if op == b"GET_ROWS":
                    size = size // source.ne[1] * prod(tensor.ne[1:])
                break
        return Node(
            tensor.name.decode(errors="replace"), op.decode(), weight, seconds, None if op == _CHOOSES else size, flops
        )  # fmt: skip
