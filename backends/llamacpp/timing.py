"""Times of ggml's nodes (`clock.py`), and the phase of each: by the weights that it, or the node before it, reads.

Nodes run one at a time. Their shares and their sums can be compared between settings, but not with an ordinary pass,
which is shorter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge.backends.base import EngineConfig, Operator
from edge.backends.llamacpp import KV_VALUE_BYTES
from edge.backends.llamacpp.clock import Node, NodeClock
from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.backends.llamacpp.library import library
from edge.backends.operators import Piece, attention_flops, check_pass, pieces, repeat_pass
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.types import IntArray

_PHASES = (  # by the beginnings of names of weights, the longer ones first
    ("token_embd", "embed"), ("position_embd", "embed"), ("token_types", "embed"),
    ("attn_output", "output"), ("attn_q", "qkv"), ("attn_k", "qkv"), ("attn_v", "qkv"),
    ("ffn_gate", "gate-up"), ("ffn_up", "gate-up"), ("ffn_down", "down"), ("output", "head"),
)  # fmt: skip
_NORMS = ("RMS_NORM", "NORM", "L2_NORM")
_FUSED_ATTENTION = "FLASH_ATTN_EXT"
_ATTENTION = (_FUSED_ATTENTION, "SOFT_MAX")  # and products without weights
_WEIGHT = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.(?:weight|bias)")
_NODE = re.compile(r"(?:node_\d+|(cache_[a-z]+)_l(\d+)|(.*?)(?:-(\d+))?)(?: \(.*)?")
_LOADING = 0.5  # of progress


@dataclass(frozen=True)
class Place:
    """The part of the model that a node belongs to."""

    name: str
    phase: str
    layer: int | None


def time_operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """See `Backend.operators`. bytes: of weights in the file, and of KV rows that queries see.

    flops of products are those that ggml computes, in the last layer for the last token only.
    """
    check_pass(config, tokens, context, passes)
    clock = NodeClock(library())
    loading = progress and (lambda part: progress(_LOADING * part))
    rest = progress and (lambda part: progress(_LOADING + (1 - _LOADING) * part))
    engine = LlamaCppEngine(file, spec, replace(config, observes=False), loading, clock=clock)

    def run(ids: IntArray) -> list[Node]:
        clock.running = True
        engine.forward(ids)
        clock.running = False
        return clock.take()

    try:
        results = repeat_pass(engine, tokens, context, passes, run, rest)
    finally:
        engine.close()
    return list(_operators(results, spec, config, list(pieces(tokens, context, config.chunk))))


def _operators(
    passes: Sequence[Sequence[Node]], spec: ModelSpec, config: EngineConfig, parts: Sequence[Piece]
) -> Iterator[Operator]:
    attention = Attention(spec, config, parts)
    placed = [list(zip(nodes, find_places(nodes), strict=True)) for nodes in passes]
    for place in dict.fromkeys(place for _, place in placed[0]):
        each = [[node for node, at in nodes if at == place] for nodes in placed]
        seconds = float(np.median([sum(node.seconds for node in nodes) for nodes in each]))
        nodes = each[0]
        known = [node.bytes for node in nodes if node.bytes is not None]
        yield Operator(
            place.name, place.phase, place.layer, len(nodes), seconds,
            sum(known) if known else attention.bytes(nodes[0].op, place),
            sum(node.flops for node in nodes) or attention.flops(nodes[0].op, place),
        )  # fmt: skip


def find_places(nodes: Sequence[Node]) -> list[Place]:
    """The places of a pass's nodes, in order. A node that neither reads weights nor belongs to attention has the place
    of the last one that does."""
    places: list[Place] = []
    phase, layer = "other", None
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        label, named = _read_name(node)
        stem, of = _read_weight(node)
        found = next((phase for start, phase in _PHASES if stem.startswith(start)), None)
        if "norm" in stem:
            places.append(_place(stem, node, "norm", of))
            continue
        if node.op in _NORMS:
            at = _read_weight(following)[1] if following and named is None else named
            places.append(_place(label, node, "norm", at))
            continue
        if found:
            tied = stem == "token_embd" and node.op == "MUL_MAT"
            label, phase, layer = stem, "head" if tied else found, of
        elif node.op in _ATTENTION or node.op == "MUL_MAT":
            phase, layer = "attend", layer if named is None else named
        places.append(_place(label, node, phase, layer))
    return places


def _place(label: str, node: Node, phase: str, layer: int | None) -> Place:
    """Named like `attn q mul mat`, without repeated words."""
    words, op = (each.replace("_", " ") for each in (label, node.op.lower()))
    return Place(words if words.endswith(op) else f"{words} {op}".strip(), phase, layer)


def _read_name(node: Node) -> tuple[str, int | None]:
    """llama.cpp's name of a node and the layer in it: `ffn_inp-3`, `cache_k_l3 (view)`; `node_17` has neither."""
    match = _NODE.fullmatch(node.name)
    if match is None:
        return node.name, None
    layer = match[2] or match[4]
    return match[1] or match[3] or "", None if layer is None else int(layer)


def _read_weight(node: Node) -> tuple[str, int | None]:
    """`blk.3.ffn_up.weight`: ffn_up, 3."""
    match = _WEIGHT.fullmatch(node.weight)
    return (match[2], None if match[1] is None else int(match[1])) if match else ("", None)


class Attention:
    """Bytes and operations of attention in a pass of these pieces; None if windows are unknown."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, parts: Sequence[Piece]) -> None:
        self._spec, self._parts = spec, parts
        self._row_bytes = int(spec.kv_values_per_row / spec.layers * KV_VALUE_BYTES[config.kv_dtype])

    def bytes(self, op: str, place: Place) -> int | None:
        """Keys and values, or those that one of two products reads."""
        window = self._window(place)
        if window is None or op not in (_FUSED_ATTENTION, "MUL_MAT"):
            return None
        rows = sum(part.rows(window) for part in self._parts)
        return rows * self._row_bytes // (1 if op == _FUSED_ATTENTION else 2)

    def flops(self, op: str, place: Place) -> int | None:
        """If it is one node; two separate products count by their shapes."""
        window = self._window(place)
        width = self._spec.heads * self._spec.head_dim
        return None if window is None or op != _FUSED_ATTENTION else attention_flops(width, window, self._parts)

    def _window(self, place: Place) -> int | None:
        if place.phase != "attend" or place.layer is None:
            return None
        if self._spec.network:
            return self._spec.network.windows[place.layer]
        return None if self._spec.window else 0
