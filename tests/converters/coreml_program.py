"""Runs the functions of a Core ML package where Core ML itself is not: coremltools folds constants, so the value of an
operation is what coremltools infers once the values of its inputs are known.

All values are float16, as the package has them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge.converters.coreml.check import read_functions
from edge.types import AnyArray


class Package:
    """A package in memory."""

    def __init__(self, path: Path) -> None:
        self.functions = read_functions(path, "chunk", "step")
        for function in self.functions.values():
            for op in function.operations:
                if op.op_type == "const" and isinstance(op.outputs[0].val, np.bool_):
                    _set(op.outputs[0], bool(op.outputs[0].val))  # NumPy 2 takes no other where a flag is meant
                if op.op_type.startswith("constexpr_"):
                    _set(op.outputs[0], op.materialized_val_inference())

    def run(self, name: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
        """The outputs of a function by their names."""
        function = self.functions[name]
        assert inputs.keys() == function.inputs.keys()
        for key, value in inputs.items():
            assert value.shape == function.inputs[key].shape, key
            _set(function.inputs[key], value.astype(np.float16))
        for op in function.operations:
            if op.op_type != "const" and not op.op_type.startswith("constexpr_"):
                values = _infer(op)
                for var, value in zip(op.outputs, values, strict=True):
                    assert value.shape == var.shape, op.name
                    _set(var, value.astype(np.float16))
        return {var.name: var.val for var in function.outputs}


def _infer(op: Any) -> list[AnyArray]:
    if op.op_type == "silu":  # whose value is not inferred
        x = op.x.val.astype(np.float32)
        return [x / (1 + np.exp(-x))]
    made = op.value_inference()
    values = list(made) if isinstance(made, (tuple, list)) else [made]
    assert all(value is not None for value in values), f"coremltools infers no value of {op.op_type}"
    return values


def _set(var: Any, value: Any) -> None:
    var._sym_val = SimpleNamespace(val=value)
