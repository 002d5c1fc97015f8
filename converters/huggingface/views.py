"""Views of a checkpoint's tensors: parts of a fused tensor, stacks of experts, other orders of rows.

A view reads its sources when it is read itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge.converters.huggingface.checkpoint import BlockTensor, CheckpointTensor, Kept, Loss
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError
from edge.types import AnyArray, FloatArray

Tensors = dict[str, CheckpointTensor]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class View:
    """A tensor made from another one."""

    whole: CheckpointTensor
    name: str
    shape: tuple[int, ...]
    make: Callable[[AnyArray], AnyArray]
    by_rows: bool = False  # `make` takes whole rows, and so blocks of them, too

    @property
    def path(self) -> Path:
        return self.whole.path

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def format(self) -> str:
        return getattr(self.whole, "format", "")

    @property
    def block_type(self) -> str | None:
        return self.whole.block_type if self.by_rows and isinstance(self.whole, BlockTensor) else None

    def read(self) -> AnyArray:
        return self.make(self.whole.read())

    def read_blocks(self) -> Kept:
        assert isinstance(self.whole, BlockTensor)
        data, loss = self.whole.read_blocks()
        return Kept(self.make(data), loss)


@dataclass(frozen=True)
class Stack:
    """Tensors of equal shape and type, stacked along a new first axis."""

    parts: Sequence[CheckpointTensor]
    name: str

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    @property
    def format(self) -> str:
        return getattr(self.parts[0], "format", "")

    @property
    def block_type(self) -> str | None:
        kinds = {part.block_type if isinstance(part, BlockTensor) else None for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else None

    def read(self) -> AnyArray:
        return self._stacked(lambda part: part.read())

    def read_blocks(self) -> Kept:
        losses = []

        def blocks(part: CheckpointTensor) -> AnyArray:
            assert isinstance(part, BlockTensor)
            data, loss = part.read_blocks()
            losses.append(loss)
            return data

        return Kept(self._stacked(blocks), sum(losses, Loss()))

    def _stacked(self, read: Callable[[CheckpointTensor], AnyArray]) -> AnyArray:
        first = read(self.parts[0])
        whole = np.empty((len(self.parts), *first.shape), first.dtype)
        whole[0] = first
        for index, part in enumerate(self.parts[1:], start=1):
            whole[index] = read(part)
        return whole


def split(tensors: Tensors, _config: Config, fused: Mapping[str, tuple[str, ...]], axis: int = 0) -> Tensors:
    """Replace the tensors of modules in `fused` by their parts, which are equal shares along an axis.

    fused: names of parts by the module name's suffix. A tensor without equal shares stays as it is.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        end, parts = next(((end, parts) for end, parts in fused.items() if module.endswith(f".{end}")), ("", ()))
        if not parts or len(tensor.shape) <= axis or tensor.shape[axis] % len(parts):
            found[name] = tensor
            continue
        for index, each in enumerate(parts):
            apart = f"{module.removesuffix(end)}{each}.{suffix}"
            found[apart] = _share(tensor, apart, index, len(parts), axis)
    return found


def stack_experts(tensors: Tensors) -> Tensors:
    """Replace the tensors of experts by stacks, each under one name: `experts.*.up_proj.weight`.

    Checkpoints have a tensor for each expert, or stacks: `experts.down_proj`, and `experts.gate_up_proj`, with the
    gate's rows first. Raises ModelFormatError if experts are missing or differ in shape.
    """
    found: Tensors = {}
    groups: dict[str, dict[int, CheckpointTensor]] = {}
    for name, tensor in tensors.items():
        if each := _EXPERT.fullmatch(name):
            groups.setdefault(f"{each[1]}.*.{each[3]}", {})[int(each[2])] = tensor
        elif name.endswith("experts.gate_up_proj") and len(tensor.shape) == 3 and tensor.shape[1] % 2 == 0:
            for index, part in enumerate(("gate_proj", "up_proj")):
                apart = f"{name.removesuffix('gate_up_proj')}*.{part}.weight"
                found[apart] = _share(tensor, apart, index, 2, 1)
        elif name.endswith("experts.down_proj"):
            found[f"{name.removesuffix('down_proj')}*.down_proj.weight"] = tensor
        else:
            found[name] = tensor
    for name, parts in groups.items():
        first = next(iter(parts.values()))
        if sorted(parts) != list(range(len(parts))):
            missing = next(index for index in range(len(parts)) if index not in parts)
            raise ModelFormatError(f"{first.path}: the tensor {name.replace('*', str(missing))} is missing")
        odd = next((each for each in parts.values() if (each.dtype, each.shape) != (first.dtype, first.shape)), None)
        if odd is not None:
            raise ModelFormatError(f"{odd.path}: {odd.name} has shape {odd.shape} instead of {first.shape}")
        found[name] = Stack([parts[index] for index in range(len(parts))], name)
    return found


def without_middle(tensor: CheckpointTensor) -> CheckpointTensor:
    """View the kernels of a depthwise convolution, stored as [channels, 1, width], as [channels, width]."""
    if len(tensor.shape) != 3 or tensor.shape[1] != 1:
        return tensor
    channels, _, width = tensor.shape
    return View(tensor, tensor.name, (channels, width), lambda array: array.reshape(channels, width))


def floats(tensor: CheckpointTensor, make: Callable[[FloatArray], FloatArray]) -> CheckpointTensor:
    """A function of a tensor's values, in float32."""
    return _Floats(tensor, tensor.name, tensor.shape, make)


@dataclass(frozen=True)
class _Floats(View):
    @property
    def dtype(self) -> str:
        return "F32"

    def read(self) -> AnyArray:
        array = self.whole.read()
        if self.whole.dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return self.make(array.astype(np.float32))


def rows_from(tensor: CheckpointTensor, first: int) -> CheckpointTensor:
    """The tensor without its rows before `first`."""
    shape = max(0, tensor.shape[0] - first), *tensor.shape[1:]
    return View(tensor, tensor.name, shape, lambda array: array[first:])


def reordered(tensor: CheckpointTensor, order: AnyArray, axis: int = 0) -> CheckpointTensor:
    """The tensor with its rows, or columns, in another order. A tensor of another size stays as it is."""
    if len(tensor.shape) <= axis or tensor.shape[axis] != len(order):
        return tensor
    return View(tensor, tensor.name, tensor.shape, lambda array: np.take(array, order, axis), axis == 0)


def _share(tensor: CheckpointTensor, name: str, index: int, count: int, axis: int) -> View:
    """The `index`-th of `count` equal shares along an axis."""
    size = tensor.shape[axis] // count
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
    place = (*[slice(None)] * axis, slice(index * size, (index + 1) * size))
    return View(tensor, name, shape, lambda array: array[place], axis < len(shape) - 1)
