"""Convert the integer-quantized linear layers of AWQ and GPTQ checkpoints to floats or GGUF blocks.

Both keep, for every linear layer of `in` inputs and `out` outputs, words of 32 bits with 32 / bits values each
(lowest bits first), and for every group of inputs a scale and a zero point per output:

    weight[out, in] = scales[group, out] · (quant[in, out] − zero[group, out])

AWQ  (arXiv:2306.00978, AutoAWQ's `gemm` layout): qweight [in, out / 8] and qzeros [groups, out / 8]; the eight outputs
     of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
GPTQ (arXiv:2210.17323): qweight [in · bits / 32, out], qzeros [groups, out · bits / 32], which in its first format
     hold zero − 1 and in `gptq_v2` zero; g_idx [in] names the group of every input, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize, nbytes
from edge.formats.safetensors import Stored
from edge.types import AnyArray

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SLICE = 256  # outputs worked on at a time
_BLOCK = 32  # values in a block of GGUF's
_BYTES = nbytes("MXFP4", _BLOCK)


@dataclass(frozen=True)
class Packed:
    """A quantized linear layer, read as a float matrix [out, in]: float16 as in its own kernels, or float32."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    method: str
    bits: int
    group_size: int
    zeros_less_one: bool
    block_type: str | None  # GGUF's type for the same values: Q4_0 if all zero points are 8, else Q4_1; None: none
    parts: dict[str, Stored]

    def read(self) -> AnyArray:
        """The matrix, dequantized. Raises ModelFormatError."""
        scales, zeros = self._scales_and_zeros()
        groups, words = self._groups(len(scales)), self.parts["qweight"].read()
        result = np.empty(self.shape, np.float16 if self.dtype == "F16" else np.float32)
        for first in range(0, self.shape[0], _SLICE):
            chosen = slice(first, first + _SLICE)
            steps = (self._quants(words, first) - zeros[:, chosen][groups]).astype(np.float32)
            with np.errstate(over="ignore"):
                result[chosen] = (steps * scales[:, chosen][groups].astype(np.float32)).T
        return result

    def read_blocks(self) -> AnyArray:
        """The same values in blocks of `block_type`, uint8 [out, bytes]. Raises ModelFormatError if grids differ."""
        scales, zeros = self._scales_and_zeros()
        outputs, inputs = self.shape
        count, words = inputs // _BLOCK, self.parts["qweight"].read()
        groups = self._groups(len(scales))
        if (groups.reshape(count, _BLOCK) != groups[::_BLOCK, None]).any():
            raise ModelFormatError(
                f"{self.path}: {self.name}: its groups are not in order, though config.json says they are"
            )
        numbers = [scales] if self.block_type == "Q4_0" else [scales, -(scales.astype(np.float32) * zeros)]
        if self.block_type == "Q4_0" and (zeros != 8).any():
            raise ModelFormatError(f"{self.path}: {self.name}: its zero points are not 8, though config.json says so")
        with np.errstate(over="ignore"):
            heads = np.stack([each.T.astype(np.float16)[:, groups[::_BLOCK]] for each in numbers], axis=2)
        if not np.isfinite(heads).all():
            raise ModelFormatError(f"{self.path}: {self.name} has values that are infinite as {self.block_type}")
        result = np.empty((outputs, count, 2 * len(numbers) + _BLOCK // 2), np.uint8)
        result[..., : 2 * len(numbers)] = heads.view(np.uint8).reshape(outputs, count, -1)
        for first in range(0, outputs, _SLICE):
            quants = self._quants(words, first).T.reshape(-1, count, 2, _BLOCK // 2)
            result[first : first + _SLICE, :, 2 * len(numbers) :] = quants[:, :, 0] | quants[:, :, 1] << 4
        return np.asarray(result.reshape(outputs, -1))

    def _quants(self, words: AnyArray, first: int) -> AnyArray:
        """The quantized integers of some outputs, [in, outputs]."""
        if self.method == "awq":
            return _unpack(words[:, first // 8 : (first + _SLICE) // 8], self.bits, True)
        return np.asarray(_unpack(np.ascontiguousarray(words[:, first : first + _SLICE].T), self.bits, False).T)

    def _scales_and_zeros(self) -> tuple[AnyArray, AnyArray]:
        """Both [groups, out]."""
        scales, packed = self.parts["scales"].read(), self.parts["qzeros"].read()
        if self.zeros_less_one:  # 1 was subtracted from whole words, so a zero point of 0 borrowed from its neighbour
            packed = (packed.view(np.uint32) + np.uint32(0xFFFFFFFF // ((1 << self.bits) - 1))).view(np.int32)
        zeros = _unpack(packed, self.bits, self.method == "awq")
        if self.parts["scales"].dtype == "BF16":
            scales = (scales.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(scales).all():
            raise ModelFormatError(f"{self.path}: {self.parts['scales'].name} has values that are no numbers")
        return scales, zeros

    def _groups(self, count: int) -> AnyArray:
        """The group of every input, [in]. Raises ModelFormatError for a group that does not exist."""
        inputs = self.shape[1]
        if "g_idx" in self.parts:
            groups = self.parts["g_idx"].read().astype(np.int64)
        else:
            groups = np.arange(inputs) // self.group_size
        if not ((groups >= 0) & (groups < count)).all():
            raise ModelFormatError(f"{self.path}: {self.name}: its inputs belong to groups that are not there")
        return groups


@dataclass(frozen=True)
class Mxfp4:
    """Experts in MXFP4 (OCP Microscaling Formats 1.0): a byte holds two adjacent codes, and 32 codes share a scale.

    Read as the same values in bfloat16, [experts, rows, columns]. GGUF's blocks hold the scale, then the codes of the
    first half in low nibbles, and of the second half in high nibbles.
    """

    blocks: CheckpointTensor  # uint8 [experts, rows, columns / 32, 16]
    scales: CheckpointTensor  # uint8 [experts, rows, columns / 32], exponents with a bias of 127
    name: str
    rows: slice  # the rows to take

    dtype, block_type = "BF16", "MXFP4"

    @classmethod
    def of(cls, blocks: CheckpointTensor, scales: CheckpointTensor) -> Mxfp4:
        """All rows of a pair of tensors. Raises ModelFormatError if they do not fit each other."""
        fits = blocks.shape == (*scales.shape, _BLOCK // 2) and len(scales.shape) == 3
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise ModelFormatError(f"{blocks.path}: {blocks.name} is no matrix in MXFP4")
        return cls(blocks, scales, blocks.name, slice(None))

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, count = self.scales.shape
        return experts, len(range(*self.rows.indices(rows))), count * _BLOCK

    def with_rows(self, name: str, rows: slice) -> Mxfp4:
        return replace(self, name=name, rows=rows)

    def read(self) -> AnyArray:
        values = dequantize(self.read_blocks().reshape(-1, self.shape[2] // _BLOCK * _BYTES), self.block_type)
        return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(self.shape)

    def read_blocks(self) -> AnyArray:
        """uint8 [experts, rows, bytes]."""
        codes, scales = self.blocks.read()[:, self.rows], self.scales.read()[:, self.rows]
        each = np.empty((*codes.shape[:-1], _BLOCK), np.uint8)
        each[..., ::2], each[..., 1::2] = codes & 15, codes >> 4
        half = _BLOCK // 2
        made = np.empty((*scales.shape, _BYTES), np.uint8)
        made[..., 0], made[..., 1:] = scales, each[..., :half] | each[..., half:] << 4
        return made.reshape(*made.shape[:2], -1)


def find_packed(tensors: dict[str, Stored], config: Config) -> dict[str, Packed]:
    """Remove the quantized linear layers from `tensors` and return them by the names of their float weights.

    Raises UnsupportedError for other methods and layouts, ModelFormatError if parts are missing or do not fit.
    """
    settings = config.part("quantization_config")
    ours = config.get("quantization")
    if isinstance(ours, dict) and "group_size" in ours and (settings is None or settings.get("quant_method") is None):
        raise UnsupportedError(f"{config.path}: weights quantized by MLX are not supported: convert the original model")
    if settings is None:
        return {}
    method, bits = settings.get("quant_method"), settings.get("bits", 4)
    if method == "mxfp4":  # only experts are, which are read with their layers
        return {}
    if method not in ("awq", "gptq"):
        raise UnsupportedError(
            f"{config.path}: weights quantized by {brief(method)} are not supported (awq, gptq, mxfp4 are)"
        )
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
    blocks: str | None = "Q4_0" if method == "gptq" and settings.get("sym") is True else "Q4_1"
    if bits != 4 or (method == "gptq" and settings.get("desc_act") is not False):
        blocks = None
    found = {}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        stem = name.removesuffix("qweight")
        parts = {part: tensors.pop(stem + part) for part in _PARTS if stem + part in tensors}
        outputs, inputs = _checked_shape(parts, stem, method, bits, group_size)
        size = inputs if group_size == -1 else group_size
        kind = "F16" if parts["scales"].dtype == "F16" else "F32"
        fits = kind == "F16" and inputs % _BLOCK == 0 and size % _BLOCK == 0
        found[f"{stem}weight"] = Packed(
            parts["qweight"].path, f"{stem}weight", kind, (outputs, inputs), method, bits, size, less_one,
            blocks if fits else None, parts,
        )  # fmt: skip
    return found


def _checked_shape(parts: dict[str, Stored], stem: str, method: str, bits: int, group_size: int) -> tuple[int, int]:
    """Outputs and inputs of a layer. Raises ModelFormatError if its parts do not fit each other."""
    path = parts["qweight"].path
    for part in _PARTS[:3]:
        if part not in parts:
            raise ModelFormatError(f"{path}: {stem}{part} is missing")
        wanted = ("F16", "BF16", "F32") if part == "scales" else ("I32",)
        if parts[part].dtype not in wanted or len(parts[part].shape) != 2:
            raise ModelFormatError(f"{path}: {stem}{part} is no matrix of {' or '.join(wanted)}")
    each = 32 // bits
    rows, columns = parts["qweight"].shape
    inputs, outputs = (rows, columns * each) if method == "awq" else (rows * each, columns)
    size = inputs if group_size == -1 else group_size
    groups = parts["scales"].shape[0] if "g_idx" in parts else -(-inputs // max(1, size))
    for part, shape in (("scales", (groups, outputs)), ("qzeros", (groups, outputs // each))):
        if parts[part].shape != shape or outputs % each:
            raise ModelFormatError(f"{path}: {stem}{part} has shape {parts[part].shape} instead of {shape}")
    order = parts.get("g_idx")
    if order is not None and (order.shape != (inputs,) or order.dtype not in ("I32", "I64")):
        raise ModelFormatError(f"{path}: {stem}g_idx must be {inputs} numbers")
    return outputs, inputs


def _unpack(words: AnyArray, bits: int, awq: bool) -> AnyArray:
    """Unpack words, int32 [rows, n], into values, int32 [rows, n · 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = ((words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)).astype(np.int32)
    if awq:
        values = values[..., np.argsort(_AWQ_ORDER)]
    return values.reshape(len(words), -1)
