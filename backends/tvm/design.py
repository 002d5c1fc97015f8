"""Everything that a compiled pass depends on, as data. TVM is not needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.blocks import BLOCKS, IntegerBlock
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.packing.shape import Shape
from edge.backends.tvm.targets import Target, choose_target, with_tuning
from edge.values import parse


@dataclass(frozen=True)
class Design:
    """The parts of the key of a compiled pass.

    variants, head, embedding, positions: names of block types; positions is None unless they are learned.
    exact: all products are in float32, rather than with activations quantized to 8 bits.
    timed: each thread records the times of its phases (`cpu/timing.py`).
    lora: matrices may have adapters, of any rank (`cpu/phases/adapt.py`).
    exported: for the C runtime (edge/exporting/runtime), which runs passes of several targets in one library: the entry
    is `edge_run_TARGET`, with C's calling convention, waiting calls edge_doze, waking edge_wake, and no weights are
    streamed. shared: units of it that another pass of the library has, by the names of its functions.
    """

    shape: Shape
    variants: dict[str, list[tuple[str, ...]]]
    embedding: str
    positions: str | None
    head: str
    kv_dtype: str
    exact: bool
    target: Target
    timed: bool = False
    lora: bool = False
    exported: bool = False
    shared: dict[str, str] = field(default_factory=dict)

    def symbol(self, name: str) -> str:
        """The name of a function of C, unique within an app: of `run`, or of a unit such as step_qkv."""
        if name in self.shared:
            return self.shared[name]
        return f"edge_{name}_{self.target.name}" if self.exported else f"edge_{name}"

    @classmethod
    def of(cls, layout: PackedLayout, kv_dtype: str, target: Target) -> Design:
        """float32 KV rows select the exact mode."""
        embedding, positions, head = (_name(layout, name) for name in ("token_embd", "position_embd", layout.head))
        assert embedding is not None
        assert head is not None
        exact = kv_dtype == "f32"
        return cls(layout.shape, layout.variants, embedding, positions, head, kv_dtype, exact, target)

    @classmethod
    def here(cls, layout: PackedLayout, config: EngineConfig) -> Design:
        """Of a run on this machine."""
        design = cls.of(layout, config.kv_dtype, with_tuning(choose_target(), config.tuning))
        return replace(design, lora=config.lora_rank > 0)

    def to_json(self) -> str:
        fields: dict[str, Any] = asdict(self)
        fields["target"]["flags"] = sorted(self.target.flags)
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Design:
        fields = json.loads(text)
        return cls(**fields | {"shape": parse(Shape, fields["shape"]), "target": Target(**fields["target"])})


def low_rank_blocks(variants: Sequence[Sequence[str]], *, exact: bool) -> tuple[str, str]:
    """How an adapter's A and B are stored, for matrices with these block types: block types, but for "I8", signed bytes
    with a float32 scale for each row of B.

    A is multiplied with quantized activations where there are any: those of matrices of integers.
    """
    if exact:
        return "F32", "F32"
    integers = any(isinstance(BLOCKS[name], IntegerBlock) for blocks in variants for name in blocks)
    return ("Q8_0", "I8") if integers else ("F16", "F16")


def _name(layout: PackedLayout, matrix: str) -> str | None:
    place = layout.places.get(matrix)
    return place.block.name if place and place.block else None
