"""Parts of the graph that recurrent cores share: their state, and formulas.

A layer with a state has inputs and outputs for it, float32, which the caller keeps apart:
  past_inputs.N, inputs.N    [1, kernel − 1, channels]: the last inputs of its convolution
  past_memory.N, memory.N    [1, heads, size of a key, size of a value]: a matrix for each head
"""

from __future__ import annotations

from collections.abc import Iterator

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.proto import Type
from edge.model.cores import DeltaNet, KimiDelta, Mamba, SelectiveScan, ShortConvolution
from edge.model.structure.layers import Network


def state_shapes(network: Network) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the outputs for states, in the order of `FixedState`."""
    for layer, blocks in enumerate(network.layers):
        for core in (block.core for block in blocks):
            if isinstance(core, ShortConvolution):
                yield f"inputs.{layer}", (1, core.kernel - 1, core.hidden)
            elif isinstance(core, DeltaNet | KimiDelta):
                yield f"inputs.{layer}", (1, core.kernel - 1, core.mixed)
                yield f"memory.{layer}", (1, core.heads, core.size, core.value_size)
            elif isinstance(core, Mamba):
                yield f"inputs.{layer}", (1, core.kernel - 1, core.mixed)
                yield f"memory.{layer}", (1, core.heads, core.size, core.head_dim)
            elif isinstance(core, SelectiveScan):
                yield f"inputs.{layer}", (1, core.kernel - 1, core.width)
                yield f"memory.{layer}", (1, core.width, core.size, 1)


def convolve(
    graph: Context, layer: int, x: str, name: str, channels: int, kernel: int, activation: str, taps: str = ""
) -> str:
    """A causal convolution of each channel of x, [1, n, channels], with a bias if the model has one. taps: [channels,
    1, kernel], instead of those called `name`."""
    weights = f"blk.{layer}.{name}"
    bias = graph.weight(f"{weights}.bias") if f"{weights}.bias" in graph.layout.vectors else ""
    shape = (1, kernel - 1, channels)
    graph.input(f"past_inputs.{layer}", Type.FLOAT, *shape)
    graph.output(f"inputs.{layer}", Type.FLOAT, *shape)
    taps = taps or graph.weight(weights, (channels, 1, kernel), "taps")
    inputs = [x, taps, bias, f"past_inputs.{layer}"]
    out = f"blk.{layer}.convolved"
    graph.emit(
        "CausalConvWithState", inputs, [out, f"inputs.{layer}"], MS, ndim=1, channels_last=1, activation=activation
    )
    return out


def remember(
    graph: Context, layer: int, heads: int, sizes: tuple[int, int], rows: tuple[str, str, str], decay: str,
    beta: str = "", scale: float = 1.0,
) -> str:  # fmt: skip
    """S ← e^decay · S + k ⊗ v, or with a beta the delta rule; returns scale · Sᵀ q, [1, n, heads · size of a value].

    rows: q, k, v, each [1, n, heads · size]; decay, beta: [1, n, heads], or decay of each value of a key.
    """
    graph.input(f"past_memory.{layer}", Type.FLOAT, 1, heads, *sizes)
    graph.output(f"memory.{layer}", Type.FLOAT, 1, heads, *sizes)
    out = f"blk.{layer}.remembered"
    graph.emit(
        "LinearAttention", [*rows, f"past_memory.{layer}", decay, beta], [out, f"memory.{layer}"], MS,
        q_num_heads=heads, kv_num_heads=heads, scale=scale, update_rule="gated_delta" if beta else "gated",
    )  # fmt: skip
    return out


def split(graph: Context, x: str, sizes: list[int]) -> list[str]:
    """Parts of the last axis."""
    parts = [f"{x}.part{index}" for index in range(len(sizes))]
    graph.emit("Split", [x, graph.constant(f"sizes {sizes}", sizes)], parts, axis=-1)
    return parts


def reshape(graph: Context, x: str, *shape: int) -> str:
    """Reshape x. 0 keeps an extent; −1 infers it."""
    return graph.node("Reshape", x, graph.constant(f"shape {shape}", list(shape)))


def rms(graph: Context, x: str, eps: float) -> str:
    """Normalize the last axis, without weights."""
    squares = graph.node("ReduceMean", graph.node("Mul", x, x), graph.constant("last_axis", [-1]), keepdims=1)
    return graph.node("Div", x, graph.node("Sqrt", graph.node("Add", squares, graph.number(eps))))


def steps(graph: Context, layer: int, x: str) -> str:
    """softplus(x + `ssm_dt.bias`)."""
    return graph.node("Softplus", graph.node("Add", x, graph.weight(f"blk.{layer}.ssm_dt.bias")))


def silu(graph: Context, x: str) -> str:
    return graph.node("QuickGelu", x, domain=MS, alpha=1.0)
