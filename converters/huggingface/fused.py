"""Split tensors that hold several matrices, stacked by rows, and that GGUF keeps apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.types import AnyArray


@dataclass(frozen=True)
class Share:
    """The `index`-th of `count` equal shares of a tensor's rows."""

    whole: CheckpointTensor
    name: str
    index: int
    count: int

    @property
    def path(self) -> Path:
        return self.whole.path

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0] // self.count, *self.whole.shape[1:]

    def read(self) -> AnyArray:
        first = self.index * self.shape[0]
        return self.whole.read()[first : first + self.shape[0]]


def part(tensors: Mapping[str, CheckpointTensor], fused: Mapping[str, tuple[str, ...]]) -> dict[str, CheckpointTensor]:
    """The tensors, with those of modules in `fused` replaced by their parts.

    fused: names of parts by the module name's suffix. A tensor without equal shares stays as it is.
    """
    found: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        end, parts = next(((end, parts) for end, parts in fused.items() if module.endswith(f".{end}")), ("", ()))
        if not parts or not tensor.shape or tensor.shape[0] % len(parts):
            found[name] = tensor
            continue
        for index, each in enumerate(parts):
            apart = f"{module.removesuffix(end)}{each}.{suffix}"
            found[apart] = Share(tensor, apart, index, len(parts))
    return found
