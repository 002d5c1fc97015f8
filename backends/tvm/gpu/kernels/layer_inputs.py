"""The vectors of `edge.model.cores.PerLayerInput`."""

from __future__ import annotations

import math

from edge.backends.tvm.gpu.design import input_stride
from edge.backends.tvm.gpu.kernels.norms import Norm, inverse_root
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Register,
    Scope,
    as_float,
    build,
    f32,
    hold,
    let,
    reduce,
    store,
    strided,
)
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.packing.shape import Shape

_THREADS = 64  # of a workgroup, which has one layer's vector of a token


def add_projected(name: str, shape: Shape, weight: Vector, tokens: int) -> Built:
    """`out` += norm(`projected`) / √2, each vector by itself: float32 [tokens, layers, stride], of which `projected`
    has no padding. The weight is in `w1`."""
    size, stride = shape.layer_inputs, input_stride(shape.layer_inputs)
    norm = Norm("rms", weight, None, size, shape.norm_eps)

    def body(scope: Scope) -> None:
        memory, vector = scope.shared(_THREADS), let(scope.row * shape.layers + scope.group)
        squares = Register(f32(0.0))
        with strided(scope, size) as at:
            x = let(scope.projected[vector * size + at])
            squares.value = squares.value + x * x
        total = reduce(scope, memory, squares.value, _THREADS, lambda one, other: one + other)
        scale = hold(inverse_root(total, norm))
        with strided(scope, size) as at:
            normed = scope.projected[vector * size + at] * scale * as_float(scope.w1[at + weight.at])
            place = let(vector * stride + at)
            store(scope.out, place, scope.out[place] + normed * f32(math.sqrt(0.5)))

    reads = {"projected": "float32", "w1": "uint32"}
    return build(name, _THREADS, reads, {"out": "float32"}, (), body, (shape.layers, tokens), 1)
