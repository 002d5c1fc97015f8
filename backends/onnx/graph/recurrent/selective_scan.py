"""The core of Mamba-1: ONNX Runtime's LinearAttention with a head for each channel, whose keys are B, queries C."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.state import convolve, remember, reshape, rms, silu, split
from edge.model.cores import SelectiveScan


def selective_scan(graph: Context, core: SelectiveScan, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the gated outputs of all channels, [1, n, width]."""
    at, width = f"blk.{layer}.", core.width
    graph.begin("qkv", layer)
    inputs, z = split(graph, graph.multiply(f"{at}ssm_in", x), [width, width])
    graph.begin("attend", layer)
    values = convolve(graph, layer, inputs, "ssm_conv1d", width, core.kernel, "silu")
    parts = split(graph, graph.multiply(f"{at}ssm_x", values), [core.rank, core.size, core.size])
    if core.norms:
        parts = [rms(graph, part, core.epsilon) for part in parts]
    if core.norms and core.weighted:
        parts = [
            graph.node("Mul", part, graph.weight(at + name)) for part, (name, *_) in zip(parts, core.parts, strict=True)
        ]
    dt = graph.node("Softplus", graph.multiply(f"{at}ssm_dt", parts[0]))
    of_channels = graph.constant(f"shape {(1, 1, width, 1)}", [1, 1, width, 1])
    b, c = (
        reshape(graph, graph.node("Expand", reshape(graph, part, 0, 0, 1, core.size), of_channels), 0, 0, -1)
        for part in parts[1:]
    )
    decay = graph.node("Mul", graph.weight(f"{at}ssm_a", (width, core.size), "rates"), reshape(graph, dt, 0, 0, -1, 1))
    changes, decays = graph.node("Mul", values, dt), reshape(graph, decay, 0, 0, -1)
    out = remember(graph, layer, width, (core.size, 1), (c, b, changes), decays)
    skipped = graph.node("Mul", values, graph.weight(f"{at}ssm_d"))
    return graph.node("Mul", graph.node("Add", out, skipped), silu(graph, z))
