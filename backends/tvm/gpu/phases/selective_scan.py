"""The Mamba-1 core: a product, convolution, products that select, recurrence, and the output projection."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Product
from edge.backends.tvm.gpu.kernels.recurrent.selective_scan import Selection, mix, normalise, scan
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import SelectiveScan
from edge.model.structure.layers import Block


def selective_scan(made: PassBuilder, core: SelectiveScan, block: Block, layer: int) -> None:
    chunk, found = made.design.chunk, Selection.of(core, made.layout(layer))

    def add(name: str, make: Callable[[str], Built]) -> None:
        scalars = {"state": made.design.states[layer]}
        made.add("attend", layer, (name, found), make, weights_in(f"layer.{layer}"), scalars)

    def multiply(name: str, matrix: str, stride: int, x: str, out: str) -> None:
        product = Product(name, made.factors((matrix,), layer), Epilogue("store", stride))
        made.multiply("attend", layer, product, {"x": x, "out": out})

    factors = made.factors(core.inputs, layer)
    made.multiply_hidden("qkv", layer, block, "edge_scan_in", factors, Epilogue("store", core.channels), "channels")
    add("edge_scan_mix", lambda name: mix(name, found, chunk))
    multiply("edge_scan_select", "ssm_x", core.selected, "convolved", "latents")
    add("edge_scan_normalise", lambda name: normalise(name, found, chunk))
    multiply("edge_scan_steps", "ssm_dt", round_up(core.width, 32), "ranked", "expanded")
    add("edge_selective_scan", lambda name: scan(name, found))
    made.multiply_into_hidden("output", layer, block, "edge_scan_out", source="mixed")
