"""The vectors that a token has for each layer (`edge.model.cores.PerLayerInput`): all of them before the first layer,
then in each layer a gate and its output.

The engine has put the token's row of the table into `layer_inputs`, times √(size / 2).
"""

from __future__ import annotations

import math

from edge.backends.tvm.cpu.kernels.functions import ACTIVATIONS
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Strip, Value, floats, i64, let, load, loop, store
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.attention.qkv import unit
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import project
from edge.backends.tvm.cpu.phases.streaming import evict_embeddings
from edge.backends.tvm.packing.cores import round_up


def make_inputs(b: PassBuilder, _layer: Value) -> None:
    """Add the norm of the projected embeddings, layer by layer."""
    shape = b.shape
    width, parts = shape.padded_hidden, shape.padded_inputs // 16
    (names,) = b.variants("layer_inputs")
    b.quantize_chunk("x", width, None, "layer_inputs")
    with b.phase("layer_inputs"):
        inputs = b.quantized_inputs("x", width, None, "layer_inputs", private=False)
        matrix = b.matrix(names[0], shape.hidden, "per_layer_model_proj")
        weight = let(b.at("per_layer_proj_norm"))
        with b.tiles(shape.layers) as layer, b.batches() as tokens:
            strip = Strip(len(tokens) * parts)
            with loop(i64(0), i64(parts)) as part:
                sums = b.multiply(matrix, let(layer * parts + part), inputs, b.rows(tokens))
                for index, each in enumerate(sums):
                    strip[index * parts + part] = each.value
            with loop(i64(0), i64(len(tokens))) as index:
                token = let(tokens[0] + index)
                with b.if_in_chunk(token):
                    vectors = [let(strip[index * parts + part]) for part in range(parts)]
                    normed = unit(vectors, shape.layer_inputs, shape.norm_eps * shape.hidden)  # of Wx, not Wx / √hidden
                    for part, vector in enumerate(normed):
                        at = let(_input_at(b, layer, token) + part * 16)
                        scaled = vector * load(b.weights.floats, weight + part * 16) * floats(math.sqrt(0.5))
                        store(b.floats, at, load(b.floats, at) + scaled)
    evict_embeddings(b)


def gate(b: PassBuilder, layer: Value) -> None:
    """gelu(`inp_gate` · x) ⊙ p."""
    b.quantize_chunk("x", b.shape.padded_hidden, layer, "input_gate")
    with b.phase("input_gate", layer):
        inputs = b.quantized_inputs("x", b.shape.padded_hidden, layer, "input_gate", private=False)
        adapt(b, "input_gate", layer, inputs)
        _gate(b, layer, inputs)


def output(b: PassBuilder, layer: Value) -> None:
    project(b, layer, "ffn", round_up(b.shape.layer_inputs, 32), "input_out")


UNITS: dict[str, Unit] = {"input_gate": gate, "input_out": output}


def _gate(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    width = round_up(b.shape.layer_inputs, 32)
    with b.tiles(b.shape.padded_inputs // 16) as tile, b.batches() as tokens:
        for token, each in zip(tokens, b.product("inp_gate", layer, tile, inputs, b.rows(tokens)), strict=True):
            vector = load(b.floats, _input_at(b, layer, token) + tile * 16)
            store(b.floats, b.at("ffn") + token * width + tile * 16, ACTIVATIONS["gelu"](each.value) * vector)


def _input_at(b: PassBuilder, layer: Value, token: Value) -> Value:
    """Where a token's vector for a layer lies."""
    return b.at("layer_inputs") + (token * b.shape.layers + layer) * b.shape.padded_inputs
