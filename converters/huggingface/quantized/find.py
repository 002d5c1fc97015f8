"""Find the quantized matrices of a checkpoint, by its settings and the names, types and shapes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.quantized.floats import FP8, Fp4, Fp8, Table, fp4_type
from edge.converters.huggingface.quantized.integers import find_integers
from edge.converters.huggingface.quantized.matrix import ROUNDED, Integers, Quantized, Steps, kept_type, unpack
from edge.converters.huggingface.quantized.mlx import find_mlx
from edge.converters.huggingface.quantized.parts import Parts
from edge.errors import UnsupportedError
from edge.formats.blocks import BLOCK, FLOATS
from edge.formats.json_file import parse_object, shown
from edge.formats.safetensors import Stored
from edge.types import AnyArray
from edge.values import brief

_IN_WORDS = ("awq", "gptq", "auto-round", "auto_round")
_BY_TENSORS = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes")
_SUPPORTED = "AWQ, GPTQ, AutoRound, FP8, compressed-tensors, modelopt, bitsandbytes, MLX and MXFP4 are"
_OF_ACTIVATIONS = (  # of inputs and KV rows, which edge quantizes by themselves
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "q_scale",
    "k_proj.output_scale", "v_proj.output_scale", "weight_format",
)  # fmt: skip


def find_quantized(tensors: dict[str, Stored], config: Config) -> Mapping[str, CheckpointTensor]:
    """Remove the quantized matrices from `tensors`, and return them by the names of their float weights.

    Raises UnsupportedError for other methods and layouts, ModelFormatError if parts are missing or do not fit.
    """
    settings, ours = config.part("quantization_config"), config.get("quantization")
    method = settings.get("quant_method") if settings else None
    if isinstance(ours, dict) and "group_size" in ours and method is None:
        return find_mlx(tensors, Config(config.path, ours), config)
    own = config.path.parent / "hf_quant_config.json"  # of modelopt, whose config.json may say nothing
    if settings is None:
        return _find_by_tensors(tensors, own) if own.is_file() else {}
    if method == "mxfp4":  # only experts are, which are read with their layers
        return {}
    if method in _IN_WORDS:
        layout = str(settings.get("packing_format", ""))
        if not layout.endswith("llm_compressor"):
            return find_integers(tensors, settings)
    elif method not in _BY_TENSORS:
        raise UnsupportedError(
            f"{config.path}: weights quantized by {brief(method)} are not supported ({_SUPPORTED}): "
            "convert the original model"
        )
    if settings.get("transform_config"):
        raise UnsupportedError(f"{config.path}: transform_config rotates inputs, which is not supported")
    return _find_by_tensors(tensors, config.path)


# By the names of tensors: compressed-tensors, modelopt, bitsandbytes, and FP8 of DeepSeek, Qwen and Mistral


def _find_by_tensors(tensors: dict[str, Stored], path: Path) -> dict[str, Quantized]:
    for name in [name for name in tensors if name.endswith(_OF_ACTIVATIONS)]:
        del tensors[name]
    for name in tensors:
        if name.endswith((".bitmask", ".pre_quant_scale")):
            raise UnsupportedError(f"{path}: {shown(name)} is of a layout that is not supported: convert the original")
    found: dict[str, Quantized] = {}
    for name in list(tensors):
        for ending, make in _MAKERS.items():
            if name.endswith(ending) and name in tensors:
                stem = name.removesuffix(ending)
                made = make(Parts(tensors, name, stem))
                found[made.name] = made
                break
    return found


def _packed(parts: Parts) -> Quantized:
    """compressed-tensors: `weight_packed`, words of integers or bytes of two FP4 codes."""
    weight = parts.take(".weight_packed", "I32", "U8")
    if weight.dtype == "U8":
        scale = parts.take(".weight_scale", "U8", "F8_E4M3", "F8_E8M0")
        return _fp4(parts, weight, scale, parts.maybe(".weight_global_scale", "F32"), divided=True)
    scale, said = parts.take(".weight_scale", *FLOATS), parts.take(".weight_shape", "I64", "I32")
    shape = tuple(int(each) for each in said.read().reshape(-1))
    if (
        len(shape) != 2
        or len(weight.shape) != 2
        or not 0 < shape[1] <= weight.shape[-1] * 32
        or shape[0] != weight.shape[0]
    ):
        raise parts.misfit(said)
    rows, columns = shape
    bits, groups = weight.shape[1] * 32 // columns, scale.shape[-1] if len(scale.shape) == 2 else 0
    order, zeros = parts.maybe(".weight_g_idx", "I32", "I64"), parts.maybe(".weight_zero_point", "I32")
    if bits not in range(2, 9) or weight.shape[1] != -(-columns * bits // 32):
        raise parts.misfit(weight)
    return _signed(parts, weight, scale, zeros, order, (rows, columns), bits, groups)


def _signed(
    parts: Parts, weight: Stored, scale: Stored, zeros: Stored | None, order: Stored | None,
    shape: tuple[int, int], bits: int, groups: int,
) -> Quantized:  # fmt: skip
    """Integers of compressed-tensors, with a scale for a row or a group of columns."""
    rows, columns = shape
    size = -(-columns // groups) if groups else 0
    if scale.shape not in ((rows, groups), (1,), (), (1, 1)) or (groups and -(-columns // size) != groups):
        raise parts.misfit(scale)
    packed_zeros = zeros is not None and zeros.dtype == "I32"
    if zeros is not None and zeros.shape != ((-(-rows * bits // 32), groups) if packed_zeros else scale.shape):
        raise parts.misfit(zeros)
    if order is not None and order.shape != (columns,):
        raise parts.misfit(order)
    found = (
        {"weight": weight, "scale": scale} | ({"zeros": zeros} if zeros else {}) | ({"order": order} if order else {})
    )
    kind = kept_type(bits, columns, size or columns, symmetric=zeros is None, in_order=order is None)
    return Signed(
        parts.path, f"{parts.stem}.weight", shape, f"compressed-tensors, {bits} bits", found, "F16", kind, bits,
        size or columns,
    )  # fmt: skip


@dataclass(frozen=True)
class Signed(Integers):
    """Integers of compressed-tensors: signed ones, and their zero points, to which half their range is added."""

    def steps(self) -> tuple[Callable[[slice], Steps], AnyArray]:
        rows, columns = self.shape
        scales = np.broadcast_to(self.floats("scale").reshape(-1, self._groups), (rows, self._groups))
        half, weight = 1 << self.bits - 1, self.parts["weight"]
        zeros = np.full(scales.shape, half, np.int16)
        if (stored := self.parts.get("zeros")) is not None:
            if stored.dtype == "I32":
                zeros = unpack(stored.read().T, self.bits)[:, :rows].T
            else:
                zeros = np.broadcast_to(stored.read().astype(np.int16).reshape(-1, self._groups) + half, scales.shape)
        raw = weight.read()

        def take(chosen: slice) -> Steps:
            if weight.dtype == "I8":
                codes = raw[chosen].astype(np.int16) + np.int16(half)
            else:
                codes = unpack(raw[chosen], self.bits)[:, :columns]
            return Steps(codes, scales[chosen], zeros[chosen])

        if "order" not in self.parts:
            return take, np.arange(columns) // self.group_size
        order = self.parts["order"].read().astype(np.int64)
        if not ((order >= 0) & (order < self._groups)).all():
            raise self.wrong("has inputs that belong to groups that are not there")
        return take, order

    @property
    def _groups(self) -> int:
        shape = self.parts["scale"].shape
        return shape[-1] if len(shape) == 2 else 1


def _scaled(parts: Parts) -> Quantized:
    """`weight` with `weight_scale`, or with `weight_scale_inv`, which multiplies as well: FP8, integers or FP4."""
    suffix = parts.scale.removeprefix(parts.stem)
    if parts.has(".weight_packed"):
        return _packed(parts)
    scale, weight = parts.take(suffix), parts.take(".weight", *FP8, "I8", "U8")
    if weight.dtype == "U8":
        factor = parts.take(".weight_scale_2", "F32") if scale.dtype == "F8_E4M3" else None
        return _fp4(parts, weight, scale, factor, divided=False)
    if weight.dtype == "I8":
        if len(weight.shape) != 2:
            raise parts.misfit(weight)
        rows, columns = weight.shape
        groups = scale.shape[-1] if len(scale.shape) == 2 else 0
        zeros = parts.maybe(".weight_zero_point", "I8")
        return _signed(parts, weight, scale, zeros, None, (rows, columns), 8, groups)
    parts.maybe(".weight_zero_point")
    return _fp8(parts, weight, scale, f"{parts.stem}.weight")


def _fp8(parts: Parts, weight: Stored, scale: Stored, name: str) -> Quantized:
    """Scales of the whole matrix, of rows, or of blocks: block sizes follow from the shapes."""
    *lead, rows, columns = weight.shape if len(weight.shape) in (2, 3) else (0, 0)
    if scale.dtype not in (*FLOATS, "F8_E8M0", "U8"):
        raise parts.misfit(scale)
    if prod(scale.shape) == prod(lead) == 1:
        block = (rows, columns)
    elif scale.shape == (rows,) and not lead:
        block = (1, columns)
    elif len(scale.shape) == len(weight.shape) and scale.shape[:-2] == tuple(lead):
        block = (_block(rows, scale.shape[-2]), _block(columns, scale.shape[-1]))
    else:
        raise parts.misfit(scale)
    if 0 in block:
        raise parts.misfit(scale)
    kind = ROUNDED if columns % BLOCK == 0 else None
    found = {"weight": weight, "scale": scale}
    return Fp8(weight.path, name, weight.shape, "FP8", found, "F16", kind, block, weight.dtype)


def _block(size: int, count: int) -> int:
    """The values of a block, of which the last may be shorter: a power of two if several fit. 0: none fits."""
    if count == 1:
        return size
    least = -(-size // count) if count else 0
    power = 1 << (least - 1).bit_length() if least else 0
    return next((each for each in (power, least) if each and -(-size // each) == count), 0)


def _fp4(parts: Parts, weight: Stored, scale: Stored, factor: Stored | None, *, divided: bool) -> Quantized:
    shape = (*weight.shape[:-1], 2 * prod(weight.shape[-1:]))
    size = 16 if scale.dtype == "F8_E4M3" else BLOCK
    if len(shape) not in (2, 3) or scale.shape != (*shape[:-1], shape[-1] // size) or shape[-1] % size:
        raise parts.misfit(scale)
    if factor is not None and prod(factor.shape) != 1:
        raise parts.misfit(factor)
    found = {"weight": weight, "scale": scale} | ({"factor": factor} if factor else {})
    name = "NVFP4" if size == 16 else "MXFP4"
    return Fp4(weight.path, f"{parts.stem}.weight", shape, name, found, "F16", fp4_type(name, shape[-1]), divided)


def _experts(parts: Parts) -> Quantized:
    """Stacked experts in FP8: `experts.down_proj` with `experts.down_proj_scale_inv`."""
    scale = parts.take("_scale_inv")
    return _fp8(parts, parts.take("", *FP8), scale, parts.stem)


def _int8(parts: Parts) -> Quantized:
    """bitsandbytes' int8: a row's largest magnitude is 127 steps."""
    scale, weight = parts.take(".SCB", "F32"), parts.take(".weight", "I8")
    if len(weight.shape) != 2 or scale.shape != weight.shape[:1]:
        raise parts.misfit(scale)
    kind = kept_type(8, weight.shape[1], weight.shape[1], symmetric=True)
    found = {"weight": weight, "scale": scale}
    return Rows(
        weight.path, f"{parts.stem}.weight", weight.shape, "bitsandbytes, 8 bits", found, "F16", kind, 8,
        weight.shape[1],
    )  # fmt: skip


@dataclass(frozen=True)
class Rows(Integers):
    """bitsandbytes' rows of signed bytes."""

    def steps(self) -> tuple[Callable[[slice], Steps], AnyArray]:
        raw, scales = self.parts["weight"].read(), self.floats("scale")[:, None] / np.float32(127)
        take = lambda chosen: Steps(raw[chosen].astype(np.int16), scales[chosen], None)  # noqa: E731
        return take, np.zeros(self.shape[1], np.int64)


def _table(parts: Parts) -> Quantized:
    """bitsandbytes' NF4 and FP4."""
    stored = parts.like(".quant_state.bitsandbytes__")
    said = parse_object(stored.read().tobytes(), f"{stored.path}: {shown(stored.name)}")
    found = {"weight": parts.take("", "U8"), "absmax": parts.take(".absmax", "U8", "F32"),
             "quant_map": parts.take(".quant_map", "F32")}  # fmt: skip
    nested = found["absmax"].dtype == "U8"
    if nested:
        found |= {each: parts.take(f".{each}", "F32") for each in ("nested_absmax", "nested_quant_map")}
    shape, sizes = _numbers(said, "shape"), _numbers(said, "blocksize") + _numbers(said, "nested_blocksize")
    values = prod(shape)
    if len(shape) != 2 or prod(found["weight"].shape) * 2 != values + values % 2 or not sizes:
        raise parts.misfit(found["weight"])
    blocks = -(-values // sizes[0])
    fits = prod(found["absmax"].shape) == blocks and found["quant_map"].shape == (16,)
    if nested:
        fits = fits and len(sizes) == 2 and prod(found["nested_absmax"].shape) == -(-blocks // sizes[1])
        fits = fits and found["nested_quant_map"].shape == (256,)
    offset = said.get("nested_offset", 0.0) if nested else 0.0
    if not fits or not isinstance(offset, int | float) or not abs(offset) < 1 << 31:
        raise parts.misfit(found["absmax"])
    return Table(
        parts.path, parts.stem, (shape[0], shape[1]), f"bitsandbytes, {stored.name.rpartition('__')[2].upper()}", found,
        "F16", ROUNDED if shape[1] % BLOCK == 0 else None, sizes[0], sizes[1] if nested else 0, float(offset),
    )  # fmt: skip


def _numbers(said: dict[str, Any], key: str) -> list[int]:
    """Counts that a state has under a name; none if there are others."""
    value = said.get(key, [])
    listed = value if isinstance(value, list) else [value]
    fit = all(isinstance(each, int) and not isinstance(each, bool) and 0 < each < 1 << 31 for each in listed)
    return listed if fit else []


_MAKERS: dict[str, Callable[[Parts], Quantized]] = {
    ".weight_packed": _packed, ".weight_scale": _scaled, ".weight_scale_inv": _scaled, "_scale_inv": _experts,
    ".SCB": _int8, ".absmax": _table,
}  # fmt: skip
