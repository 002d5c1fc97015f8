"""Runs the functions of a Core ML package where Core ML itself is not: coremltools folds constants, so every operation
of a function is built again with constants as its inputs, and its value is what coremltools infers.

All values are float16, as the package has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from coremltools import target
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil.mil import Function

from edge.converters.coreml.check import read_functions
from edge.types import AnyArray


class Package:
    """A package in memory."""

    def __init__(self, path: Path) -> None:
        self.functions = read_functions(path, "chunk", "step")
        self._constants: dict[str, dict[str, AnyArray]] = {name: {} for name in self.functions}

    def run(self, name: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
        """The outputs of a function by their names."""
        function = self.functions[name]
        assert inputs.keys() == function.inputs.keys()
        for key, value in inputs.items():
            assert value.shape == function.inputs[key].shape, key
        known = {key: value.astype(np.float16) for key, value in inputs.items()}
        with Function({}, opset_version=target.iOS18):
            for op in function.operations:
                results = self._evaluate(name, op, known)
                known |= {var.name: np.asarray(value) for var, value in zip(op.outputs, results, strict=True)}
        return {var.name: known[var.name] for var in function.outputs}

    def _evaluate(self, name: str, op: Any, known: dict[str, AnyArray]) -> list[Any]:
        if op.op_type == "const":
            return [op.outputs[0].val]
        if op.op_type.startswith("constexpr_"):
            constants = self._constants[name]
            if op.name not in constants:
                constants[op.name] = op.materialized_val_inference()
            return [constants[op.name]]
        given = {key: _values(each, known) for key, each in op.inputs.items() if each is not None}
        if op.op_type == "silu":  # whose value is not inferred
            return [given["x"] * mb.sigmoid(x=given["x"]).val]
        made = getattr(mb, op.op_type)(**given)
        values = [each.val for each in (made if isinstance(made, (tuple, list)) else [made])]
        assert all(value is not None for value in values), f"coremltools infers no value of {op.op_type}"
        return values


def _values(given: Any, known: dict[str, AnyArray]) -> Any:
    if isinstance(given, (tuple, list)):
        return [known[each.name] for each in given]
    value = given.val if given.val is not None else known[given.name]
    return bool(value) if isinstance(value, np.bool_) else value  # NumPy 2 takes no other where a flag is meant
