"""MLX: modules with `weight`, words of 32 bits, `scales`, and `biases` in the affine mode.

    weight[out, in] = scales[out, group] · quant[out, in] + biases[out, group]

The other modes are MXFP4, MXFP8 and NVFP4 without a factor. Names and layouts of tensors are those of mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.quantized.floats import Fp4, Fp8, fp4_type
from edge.converters.huggingface.quantized.matrix import ROUNDED, Integers, Quantized, Steps, kept_type, unpack
from edge.converters.huggingface.quantized.parts import Parts
from edge.converters.huggingface.views import View, floats
from edge.errors import UnsupportedError
from edge.formats.blocks import BLOCK, FLOATS
from edge.formats.safetensors import Stored
from edge.types import AnyArray
from edge.values import brief

_BITS, _SIZES = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
_FLOATS = (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))
_MODES = ("affine", *(mode for mode, _, _ in _FLOATS))
_NORMS = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")


def find_mlx(tensors: dict[str, Stored], settings: Config, config: Config) -> dict[str, CheckpointTensor]:
    """The quantized matrices, which are removed from `tensors`, and others as Hugging Face has them.

    settings: the part of config.json on MLX, which may have exceptions by module. Raises UnsupportedError,
    ModelFormatError.
    """
    found = _as_published(tensors, config)
    for name in [name for name in tensors if name.endswith(".scales")]:
        stem = name.removesuffix(".scales")
        own = settings.get(stem)
        said = Config(settings.path, {**settings.values, **(own if isinstance(own, dict) else {})})
        made = _matrix(Parts(tensors, name, stem), said)
        found[made.name] = made
    return found


def _as_published(tensors: dict[str, Stored], config: Config) -> dict[str, CheckpointTensor]:
    """Convolutions with their axes in the published order, and Qwen3.5's norms without the 1 that mlx-lm adds."""
    kind = str((config.part("text_config") or config).get("model_type", config.get("model_type")))
    found: dict[str, CheckpointTensor] = {}
    for name, stored in tensors.items():
        if name.endswith((".conv1d.weight", ".conv.weight")) and len(stored.shape) == 3 and stored.shape[2] == 1:
            channels, width, _ = stored.shape
            found[name] = View(stored, name, (channels, 1, width), lambda array: array.swapaxes(1, 2))
        elif kind.startswith("qwen3_5") and name.endswith(_NORMS) and len(stored.shape) == 1:
            found[name] = floats(stored, lambda array: array - np.float32(1))
    return found


def _matrix(parts: Parts, said: Config) -> Quantized:
    mode, bits, size = said.get("mode", "affine"), said.get("bits", 4), said.get("group_size", 64)
    whole = isinstance(bits, int) and isinstance(size, int)
    if mode not in _MODES or not whole or bits not in _BITS or size not in _SIZES:
        how = f"{brief(mode)}, {brief(bits)} bits in groups of {brief(size)}"
        raise UnsupportedError(f"{said.path}: MLX's {how} is not supported: convert the original model")
    weight, scale = parts.take(".weight", "U32"), parts.take(".scales", *FLOATS, "U8")
    name = f"{parts.stem}.weight".replace(".switch_mlp.", ".experts.*.")
    *lead, words = weight.shape or (0,)
    columns = words * 32 // bits
    shape = (*lead, columns)
    if len(lead) not in (1, 2) or columns % size or scale.shape != (*lead, columns // size):
        raise parts.misfit(scale)
    found = {"weight": weight, "scale": scale}
    if mode == "affine":
        found["low"] = parts.take(".biases", *FLOATS)
        if found["low"].shape != scale.shape:
            raise parts.misfit(found["low"])
        kind = kept_type(bits, columns, size, symmetric=False)
        return Affine(weight.path, name, shape, f"MLX, {bits} bits", found, "F16", kind, bits, size)
    if (mode, bits, size) not in _FLOATS or scale.dtype != "U8":
        raise parts.misfit(scale)
    how = f"MLX, {mode.upper()}"
    if mode == "mxfp8":
        return Fp8(weight.path, name, shape, how, found, "F16", ROUNDED, (1, BLOCK))
    return Fp4(weight.path, name, shape, how, found, "F16", fp4_type(mode.upper(), columns))


@dataclass(frozen=True)
class Affine(Integers):
    """Integers of MLX: scale · code + offset."""

    def steps(self) -> tuple[Callable[[slice], Steps], AnyArray]:
        columns = self.shape[-1]
        words = self.parts["weight"].read().reshape(-1, self.parts["weight"].shape[-1])
        scales, low = (self.floats(part).reshape(len(words), -1) for part in ("scale", "low"))

        def take(chosen: slice) -> Steps:
            return Steps(unpack(words[chosen], self.bits), scales[chosen], None, low[chosen])

        return take, np.arange(columns) // self.group_size
