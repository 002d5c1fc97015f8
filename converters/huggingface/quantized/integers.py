"""AWQ, GPTQ and AutoRound: integers in words of 32 bits, which hold the values of several inputs or outputs.

The lowest bits come first, and for every group of inputs there are a scale and a zero point per output:

    weight[out, in] = scales[group, out] · (quant[in, out] − zero[group, out])

AWQ  (arXiv:2306.00978, AutoAWQ's `gemm` layout): qweight [in, out / 8] and qzeros [groups, out / 8]; the eight outputs
     of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
GPTQ (arXiv:2210.17323): qweight [in · bits / 32, out], qzeros [groups, out · bits / 32], which in its first format
     hold zero − 1 and in `gptq_v2` zero; g_idx [in] names the group of every input, in any order.
AutoRound (arXiv:2309.05516) writes both: `auto_round:auto_awq`, `auto_round:auto_gptq` and, as `gptq_v2`, `auto_round`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.converters.huggingface.config import Config
from edge.converters.huggingface.quantized.matrix import Integers, Quantized, Steps, kept_type, unpack
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.safetensors import Stored
from edge.types import AnyArray
from edge.values import brief

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LAYOUTS = {  # AutoRound's names: the method, and the format of GPTQ's checkpoints
    "auto_round:auto_gptq": ("gptq", "gptq"), "auto_round:gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"), "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"), "auto_round:awq": ("awq", "gemm"),
}  # fmt: skip


@dataclass(frozen=True)
class Packed(Integers):
    """A layer of AWQ or GPTQ."""

    method: str = "gptq"
    zeros_less_one: bool = False

    def steps(self) -> tuple[Callable[[slice], Steps], AnyArray]:
        scales, zeros = self._scales_and_zeros()
        words = self.parts["qweight"].read()

        def take(chosen: slice) -> Steps:
            return Steps(self._codes(words, chosen), scales[chosen], zeros[chosen])

        return take, self._groups(scales.shape[1])

    def _codes(self, words: AnyArray, chosen: slice) -> AnyArray:
        """The codes of some outputs, [outputs, in]."""
        if self.method == "awq":
            return np.asarray(self._unpacked(words[:, chosen.start // 8 : -(-chosen.stop // 8)]).T)
        return unpack(words[:, chosen].T, self.bits)

    def _scales_and_zeros(self) -> tuple[AnyArray, AnyArray]:
        """Both [out, groups]."""
        packed = self.parts["qzeros"].read()
        if self.zeros_less_one and 32 % self.bits == 0:  # from whole words: a zero point of 0 borrowed from the next
            packed = (packed.view(np.uint32) + np.uint32(0xFFFFFFFF // ((1 << self.bits) - 1))).view(np.int32)
        zeros = self._unpacked(packed)
        if self.zeros_less_one and 32 % self.bits:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return self.floats("scales").T, zeros.T

    def _unpacked(self, words: AnyArray) -> AnyArray:
        values = unpack(words, self.bits)
        if self.method != "awq":
            return values
        return np.asarray(values.reshape(len(words), -1, 8)[..., np.argsort(_AWQ_ORDER)].reshape(len(words), -1))

    def _groups(self, count: int) -> AnyArray:
        """The group of every input, [in]. Raises ModelFormatError for a group that does not exist."""
        if "g_idx" in self.parts:
            groups = self.parts["g_idx"].read().astype(np.int64)
        else:
            groups = np.arange(self.shape[1]) // self.group_size
        if not ((groups >= 0) & (groups < count)).all():
            raise self.wrong("has inputs that belong to groups that are not there")
        return groups


def find_integers(tensors: dict[str, Stored], settings: Config) -> dict[str, Quantized]:
    """Remove the layers of AWQ, GPTQ and AutoRound from `tensors`. Raises UnsupportedError, ModelFormatError."""
    own = settings.get("extra_config", {})
    found: dict[str, Quantized] = {}
    _read(settings, {})  # refuses settings, even if no layer has them
    for name in [name for name in tensors if name.endswith(".qweight")]:
        stem = name.removesuffix("qweight")
        layer = own.get(stem[:-1]) if isinstance(own, dict) else None
        method, bits, group_size, symmetric, in_order, less_one = _read(
            settings, layer if isinstance(layer, dict) else {}
        )
        parts = {part: tensors.pop(stem + part) for part in _PARTS if stem + part in tensors}
        outputs, inputs = _checked_shape(parts, stem, method, bits, group_size)
        size = inputs if group_size == -1 else group_size
        found[f"{stem}weight"] = Packed(
            parts["qweight"].path, f"{stem}weight", (outputs, inputs), f"{method.upper()}, {bits} bits", parts,
            "F32" if parts["scales"].dtype == "F32" else "F16",
            kept_type(bits, inputs, size, symmetric=symmetric, in_order=in_order), bits, size, method, less_one,
        )  # fmt: skip
    return found


def _read(settings: Config, layer: Mapping[str, Any]) -> tuple[str, int, int, bool, bool, bool]:
    """The method, bits, group size, and whether it is symmetric, in order, and its zero points are less one."""
    said = Config(settings.path, {**settings.values, **layer})
    method, checkpoint, path = said.get("quant_method"), said.get("checkpoint_format", "gptq"), said.path
    if method in ("auto-round", "auto_round"):
        layout = said.get("packing_format", said.get("backend", "auto_round:auto_gptq"))
        if str(layout) not in _LAYOUTS or said.get("data_type", "int") != "int":
            raise UnsupportedError(f"{path}: AutoRound's layout {brief(layout)} is not supported: save it in auto_gptq")
        method, checkpoint = _LAYOUTS[layout]
    bits = said.get("bits", 4)
    if not isinstance(bits, int) or bits not in ((4,) if method == "awq" else (2, 3, 4, 8)):
        raise UnsupportedError(f"{path}: {method} with {brief(bits)} bits is not supported")
    version = str(said.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        raise UnsupportedError(f"{path}: AWQ's layout {brief(version)} is not supported (gemm is)")
    if method == "gptq" and checkpoint not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"{path}: checkpoint_format {brief(checkpoint)} is not supported")
    group_size = said.get("group_size", 128)
    if not isinstance(group_size, int) or isinstance(group_size, bool) or (group_size < 1 and group_size != -1):
        raise ModelFormatError(f"{path}: group_size is {brief(group_size)}")
    ordered = method == "awq" or said.get("desc_act", said.get("quant_method") == "gptq") is False
    return method, bits, group_size, said.get("sym") is True, ordered, (method, checkpoint) == ("gptq", "gptq")


def _checked_shape(parts: dict[str, Stored], stem: str, method: str, bits: int, group_size: int) -> tuple[int, int]:
    """Outputs and inputs of a layer. Raises ModelFormatError if its parts do not fit each other."""
    path = parts["qweight"].path
    for part in _PARTS[:3]:
        if part not in parts:
            raise ModelFormatError(f"{path}: {stem}{part} is missing")
        wanted = ("F16", "BF16", "F32") if part == "scales" else ("I32",)
        if parts[part].dtype not in wanted or len(parts[part].shape) != 2:
            raise ModelFormatError(f"{path}: {stem}{part} is no matrix of {' or '.join(wanted)}")
    rows, columns = parts["qweight"].shape
    inputs, outputs = (rows, columns * 8) if method == "awq" else (rows * 32 // bits, columns)
    size = inputs if group_size == -1 else group_size
    groups = parts["scales"].shape[0] if "g_idx" in parts else -(-inputs // max(1, size))
    for part, shape in (("scales", (groups, outputs)), ("qzeros", (groups, outputs * bits // 32))):
        if parts[part].shape != shape or outputs * bits % 32:
            raise ModelFormatError(f"{path}: {stem}{part} has shape {parts[part].shape} instead of {shape}")
    order = parts.get("g_idx")
    if order is not None and (order.shape != (inputs,) or order.dtype not in ("I32", "I64")):
        raise ModelFormatError(f"{path}: {stem}g_idx must be {inputs} numbers")
    return outputs, inputs
