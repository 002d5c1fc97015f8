"""A folder with a model in ONNX: what is in it, and that it is whole.

`edge.json` lists the files with sizes and hashes and the source's tensors; `metadata.gguf` has the hyperparameters, the
tokenizer and the chat template, and no weights, so that the readers of GGUF files serve here, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge.errors import ModelFormatError, UnsupportedError
from edge.gguf_file import BLOCK_TYPES, MAX_COUNT, GGUFFile, TensorInfo, read_gguf

FORMAT = 1
MANIFEST, METADATA, WEIGHTS = "edge.json", "metadata.gguf", "model.onnx.data"
FORM_TYPES = {"NF4": (64, 36), "INT8": (1, 1)}  # types that GGUF does not have: values in a block, its bytes
_MOST_BYTES = 16 << 20  # of edge.json: a tensor takes a hundred


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `edge.json` says. tensors: name, type and shape (innermost first) of each tensor of the source; the type is
    the source's, unless a method gave it another."""

    files: dict[str, FileRecord]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    source: str
    settings: dict[str, Any]

    def graph(self, kv_dtype: str, observed: bool) -> str:
        """The file for these rows. Raises UnsupportedError if the folder has none."""
        name = graph_name(kv_dtype, observed)
        if name not in self.files:
            raise UnsupportedError(f"the folder has no {name}: convert the model again")
        return name


def graph_name(kv_dtype: str, observed: bool) -> str:
    """`model.onnx` keeps KV rows in float32; `model.f16.observed.onnx` in float16, and shows queries.

    All graphs with integer rows do that.
    """
    middle = ("" if kv_dtype == "f32" else f".{kv_dtype}") + (".observed" if observed and kv_dtype[0] == "f" else "")
    return f"model{middle}.onnx"


def is_model_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Raises ModelFormatError if it is damaged or a file is missing or of another size; UnsupportedError for a format
    of a later version."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        said = json.loads(path.read_bytes())
        if said["format"] != FORMAT:
            raise UnsupportedError(f"{path}: format {said['format']!r}: this version of edge reads {FORMAT}")
        manifest = Manifest(
            files={name: FileRecord(int(each["bytes"]), str(each["sha256"])) for name, each in said["files"].items()},
            tensors=tuple((str(name), str(kind), tuple(map(int, shape))) for name, kind, shape in said["tensors"]),
            source=str(said["source"]),
            settings=dict(said["settings"]),
        )
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelFormatError(f"{path}: not what edge writes: the file is damaged") from None
    for name, record in manifest.files.items():
        if Path(name).name != name:
            raise ModelFormatError(f"{path}: {name!r} is no file of the folder")
        found = folder / name
        if not found.is_file() or found.stat().st_size != record.bytes:
            raise ModelFormatError(f"{found}: missing, or not the {record.bytes} bytes that it should be")
    return manifest


def read_folder(folder: Path) -> GGUFFile:
    """The header of the model that a folder was made of. Its tensors have no bytes, but for RoPE's factors."""
    manifest = read_manifest(folder)
    file = read_gguf(folder / METADATA)
    types = {name: (code, block, size) for code, (name, block, size) in BLOCK_TYPES.items()}
    types |= {name: (-1, *each) for name, each in FORM_TYPES.items()}
    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape in manifest.tensors[:MAX_COUNT]:
        if kind not in types or not 1 <= len(shape) <= 4 or not all(0 < extent < 1 << 40 for extent in shape):
            raise ModelFormatError(f"{folder / MANIFEST}: tensor {name!r}: the file is damaged")
        code, block, size = types[kind]
        described = TensorInfo(name, shape, kind, code, 0, 0)
        tensors[name] = replace(described, nbytes=described.elements // block * size)
    return replace(file, tensors=tensors | file.tensors, folder=folder)
