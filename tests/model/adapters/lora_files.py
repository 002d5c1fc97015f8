"""Random LoRA adapters, written with the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from edge.model.model import Model
from edge.types import AnyArray

Edit = Callable[[dict[str, AnyArray]], None]
"""Changes the tensors, by their names, before they are written."""


def random_tensors(model: Model, rank: int, only: Iterable[str] = (), seed: int = 1) -> dict[str, AnyArray]:
    """A and B of all matrices in layers but convolutions, or of those whose names contain one of `only`: B A is as
    large as a fifth of a matrix of the model."""
    random, tensors, chosen = np.random.default_rng(seed), {}, tuple(only)
    for name, info in model.file.tensors.items():
        if not name.startswith("blk.") or len(info.shape) != 2 or not name.endswith(".weight"):
            continue
        if not any(each in name for each in chosen) if chosen else "conv" in name and info.type == "F32":
            continue
        columns, rows = info.shape
        tensors[f"{name}.lora_a"] = (random.standard_normal((rank, columns)) / np.sqrt(columns)).astype(np.float32)
        tensors[f"{name}.lora_b"] = (random.standard_normal((rows, rank)) * 0.1 / np.sqrt(rank)).astype(np.float32)
    return tensors


def write_adapter(
    path: Path, model: Model, rank: int = 8, *, alpha: float | None = None, only: Iterable[str] = (), seed: int = 1,
    kind: str = "F32", edit: Edit | None = None, architecture: str | None = None, type: str = "adapter",
    adapter: str = "lora", alora: bool = False,
) -> Path:  # fmt: skip
    """alpha: None is twice the rank. kind: of all tensors whose rows divide into its blocks; of the others, F32."""
    tensors = random_tensors(model, rank, only, seed)
    if edit:
        edit(tensors)
    writer = gguf.GGUFWriter(path, architecture or model.spec.architecture)
    writer.add_type(type)
    writer.add_string("adapter.type", adapter)
    writer.add_float32("adapter.lora.alpha", 2.0 * rank if alpha is None else alpha)
    writer.add_name(path.stem)
    if alora:
        writer.add_array("adapter.alora.invocation_tokens", [1, 2, 3])
    for name, values in tensors.items():
        chosen = GGMLQuantizationType[kind if kind in ("F16", "BF16") or values.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
