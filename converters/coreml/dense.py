"""The feed-forward core."""

from __future__ import annotations

from coremltools.converters.mil.mil import Builder as mb  # noqa: N813

from edge.converters.coreml.context import Context, Value
from edge.model.cores import Dense


def dense(function: Context, core: Dense, layer: int, x: Value) -> Value:
    """Map normalized rows, [1, n, hidden], to the input of ffn_down, [1, n, ffn]."""
    up = function.multiply(f"blk.{layer}.ffn_up", x)
    if not core.gated:
        return _activate(core, up)
    return mb.mul(x=_activate(core, function.multiply(f"blk.{layer}.ffn_gate", x)), y=up)


def _activate(core: Dense, x: Value) -> Value:
    if core.activation == "relu2":
        return mb.square(x=mb.relu(x=x))
    return mb.gelu(x=x, mode="TANH_APPROXIMATION") if core.activation == "gelu" else mb.silu(x=x)
