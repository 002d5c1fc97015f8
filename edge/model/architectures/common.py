"""Parts that recipes share."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.spec import ModelSpec, Rope


def read_rope(header: Header, spec: ModelSpec) -> Rope:
    """The rotary positions of a header, from the fields that all architectures share."""
    factor = header.positive("rope.scaling.factor", header.positive("rope.scale_linear", 1.0, below=1e4), below=1e4)
    return Rope(
        dim=spec.rope_dim,
        base=spec.rope_base,
        scaling=header.text("rope.scaling.type", "linear"),  # a factor alone means linear
        factor=factor,
        original_context=header.count("rope.scaling.original_context_length", "context", default=spec.context),
        magnitude=header.positive("rope.scaling.attn_factor", 1.0, below=1e3),
        has_long="rope_factors_long.weight" in header.file.tensors,
    )


def read_factor(header: Header, key: str, default: float = 1.0) -> float:
    """A factor of the header; 0 means that there is none, as in llama.cpp."""
    return default if header.value(key) == 0 else header.positive(key, default, below=1e6)


def same_window(spec: ModelSpec) -> tuple[int, ...]:
    """Every layer has the header's window, if a position can be beyond it: Phi-4-mini's is twice its context."""
    return (spec.window if spec.window < spec.context else 0,) * spec.layers


def window_but_every(period: int, spec: ModelSpec) -> tuple[int, ...]:
    """Windows in all layers except every `period`-th, which has full attention."""
    return tuple(spec.window if (layer + 1) % period else 0 for layer in range(spec.layers))
