"""The design of a compiled pass: everything that it depends on, as data. TVM is not needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.blocks import BLOCKS, PACKINGS, IntegerBlock
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.packing.shape import Shape
from edge.backends.tvm.targets import Target, choose_target, with_tuning
from edge.records import dataclass
from edge.values import parse


@dataclass(frozen=True)
class Design:
    """The key of a compiled pass.

    exported: for the C runtime (edge/apps/runtime), which runs passes of several targets in one library: the entry
    is `edge_run_TARGET`, with C's calling convention, waiting calls edge_doze, waking edge_wake, and no weights are
    streamed. part: the encoder that the pass belongs to, such as eyes, beside the model's own pass in that library.
    """

    shape: Shape
    variants: dict[str, list[tuple[str, ...]]]  # block types by group of matrices
    embedding: str  # block type; empty without an embedding
    positions: str | None  # block type of learned positions, if any
    token_types: str | None  # likewise of token types
    head: str  # block type; empty without an embedding, and so without a head
    kv_dtype: str
    exact: bool  # all products in float32, not with activations quantized to 8 bits
    target: Target
    timed: bool = False  # each thread records the times of its phases (`cpu/timing.py`)
    lora: bool = False  # matrices may have adapters, of any rank (`cpu/phases/adapt.py`)
    pages: bool = False  # a step may read some pages of rows (`cpu/kernels/pages.py`)
    taps: bool = False  # inputs of some layers are kept (`EngineConfig.taps`)
    batches: list[int] = field(default_factory=list)  # numbers of tokens, each run as if alone, that it has code for
    exported: bool = False
    shared: dict[str, str] = field(default_factory=dict)  # symbols of units that another pass of the library has
    like: str = ""  # the target of the pass that has all units but a chunk's attention; none if empty
    part: str = ""

    def symbol(self, name: str) -> str:
        """A C function name, unique within an app: of `run`, or of a unit such as step_qkv."""
        if name in self.shared:
            return self.shared[name]
        target, part = self.target.name if self.owns(name) else self.like, f"{self.part}_" * bool(self.part)
        return f"edge_{part}{name}_{target}" if self.exported else f"edge_{name}"

    def owns(self, name: str) -> bool:
        """Whether `run` or a unit is compiled for this design, and not another pass's of the library."""
        return name not in self.shared and (not self.like or name.startswith(("run", "chunk_attend")))

    @classmethod
    def of(cls, layout: PackedLayout, kv_dtype: str, target: Target) -> Design:
        """The design for a layout. float32 KV rows select the exact mode."""
        names = ("token_embd", "position_embd", "token_types", layout.network.head)
        embedding, positions, token_types, head = (_name(layout, name) for name in names)
        exact = kv_dtype == "f32"
        return cls(
            layout.shape, layout.variants, embedding or "", positions, token_types, head or "", kv_dtype, exact, target
        )

    @classmethod
    def here(cls, layout: PackedLayout, config: EngineConfig) -> Design:
        """The design of a run on this machine."""
        design = cls.of(layout, config.kv_dtype, with_tuning(choose_target(), config.tuning))
        return replace(
            design, lora=config.lora_rank > 0, pages=config.reads > 0, taps=bool(config.taps),
            batches=batch_sizes(config, design),
        )  # fmt: skip

    @property
    def estimates(self) -> bool:
        """Whether a step can bound the logits from a part of the head, to compute only the largest ones."""
        block = PACKINGS.get(self.head)
        return isinstance(block, IntegerBlock) and bool(block.halves) and not self.exact

    @property
    def streams(self) -> bool:
        """Whether a pass can run with part of the weights in memory."""
        return self.target.system == "linux" and not self.exported

    @property
    def most_tokens(self) -> int:
        """The most tokens that are multiplied with a tile of weights at once."""
        # In the exact mode, 8 would take half a minute to compile.
        return min(2, self.target.gemm_tokens) if self.exact else self.target.gemm_tokens

    def to_json(self) -> str:
        fields: dict[str, Any] = asdict(self)
        fields["target"]["flags"] = sorted(self.target.flags)
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Design:
        fields = json.loads(text)
        return cls(**fields | {"shape": parse(Shape, fields["shape"]), "target": Target(**fields["target"])})


def batch_sizes(config: EngineConfig, design: Design) -> list[int]:
    """The values of `Design.batches`. For sequences: powers of two within the registers, since code for fewer tokens
    does less work. For drafts: as many tokens as a chunk multiplies at once."""
    sizes = {min(size, design.most_tokens) for size in (2, 4, 8, 16) if size < 2 * config.sequences}
    return sorted(sizes | ({design.most_tokens} if config.drafts else set()))


def low_rank_blocks(variants: Sequence[Sequence[str]], *, exact: bool) -> tuple[str, str]:
    """The storage of an adapter's A and B for matrices with these block types: block types, or "I8", int8 with a
    float32 scale per row of B.

    If the matrices are integers, activations are quantized, and A is multiplied by them.
    """
    if exact:
        return "F32", "F32"
    integers = any(isinstance(BLOCKS[name], IntegerBlock) for blocks in variants for name in blocks)
    return ("Q8_0", "I8") if integers else ("F16", "F16")


def _name(layout: PackedLayout, matrix: str) -> str | None:
    place = layout.places.get(matrix)
    return place.block.name if place and place.block else None
