"""Building blocks of a graph for `builder.py`: nodes, inputs, weights and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.backends.onnx.graph import proto
from edge.backends.onnx.graph.forms import Blocks, Floats, Int8, NormalFloats
from edge.backends.onnx.graph.layout import Layout, Matrix
from edge.backends.onnx.graph.proto import Attribute, Type
from edge.formats import nf4
from edge.formats.blocks import BLOCK

OPSET, IR_VERSION = 23, 11
MS = "com.microsoft"
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: six times faster than float activations
_NF4 = 1  # MatMulBnb4's quant_type
_TINY = 1e-30  # instead of dividing by 0
_ONNX_TYPES = {
    "float32": Type.FLOAT, "float16": Type.FLOAT16, "bfloat16": Type.BFLOAT16, "uint8": Type.UINT8, "int8": Type.INT8,
}  # fmt: skip


class Nodes:
    """A graph under construction. Methods return the names of the values that they add."""

    def __init__(self, layout: Layout, data: str) -> None:
        self.layout, self.data = layout, data
        self.nodes: list[bytes] = []
        self.inputs: dict[str, bytes] = {}
        self.outputs: dict[str, bytes] = {}
        self.initializers: dict[str, bytes] = {}
        self.part = ""  # phase and layer of the next nodes
        self.made: dict[tuple[str, str], str] = {}  # derived values that several products share

    def serialized(self, name: str = "edge") -> bytes:
        return proto.model(
            self.nodes, self.inputs.values(), self.outputs.values(), self.initializers.values(),
            opsets={"": OPSET, MS: 1}, ir_version=IR_VERSION, name=name,
        )  # fmt: skip

    # Products with matrices, one method for each form

    def multiply(self, name: str, x: str, output: str = "") -> str:
        matrix = self.layout.matrices[name]
        bias = f"{name}.bias" if f"{name}.bias" in self.layout.vectors else ""
        if isinstance(matrix.form, Blocks):  # which adds a bias by itself
            return self._by_blocks(name, matrix, matrix.form, x, bias, output)
        result = "" if bias else output
        if isinstance(matrix.form, Int8):
            product = self._by_int8(name, matrix, matrix.form, x, result)
        elif isinstance(matrix.form, NormalFloats):
            product = self._by_normal_floats(name, matrix, x, result)
        else:
            product = self.node("FusedMatMul", x, self.floats(name), domain=MS, transB=1, output=result)
        return self.node("Add", product, self.weight(bias), output=output) if bias else product

    def _by_blocks(self, name: str, matrix: Matrix, form: Blocks, x: str, bias: str, output: str) -> str:
        inputs = [self.with_means(x) if form.minima else x]
        inputs += [self.weight(f"{name}.quants"), self.weight(f"{name}.scales")]
        if form.minima or bias:
            inputs.append(self.weight(f"{name}.zeros") if form.minima else "")
        if bias:
            inputs += ["", self.weight(bias)]
        columns = matrix.columns + form.means(matrix.columns)
        sizes: dict[str, Any] = {"K": columns, "N": matrix.rows, "bits": form.bits, "block_size": BLOCK}
        how = {**sizes, "accuracy_level": INT8_ACTIVATIONS}
        return self.node("MatMulNBits", *inputs, domain=MS, output=output, **how)

    def with_means(self, x: str) -> str:
        """Append the mean of each block of inputs."""
        if ("means", x) not in self.made:
            means = self.node("AveragePool", x, kernel_shape=[BLOCK], strides=[BLOCK])
            self.made["means", x] = self.node("Concat", x, means, axis=-1)
        return self.made["means", x]

    def _by_int8(self, name: str, matrix: Matrix, form: Int8, x: str, output: str) -> str:
        apart = ""
        if form.outliers:
            which = self.constant(f"{name}.outliers", list(form.outliers))
            floats = self.node("Gather", x, which, axis=-1)
            apart = self.node("MatMul", floats, self.weight(f"{name}.floats"))
            x = self.node("Mul", x, self._all_but(which, matrix.columns, len(form.outliers)))
        by_token, sizes = self._by_token(x)
        inputs = [by_token, self.weight(f"{name}.quants"), self.weight(f"{name}.scales")]
        product = self.node("DynamicQuantizeMatMul", *inputs, domain=MS)
        if not apart:
            return self.node("Mul", product, sizes, output=output)
        return self.node("Add", self.node("Mul", product, sizes), apart, output=output)

    def _by_token(self, x: str) -> tuple[str, str]:
        """Each token's inputs divided by their maximum, and these divisors: this turns ONNX Runtime's one scale for all
        tokens into a scale per token."""
        if ("sizes", x) not in self.made:
            largest = self.node("ReduceMax", self.node("Abs", x), self.constant("last_axis", [-1]), keepdims=1)
            self.made["sizes", x] = sizes = self.node("Max", largest, self.number(_TINY))
            self.made["by token", x] = self.node("Div", x, sizes)
        return self.made["by token", x], self.made["sizes", x]

    def _all_but(self, which: str, columns: int, count: int) -> str:
        """A vector of 1 for every column except 0 for these; computed once, at load."""
        zeros = self.node("ConstantOfShape", self.constant(f"{count} values", [count]))
        one = proto.tensor("one", Type.FLOAT, [1], [1.0])
        ones = self.node("ConstantOfShape", self.constant(f"{columns} values", [columns]), value=one)
        return self.node("ScatterElements", ones, which, zeros)

    def _by_normal_floats(self, name: str, matrix: Matrix, x: str, output: str) -> str:
        codes = self.weight(f"{name}.nf4", (matrix.rows * matrix.columns // 2,))
        scales = self.weight(f"{name}.scales", (matrix.rows * matrix.columns // nf4.BLOCK,))
        how: dict[str, Any] = {"K": matrix.columns, "N": matrix.rows, "block_size": nf4.BLOCK, "quant_type": _NF4}
        return self.node("MatMulBnb4", x, codes, scales, domain=MS, output=output, **how)

    def floats(self, name: str) -> str:
        """A float matrix, which ONNX Runtime casts to float32 once, at load."""
        weight = self.weight(f"{name}.floats")
        if self.layout.places[f"{name}.floats"].array.dtype == "float32":
            return weight
        if ("float32", weight) not in self.made:
            self.made["float32", weight] = self.node("Cast", weight, to=Type.FLOAT)
        return self.made["float32", weight]

    def look_up(self, name: str, rows: str) -> str:
        """Look up rows of a matrix of floats, or of blocks without minima."""
        matrix = self.layout.matrices[name]
        if isinstance(matrix.form, Blocks):
            quants = self.weight(f"{name}.quants", (matrix.rows, matrix.columns * matrix.form.bits // 8), "rows")
            how: dict[str, Any] = {"bits": matrix.form.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            scales = self.weight(f"{name}.scales")
            return self.node("GatherBlockQuantized", quants, rows, scales, domain=MS, **how)
        found = self.node("Gather", self.weight(f"{name}.floats"), rows)
        return found if matrix.form == Floats() else self.node("Cast", found, to=Type.FLOAT)

    # The parts of a graph

    def begin(self, phase: str, layer: int | None = None) -> None:
        """Assign the following nodes to this phase of `backends.base.PHASES`; profiles show it in their names."""
        self.part = phase if layer is None else f"{phase}.{layer}"

    def node(self, op: str, *inputs: str, domain: str = "", output: str = "", **attributes: Attribute) -> str:
        output = output or f"{op}.{len(self.nodes)}"
        self.emit(op, inputs, [output], domain, **attributes)
        return output

    def emit(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Attribute
    ) -> None:
        named = list(inputs)
        while named and not named[-1]:
            named.pop()
        name = f"{self.part}/{op}.{len(self.nodes)}"
        self.nodes.append(proto.node(op, named, outputs, name, domain, attributes))

    def input(self, name: str, kind: Type, *shape: int | str) -> None:
        self.inputs[name] = proto.value(name, kind, shape)

    def output(self, name: str, kind: Type, *shape: int | str) -> None:
        self.outputs[name] = proto.value(name, kind, shape)

    def constant(self, name: str, values: int | list[int]) -> str:
        """A vector, or a single number."""
        shape, values = ([len(values)], values) if isinstance(values, list) else ([], [values])
        self.initializers[name] = proto.tensor(name, Type.INT64, shape, values)
        return name

    def number(self, number: float) -> str:
        name = f"number {number!r}"
        self.initializers[name] = proto.tensor(name, Type.FLOAT, [], [number])
        return name

    def weight(self, name: str, shape: tuple[int, ...] = (), seen_as: str = "") -> str:
        """An array of the data file; the same bytes in another shape get a name of their own."""
        place = self.layout.places[name]
        known = f"{name}.{seen_as}" if seen_as else name
        if known not in self.initializers:
            kind = _ONNX_TYPES[place.array.dtype]
            self.initializers[known] = proto.external_tensor(
                known, kind, shape or place.array.shape, self.data, place.offset, place.nbytes
            )
        return known
