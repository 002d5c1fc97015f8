"""What a compiled pass depends on, as data. No TVM is needed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from edge.backends.tvm.blocks.base import Block
from edge.backends.tvm.layout import Layout, Shape
from edge.backends.tvm.targets import Target


@dataclass(frozen=True)
class Design:
    """The key of a compiled pass. variants, head and embedding name block types.

    exact: products in float32 throughout, rather than with activations quantized to 8 bits.
    """

    shape: Shape
    variants: dict[str, list[tuple[str, ...]]]
    embedding: str
    head: str
    kv_dtype: str
    exact: bool
    target: Target

    @classmethod
    def of(cls, layout: Layout, kv_dtype: str, target: Target) -> Design:
        """The exact mode goes with float32 KV rows."""
        embedding, head = (_name(layout.places[name].block) for name in ("token_embd", layout.head))
        return cls(layout.shape, layout.variants, embedding, head, kv_dtype, kv_dtype == "f32", target)

    def to_json(self) -> str:
        fields: dict[str, Any] = asdict(self)
        fields["target"]["flags"] = sorted(self.target.flags)
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Design:
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"]), "target": Target(**fields["target"])})


def _name(block: Block | None) -> str:
    assert block is not None  # embeddings and heads are matrices
    return block.name
