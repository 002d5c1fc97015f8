"""Matrices of floats that are rounded to Q8_0 when they are packed, against those of the gguf package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN

from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import pack_weights
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.model.reader import read_spec
from edge.model.structure.rounding import in_q8_0, is_rounded
from edge.types import AnyArray

gguf = pytest.importorskip("gguf")


def test_packed_floats_are_those_of_a_q8_0_file(tmp_path: Path) -> None:
    plain = read_gguf(GOLDEN / "llama-gqa-tied.gguf")
    quantized = written_in_q8_0(plain, tmp_path / "q8_0.gguf")
    rounded, spec = in_q8_0(plain, read_spec(plain)), read_spec(quantized)
    assert (rounded.type_bytes, rounded.weight_bytes) == (spec.type_bytes, spec.weight_bytes)
    packed = []
    for file, each in ((plain, rounded), (quantized, spec)):
        pack_weights(file, make_layout(file, each), tmp_path / "packed")
        packed.append((tmp_path / "packed").read_bytes())
    assert packed[0] == packed[1]


def written_in_q8_0(file: GGUFFile, target: Path) -> GGUFFile:
    def data(info: TensorInfo) -> AnyArray:
        stored = file.tensor_bytes(info)
        if not is_rounded(info):
            return stored
        values = stored.view({"F32": np.float32, "F16": np.float16}[info.type]).reshape(-1, info.shape[0])
        return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)

    tensors = list(file.tensors.values())
    planned = [
        replace(each, type="Q8_0") if is_rounded(info) else each
        for each, info in zip(planned_as(tensors), tensors, strict=True)
    ]
    write_gguf(target, fields_of(file), planned, map(data, tensors))
    return read_gguf(target)
