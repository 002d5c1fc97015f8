"""Times of the graph's nodes, from ONNX Runtime's own profiler.

The profiler writes a line for every node of every run, in whole microseconds, and slows a run a little: by some
microseconds a node, which the nodes' times do not contain. Nodes' names say what phase and layer they belong to
(`Nodes.begin` of the writer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig, Operator
from edge.backends.onnx.engine import OnnxEngine
from edge.backends.onnx.folders import check_folder
from edge.backends.onnx.graph.forms import Floats
from edge.backends.onnx.graph.layout import Layout, make_layout
from edge.backends.onnx.kv import row_bytes
from edge.backends.onnx.memory import MOST_AT_ONCE
from edge.backends.operators import Piece, attention_flops, check_pass, pieces, repeat_pass
from edge.devices.output import work_folder
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network

_NAME = re.compile(r"([a-z-]+)(?:\.(\d+))?/.*_kernel_time")
_END_OF_RUN = "model_run"
_ATTENTION = "GroupQueryAttention"
_QUANTIZED_PRODUCTS = {"MatMulNBits", "MatMulBnb4", "DynamicQuantizeMatMul"}
_PRODUCTS = {*_QUANTIZED_PRODUCTS, "FusedMatMul", "MatMul", "Gemm"}
_MATRICES = {"output": ("attn_output",), "gate-up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",), "qkv": ("qkv",)}
_TABLES = ("token_embd.", "position_embd")
_LOADING = 0.5  # of progress


@dataclass(frozen=True)
class Node:
    """One run of one node. flops: from its shapes, 0 for anything but products."""

    op: str
    phase: str
    layer: int | None
    seconds: float
    flops: int

    @property
    def key(self) -> tuple[str, int | None]:
        return f"{self.phase} {self.op}", self.layer


def time_operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """See `Backend.operators`. bytes: of weights as they were converted, and of KV rows.

    flops count what is computed: that is more than the model has where means are appended to inputs, and less in the
    last layer, behind whose attention only the last token goes on.
    """
    check_pass(config, tokens, context, passes)
    parts = list(pieces(tokens, context, min(config.chunk, MOST_AT_ONCE)))
    try:
        with work_folder() as folder:
            runs = _traced_runs(file, spec, config, tokens, context, passes, folder, progress)
    except OSError as error:
        raise EngineError(f"ONNX Runtime's profile cannot be written ({error.strerror or error})") from None
    wanted = passes * len(parts)
    if len(runs) < wanted:
        raise EngineError(f"ONNX Runtime's profile has {len(runs)} runs instead of {wanted}: choose fewer passes")
    last = runs[len(runs) - wanted :]
    grouped = [[node for run in last[at : at + len(parts)] for node in run] for at in range(0, wanted, len(parts))]
    return list(_operators(grouped, Bytes(file, spec, config, parts), spec, parts))


def _traced_runs(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, tokens: int, context: int, passes: int, folder: Path,
    progress: Callable[[float], None] | None,
) -> list[list[Node]]:  # fmt: skip
    """The nodes of all runs, in their order."""
    loading = progress and (lambda part: progress(_LOADING * part))
    rest = progress and (lambda part: progress(_LOADING + (1 - _LOADING) * part))
    engine = OnnxEngine(file, spec, config, loading, trace=folder / "trace")
    try:
        repeat_pass(engine, tokens, context, passes, engine.forward, rest)
        trace = engine.end_trace()
    finally:
        engine.close()
    runs: list[list[Node]] = [[]]
    for event in json.loads(trace.read_bytes()):
        if event["name"] == _END_OF_RUN:
            runs.append([])
        elif event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[-1].append(_node(event, runs[-1][-1] if runs[-1] else None))
    return runs[:-1]


def _node(event: Mapping[str, Any], before: Node | None) -> Node:
    """Nodes that ONNX Runtime fused have no name: they get the phase and layer of the node before them."""
    details, named = event["args"], _NAME.fullmatch(event["name"])
    op, phase, layer = str(details["op_name"]), before.phase if before else "other", before.layer if before else None
    if named:
        phase, layer = named[1], int(named[2]) if named[2] else None
    flops = 0
    if op in _PRODUCTS:
        inputs, outputs = (_first_shape(details[f"{each}_type_shape"]) for each in ("input", "output"))
        flops = 2 * inputs[-1] * int(np.prod(outputs))
    return Node(op, phase, layer, event["dur"] / 1e6, flops)


def _first_shape(shapes: Sequence[Mapping[str, list[int]]]) -> list[int]:
    """Each is given by the name of its type."""
    (shape,) = shapes[0].values()
    return shape


def _operators(
    passes: Sequence[Sequence[Node]], weights: Bytes, spec: ModelSpec, parts: Sequence[Piece]
) -> Iterator[Operator]:
    windows = find_network(spec).windows
    for key in dict.fromkeys(node.key for node in passes[0]):
        each = [[node for node in nodes if node.key == key] for nodes in passes]
        node, flops = each[0][0], sum(node.flops for node in each[0])
        if node.op == _ATTENTION and node.layer is not None:
            flops = attention_flops(spec.heads * spec.head_dim, windows[node.layer], parts)
        yield Operator(
            key[0], node.phase, node.layer, len(each[0]), float(np.median([sum(n.seconds for n in ns) for ns in each])),
            weights.of(node), flops or None,
        )  # fmt: skip


class Bytes:
    """Bytes that nodes read in a pass of these pieces, computed from shapes."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, parts: Sequence[Piece]) -> None:
        self._layout = make_layout(file, spec) if file.folder is None else check_folder(file, spec)
        self._head = "token_embd" if spec.tied_head else "output"
        self._row_bytes = row_bytes(spec, config.kv_dtype)
        self._windows, self._parts = find_network(spec).windows, parts

    def of(self, node: Node) -> int | None:
        """None for nodes that only move activations."""
        if node.op == _ATTENTION and node.layer is not None:
            return sum(self._row_bytes * part.rows(self._windows[node.layer]) for part in self._parts)
        if node.phase == "embed" and node.op.startswith("Gather"):
            tables = [place for name, place in self._layout.places.items() if name.startswith(_TABLES)]
            rows = self._layout.matrices["token_embd"].rows
            return sum(part.count for part in self._parts) * sum(place.nbytes for place in tables) // rows
        if node.op not in _PRODUCTS:
            return None
        start = "" if node.layer is None else f"blk.{node.layer}."
        names = (start + name for name in _MATRICES.get(node.phase, (self._head,)))
        found = (self._matrix(self._layout, name, node.op) for name in names if name in self._layout.matrices)
        return len(self._parts) * sum(found) or None

    @staticmethod
    def _matrix(layout: Layout, name: str, op: str) -> int:
        """0 if another kind of node multiplies it. Floats of any size are float32 once they are loaded."""
        matrix = layout.matrices[name]
        if isinstance(matrix.form, Floats):
            return 4 * matrix.rows * matrix.columns if op not in _QUANTIZED_PRODUCTS else 0
        arrays = matrix.form.arrays(matrix.rows, matrix.columns)
        return sum(layout.places[f"{name}.{each}"].nbytes for each in arrays) if op in _QUANTIZED_PRODUCTS else 0
