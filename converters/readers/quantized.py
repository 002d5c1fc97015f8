"""Checkpoints that were quantized to integers: AWQ's and GPTQ's linear layers, as the floats they stand for.

Both keep, for every linear layer of `in` inputs and `out` outputs, words of 32 bits with 32 / bits values each
(lowest bits first), and for every group of inputs a scale and a zero point per output:

    weight[out, in] = scales[group, out] · (quant[in, out] − zero[group, out])

AWQ  (arXiv:2306.00978, AutoAWQ's `gemm` layout): qweight [in, out / 8] and qzeros [groups, out / 8]; the eight outputs
     of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
GPTQ (arXiv:2210.17323): qweight [in · bits / 32, out], qzeros [groups, out · bits / 32], which in its first format
     hold zero − 1 and in `gptq_v2` zero; g_idx [in] names the group of every input, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.converters.readers.config import Config
from edge.converters.readers.safetensors import Stored
from edge.errors import ModelFormatError, UnsupportedError
from edge.types import AnyArray

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SLICE = 256  # outputs worked on at a time


@dataclass(frozen=True)
class Packed:
    """A linear layer, read as a float matrix [out, in]: in float16 as its own kernels compute it, or float32."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    method: str
    bits: int
    group_size: int
    zeros_less_one: bool
    parts: dict[str, Stored]

    def read(self) -> AnyArray:
        """Raises ModelFormatError."""
        outputs, inputs = self.shape
        scales, words = self.parts["scales"].read(), self.parts["qweight"].read()
        packed = self.parts["qzeros"].read()
        if self.zeros_less_one:  # whole words were taken from, so that a zero point of 0 borrowed from its neighbour
            packed = (packed.view(np.uint32) + np.uint32(0xFFFFFFFF // ((1 << self.bits) - 1))).view(np.int32)
        zeros = _unpack(packed, self.bits, self.method == "awq")
        groups = self._groups(len(scales))
        if self.parts["scales"].dtype == "BF16":
            scales = (scales.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(scales).all():
            raise ModelFormatError(f"{self.path}: {self.parts['scales'].name} has values that are no numbers")
        result = np.empty(self.shape, np.float16 if self.dtype == "F16" else np.float32)
        for first in range(0, outputs, _SLICE):
            chosen = slice(first, first + _SLICE)
            if self.method == "awq":
                quants = _unpack(words[:, first // 8 : (first + _SLICE) // 8], self.bits, True)
            else:
                quants = _unpack(np.ascontiguousarray(words[:, chosen].T), self.bits, False).T
            steps = (quants[:inputs] - zeros[:, chosen][groups]).astype(np.float32)
            with np.errstate(over="ignore"):
                result[chosen] = (steps * scales[:, chosen][groups].astype(np.float32)).T
        return result

    def _groups(self, count: int) -> AnyArray:
        """The group of every input, [in]. Raises ModelFormatError if there are no such groups."""
        inputs = self.shape[1]
        if "g_idx" in self.parts:
            groups = self.parts["g_idx"].read().astype(np.int64)
        else:
            groups = np.arange(inputs) // self.group_size
        if not ((groups >= 0) & (groups < count)).all():
            raise ModelFormatError(f"{self.path}: {self.name}: its inputs belong to groups that are not there")
        return groups


def find_packed(tensors: dict[str, Stored], config: Config) -> dict[str, Packed]:
    """The quantized linear layers by the names that their weights would have; they leave `tensors`.

    Raises UnsupportedError for other methods and layouts, ModelFormatError if parts are missing or do not fit.
    """
    settings = config.part("quantization_config")
    if settings is None:
        return {}
    method, bits = settings.get("quant_method"), settings.get("bits", 4)
    if method not in ("awq", "gptq"):
        raise UnsupportedError(f"{config.path}: weights quantized by {brief(method)} are not supported (awq, gptq are)")
    if bits not in ((4,) if method == "awq" else (2, 4, 8)):
        raise UnsupportedError(f"{config.path}: {method} with {brief(bits)} bits is not supported")
    version = str(settings.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        raise UnsupportedError(f"{config.path}: AWQ's layout {brief(version)} is not supported (gemm is)")
    checkpoint = settings.get("checkpoint_format", "gptq")
    if method == "gptq" and checkpoint not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"{config.path}: checkpoint_format {brief(checkpoint)} is not supported")
    group_size = settings.get("group_size", 128)
    if not isinstance(group_size, int) or isinstance(group_size, bool) or (group_size < 1 and group_size != -1):
        raise ModelFormatError(f"{config.path}: group_size is {brief(group_size)}")
    less_one = method == "gptq" and checkpoint == "gptq"
    found = {}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        stem = name.removesuffix("qweight")
        parts = {part: tensors.pop(stem + part) for part in _PARTS if stem + part in tensors}
        found[f"{stem}weight"] = _packed(f"{stem}weight", parts, method, bits, group_size, less_one)
    return found


def _packed(name: str, parts: dict[str, Stored], method: str, bits: int, group_size: int, less_one: bool) -> Packed:
    path = parts["qweight"].path
    for part in _PARTS[:3]:
        if part not in parts:
            raise ModelFormatError(f"{path}: {name.removesuffix('weight')}{part} is missing")
        wanted = ("F16", "BF16", "F32") if part == "scales" else ("I32",)
        if parts[part].dtype not in wanted or len(parts[part].shape) != 2:
            raise ModelFormatError(f"{path}: {parts[part].name} is no matrix of {' or '.join(wanted)}")
    each = 32 // bits
    rows, columns = parts["qweight"].shape
    inputs, outputs = (rows, columns * each) if method == "awq" else (rows * each, columns)
    size = inputs if group_size == -1 else group_size
    groups = parts["scales"].shape[0] if "g_idx" in parts else -(-inputs // size)
    for part, shape in (("scales", (groups, outputs)), ("qzeros", (groups, outputs // each))):
        if parts[part].shape != shape or outputs % each:
            raise ModelFormatError(f"{path}: {parts[part].name} has shape {parts[part].shape} instead of {shape}")
    order = parts.get("g_idx")
    if order is not None and (order.shape != (inputs,) or order.dtype not in ("I32", "I64")):
        raise ModelFormatError(f"{path}: {order.name} must be {inputs} numbers")
    kind = "F16" if parts["scales"].dtype == "F16" else "F32"
    return Packed(path, name, kind, (outputs, inputs), method, bits, size, less_one, parts)


def _unpack(words: AnyArray, bits: int, awq: bool) -> AnyArray:
    """int32 [rows, n] to the values in them, int32 [rows, n · 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = ((words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.int32)
    if awq:
        values = values[..., np.argsort(_AWQ_ORDER)]
    return values.reshape(len(words), -1)
