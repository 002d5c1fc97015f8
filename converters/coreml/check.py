"""Check a written package: coremltools reads it back and infers its types, both functions share the stored constants,
and sampled rows of every matrix match the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load_mil_proto
from coremltools.converters.mil.mil import types
from coremltools.models.utils import load_spec

from edge.backends.onnx.graph.layout import Layout
from edge.converters.coreml.context import plain
from edge.converters.coreml.program import CHUNK, STEP
from edge.converters.coreml.weights import Constant, Constants
from edge.errors import ModelFormatError

_WEIGHTS = "Data/com.apple.CoreML/weights"


def check_package(constants: Constants, layout: Layout, package: Path) -> None:
    """Check a package. Raises ModelFormatError."""
    model = load_spec(str(package))
    stored = {name: _stored(function) for name, function in model.mlProgram.functions.items()}
    if stored[CHUNK] != stored[STEP]:
        raise ModelFormatError(f"{package.name}: its functions do not share their weights")
    read = read_functions(package, STEP)[STEP]
    found = {op.name: op for op in read.operations}
    looked_up = {"token_embd"} if "output" in layout.matrices else set()  # by the app alone
    for name in layout.matrices.keys() - looked_up:
        written = _read(found[plain(name)])
        if written.bits != constants.bits(name):
            raise ModelFormatError(f"{package.name}: {name} has weights of {written.bits} bits")
        for first, count, values, slack in constants.samples(name):
            with np.errstate(invalid="ignore"):  # of damaged scales
                error = np.abs(written.part(first, count).values() - values)
            if not (error <= slack).all():
                raise ModelFormatError(f"{package.name}: {name} is not as it was meant to be")


def read_functions(package: Path, *names: str) -> dict[str, Any]:
    """Functions of a package with their weights, as coremltools reads them. Raises ModelFormatError."""
    model = load_spec(str(package))
    for other in set(model.mlProgram.functions) - set(names):
        del model.mlProgram.functions[other]
    try:
        program = load_mil_proto(model.mlProgram, model.specificationVersion, str(package / _WEIGHTS))
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFormatError(f"{package.name} is no valid program: {str(error).splitlines()[0]}") from None
    return dict(program.functions)


def _stored(function: Any) -> set[tuple[str, int]]:
    """Names and offsets of the constants in the weights file."""
    (block,) = function.block_specializations.values()
    values = (op.attributes["val"].blobFileValue for op in block.operations if op.type == "const")
    return {(value.fileName, value.offset) for value in values if value.fileName}


def _read(op: Any) -> Constant:
    if op.op_type == "const":
        return Constant(op.outputs[0].val)
    bits = int(types.builtin_to_string(op.data.dtype)[-1])  # of int4, uint4, int8
    return Constant(op.data.val, bits, op.scale.val, None if op.offset is None else op.offset.val)
