"""What is done to the weights of a model on their way into ONNX, beyond what their block types say.

A method says in what form each matrix of the layers is stored, and what is moved from one tensor into another.
Embedding and head stay as the file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edge.converters.quantizers import llm_int8, nf4, smoothquant
from edge.converters.writers.onnx_forms import Form, Int8, NormalFloats
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.types import FloatArray

METHODS = ("nf4", "w8a8", "smoothquant", "llm-int8")
NEED_STATISTICS = ("smoothquant", "llm-int8")


class Inputs(Protocol):
    """What calibration saw of the inputs of a matrix. largest: max |x| of each, float32 [columns]."""

    @property
    def largest(self) -> FloatArray: ...


Statistics = Mapping[str, Inputs]
"""By the names of `find_tensors`: `blk.0.attn_q`."""


@dataclass(frozen=True)
class Method:
    """form: of the matrices of all layers, or of each by its name (`blk.0.attn_q`); None: as their types say.

    multiplied: columns of matrices, float32 [columns]. divided: values of vectors, or rows of matrices, float32
    [rows]. Together they change nothing but the size of what flows between (SmoothQuant); such matrices are Int8.
    """

    name: str = ""
    form: Form | None = None
    forms: Mapping[str, Form] = field(default_factory=dict)
    multiplied: Mapping[str, FloatArray] = field(default_factory=dict)
    divided: Mapping[str, FloatArray] = field(default_factory=dict)

    def form_of(self, name: str, columns: int) -> Form | None:
        """None: as the types say. name: the first part's, where matrices are joined."""
        if not name.startswith("blk."):
            return None
        form = self.forms.get(name, self.form)
        return None if isinstance(form, NormalFloats) and columns % nf4.BLOCK else form


AS_IT_IS = Method()


def planning_method(name: str | None, file: GGUFFile, spec: ModelSpec) -> Method | None:
    """The method as far as sizes go, before any calibration; None if only that tells. Raises InputError."""
    if name == "llm-int8":
        return None
    return find_method("w8a8" if name == "smoothquant" else name, file, spec)


def find_method(
    name: str | None,
    file: GGUFFile,
    spec: ModelSpec,
    statistics: Statistics | None = None,
    *,
    alpha: float = smoothquant.ALPHA,
    threshold: float = llm_int8.THRESHOLD,
) -> Method:
    """The method called `name`, one of METHODS; None: weights stay as they are.

    statistics: what NEED_STATISTICS go by. alpha: SmoothQuant's share of the difficulty that weights take over;
    threshold: of LLM.int8(), |x| above which an input channel is an outlier. Raises InputError.
    """
    if name is None:
        return AS_IT_IS
    if name not in METHODS:
        raise InputError(f"unknown method {name!r} for ONNX: choose {', '.join(METHODS)}")
    if name == "nf4":
        return Method(name, NormalFloats())
    if name == "w8a8":
        return Method(name, Int8())
    if statistics is None:
        raise InputError(f"{name} needs a calibration text")
    largest = {key: each.largest for key, each in statistics.items()}
    if name == "smoothquant":
        smoothing = smoothquant.smooth(file, spec, largest, alpha)
        return Method(name, Int8(), multiplied=smoothing.multiplied, divided=smoothing.divided)
    outliers = {key: llm_int8.outliers_of(each, threshold) for key, each in largest.items()}
    return Method(name, forms={key: Int8(each) for key, each in outliers.items()})
