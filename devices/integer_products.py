"""Benchmark of int8 matrix products by ONNX Runtime's MatMulInteger, if installed: NumPy has no such kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import numpy as np

# Rows, depth and columns: both factors fit a second-level cache, and a product takes much longer than its call.
_ROWS, _DEPTH, _COLUMNS = 512, 1024, 512
_PACKAGES = ("onnxruntime", "onnx")
_TRIALS = 5


def missing() -> str | None:
    """The reason why int8 products cannot be measured here; None if they can."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed (extra: onnx)"


Product = Callable[[], float]
"""Multiply once; return the number of multiplications and additions."""


def fastest_product() -> Callable[[], Product] | None:
    """A factory of benchmarks for one thread: u8×s8 or s8×s8, whichever is faster here; None if neither works.

    Many processors have a fast kernel for only one of the two.
    """
    if missing():
        return None
    times: list[tuple[float, Callable[[], Product]]] = []
    for kind in (np.uint8, np.int8):
        make = partial(_product, kind)
        with suppress(Exception):  # whatever a build of ONNX Runtime raises that lacks the kernel, or does not load
            times.append((_seconds(make()), make))
    return min(times, key=lambda each: each[0])[1] if times else None


def _seconds(product: Product) -> float:
    """The shortest time of a few runs."""
    times = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        product()
        times.append(time.perf_counter() - started)
    return min(times)


def _product(kind: type[np.generic]) -> Product:
    """A product of a `kind` matrix and an int8 matrix. Raises what ONNX Runtime raises where it has no kernel."""
    import onnx
    import onnxruntime
    from onnx import helper

    code = helper.np_dtype_to_tensor_dtype
    weights = onnx.numpy_helper.from_array(np.ones((_DEPTH, _COLUMNS), np.int8), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["in", "weights"], ["out"])],
        "product",
        [helper.make_tensor_value_info("in", code(np.dtype(kind)), [_ROWS, _DEPTH])],
        [helper.make_tensor_value_info("out", code(np.dtype(np.int32)), [_ROWS, _COLUMNS])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    bound.bind_cpu_input("in", np.ones((_ROWS, _DEPTH), kind))
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty((_ROWS, _COLUMNS), np.int32))
    bound.bind_ortvalue_output("out", out)

    def multiply() -> float:
        session.run_with_iobinding(bound)
        return 2.0 * _ROWS * _DEPTH * _COLUMNS

    return multiply
