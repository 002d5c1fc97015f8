"""Quantization methods that only ONNX has: NF4, and int8 by row with SmoothQuant or LLM.int8()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edge.backends.onnx.graph.forms import Int8, NormalFloats
from edge.backends.onnx.graph.layout import AS_IT_IS, Method
from edge.converters.quantizers import llm_int8, smoothquant
from edge.errors import InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention, Dense
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import FloatArray

METHODS = ("nf4", "w8a8", "smoothquant", "llm-int8")
NEED_STATISTICS = ("smoothquant", "llm-int8")


class Inputs(Protocol):
    """Calibration statistics of a matrix's inputs."""

    @property
    def largest(self) -> FloatArray: ...


Statistics = Mapping[str, Inputs]
"""By the names of `find_tensors`: `blk.0.attn_q`."""


def planning_method(name: str | None, file: GGUFFile, spec: ModelSpec) -> Method | None:
    """The method as far as needed for sizes, before calibration; None if sizes depend on calibration. Raises
    InputError, UnsupportedError."""
    if name == "llm-int8":
        return None
    return find_method("w8a8" if name == "smoothquant" else name, file, spec)


def find_method(
    name: str | None,
    file: GGUFFile,
    spec: ModelSpec,
    statistics: Statistics | None = None,
) -> Method:
    """The method of this name, one of METHODS; None: weights stay as they are.

    statistics: required by the methods in NEED_STATISTICS. Raises InputError, UnsupportedError.
    """
    if name is None:
        return AS_IT_IS
    if name not in METHODS:
        raise InputError(f"unknown method {name!r} for ONNX: choose {', '.join(METHODS)}")
    for core in find_network(spec).cores:
        if not isinstance(core, Attention | Dense):
            raise UnsupportedError(f"--method={name} does not know {core.kind}: convert the model without it")
    if name == "nf4":
        return Method(name, NormalFloats())
    if name == "w8a8":
        return Method(name, Int8())
    if statistics is None:
        raise InputError(f"{name} needs a calibration text")
    largest = {key: each.largest for key, each in statistics.items()}
    if name == "smoothquant":
        smoothing = smoothquant.smooth(file, spec, largest)
        return Method(name, Int8(), multiplied=smoothing.multiplied, divided=smoothing.divided)
    outliers = {key: llm_int8.outliers_of(each) for key, each in largest.items()}
    return Method(name, forms={key: Int8(each) for key, each in outliers.items()})
