"""The golden Hugging Face folders (see golden/folders.py), copies to change, and safetensors written by hand."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conftest import GOLDEN

from edge.errors import EdgeError
from edge.types import AnyArray

FOLDERS = GOLDEN / "folders"
NAMES = (
    "arcee", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "gpt2", "granite", "llama",
    "ministral3", "mistral", "nemotron", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
PACKED = ("awq", "gptq")
ONE_WAY = (  # these are not written
    "deepseek_v3", "falcon_mamba", "gemma4_moe", "gemma4_text", "glm4_moe_lite", "gpt_oss", "granite_experts",
    "granite_mamba", "jamba", "lfm2", "lfm2_moe", "minicpm3", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe",
)  # fmt: skip
DTYPES = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "U32": np.uint32,
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
}  # fmt: skip

Tensors = dict[str, tuple[str, AnyArray]]
"""By name: the type that the format says, and the values."""


def complaint(work: Callable[[], object]) -> str:
    """The message of the error of ours that `work` raised; empty if it raised none."""
    try:
        work()
    except EdgeError as error:
        return str(error)
    return ""


def copy_folder(name: str, target: Path) -> Path:
    shutil.copytree(FOLDERS / name, target)
    return target


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    said = json.loads(path.read_text(encoding="utf-8"))
    edit(said)
    path.write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")


def read_tensors(path: Path) -> Tensors:
    """All tensors of one safetensors file, by the letter of the format."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = (
                entry["dtype"],
                np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"]),
            )
    return found


def read_folder(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read_tensors(path)
    return found


def safetensors(header: Mapping[str, Any] | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_tensors(path: Path, tensors: Tensors) -> None:
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    path.write_bytes(
        safetensors(header, b"".join(np.ascontiguousarray(each).tobytes() for _, each in tensors.values()))
    )


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder whose weights are in one file."""
    tensors = read_tensors(folder / "model.safetensors")
    edit(tensors)
    write_tensors(folder / "model.safetensors", tensors)
