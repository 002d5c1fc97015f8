"""A model's tensors in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.tensors import Source
from edge.types import FloatArray

UNWARNED = np.errstate(all="ignore")  # damaged weights give values that are not finite, which are refused in one line


def read_weights(
    file: GGUFFile, sources: Mapping[str, Source], progress: Callable[[float], None] | None = None
) -> dict[str, FloatArray]:
    """Tensors in float32, matrices [rows, columns], by the names that `find_tensors` gives them."""
    weights: dict[str, FloatArray] = {}
    for done, (name, source) in enumerate(sources.items(), start=1):
        weights[name] = _dequantize(file, source.tensor)[source.index].copy()
        if progress:
            progress(done / len(sources))
    return weights


@UNWARNED
def _dequantize(file: GGUFFile, name: str) -> FloatArray:
    from gguf.constants import GGMLQuantizationType  # here and not above: gguf costs 6 MB that other engines save
    from gguf.quants import dequantize

    info = file.tensors[name]
    rows = int(np.prod(info.shape[1:], dtype=np.int64))
    data = file.tensor_bytes(info).reshape(rows, -1)
    try:
        values = dequantize(data, GGMLQuantizationType(info.type_id))
    except NotImplementedError:
        raise UnsupportedError(
            f"the reference engine cannot read {info.type} ({name}): use --backend=llamacpp"
        ) from None
    return np.asarray(values, np.float32).reshape(tuple(reversed(info.shape)))
