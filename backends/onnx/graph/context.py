"""The context in which a core adds its nodes: the model, and the parts of a graph that all blocks share."""

from __future__ import annotations

from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.nodes import Nodes
from edge.backends.onnx.graph.proto import Type
from edge.backends.ring import LayerKinds
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

KV_TYPES = {"f32": Type.FLOAT, "f16": Type.FLOAT16, "int8": Type.INT8, "int4": Type.UINT8}


class Context(Nodes):
    """A model's graph under construction. tokens: of a pass; 0: any number. queries: in static graphs, the queries of
    the layers so far. factor: of the residual stream."""

    factor = 1.0

    def __init__(
        self, layout: Layout, spec: ModelSpec, network: Network, kv_dtype: str, observed: bool, data: str,
        tokens: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(layout, data)
        self.spec, self.network, self.kv_dtype, self.tokens = spec, network, kv_dtype, tokens
        self.kinds = LayerKinds.of(network.windows, network.rowless)
        self.quantized = kv_dtype in ("int8", "int4")
        self.observed = observed or self.quantized
        self.float_type = Type.FLOAT16 if kv_dtype == "f16" else Type.FLOAT
        self.queries: list[str] = []
        self.rows: dict[int, str] = {}  # keys and values before RoPE of layers whose rows others read
        self.seen: dict[int, list[str]] = {}  # in static graphs, keys and values that layers see, by the rows' layer
        self.layer_inputs: list[str] = []  # each layer's vectors (`PerLayerInput`)

    def rows_of(self, window: int) -> int | str:
        """The number of cache rows of layers with this window, or its name."""
        return "ring_capacity" if window and self.kinds.ringed else "capacity"

    def pick(self, x: str) -> str:
        """Drop unwanted tokens; called after the last attention."""
        return self.node("Gather", x, "wanted", axis=1)

    def scaled(self, x: str, by: float) -> str:
        return x if by == 1 else self.node("Mul", x, self.number(by))

    def norm(self, x: str, name: str, input_factor: float = 1.0) -> str:
        """Add a norm. input_factor: an existing factor of x, which affects only the epsilon."""
        op = "LayerNormalization" if self.network.norm == "layer" else "RMSNormalization"
        return self.node(op, x, *self.scale_and_shift(name), axis=-1, epsilon=self.spec.norm_eps * input_factor**2)

    def scale_and_shift(self, name: str) -> list[str]:
        """A norm's weights, and its bias if it has one."""
        return [self.weight(each) for each in (name, f"{name}.bias") if each in self.layout.vectors]


def heads_of_ropes(network: Network) -> list[int]:
    """Values of a head that each of the network's ropes rotates (`layout.check_network`)."""
    heads = {core.rope: core.rope.dim if core.latent else core.head_dim for core in network.attention if core}
    return [heads[rope] for rope in network.ropes]


def table_names(kind: int) -> tuple[str, str]:
    """Names of the cosines and sines of one kind of RoPE."""
    return (f"cos.{kind}", f"sin.{kind}") if kind else ("cos", "sin")


def mask_name(window: int) -> str:
    return f"mask.{window}" if window else "mask"
