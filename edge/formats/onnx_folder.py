"""Reader of ONNX folders: the manifest, and the check that files are complete.

`edge.json` lists the files with sizes and hashes, and the source's tensors. `metadata.gguf` holds the hyperparameters,
tokenizer and chat template without weights, for the readers of GGUF files.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge.devices.regular import read_regular
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import BLOCK_TYPES
from edge.formats.compiled import Compiled
from edge.formats.gguf import MAX_COUNT, MAX_NAME, GGUFFile, TensorInfo, read_gguf
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.values import brief, parse

FORMAT = 1
MANIFEST, METADATA, WEIGHTS = "edge.json", "metadata.gguf", "model.onnx.data"
FORM_TYPES = {"NF4": (64, 36), "INT8": (1, 1)}  # types that GGUF does not have: values and bytes of a block
FACTORS = "rope_"  # prefix of the names of metadata.gguf's tensors, which scale RoPE

# Limits of edge.json. A tensor takes a hundred bytes and five commas, an outlier ten bytes and one comma. Commas and
# brackets bound the size of the parsed objects: an empty list takes two bytes in JSON and sixty in Python.
_MOST_BYTES, _MOST_COMMAS, _MOST_BRACKETS, _MOST_FILES = 4 << 20, 1 << 18, 1 << 16, 64
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_TENSOR = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TYPES = {each.name: (code, each.values, each.nbytes) for code, each in BLOCK_TYPES.items()}
_TYPES |= {name: (-1, *each) for name, each in FORM_TYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of `edge.json`."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorInfo]  # without bytes; types are the source's unless the method changed them
    outliers: dict[str, tuple[int, ...]]  # columns that LLM.int8() keeps in float32, by names of `find_tensors`
    source: str
    npu: Compiled | None = None  # context binaries, if any

    def graph(self, kv_dtype: str, observed: bool) -> str:
        """The graph file for this KV dtype. Raises UnsupportedError if the folder has none."""
        name = graph_name(kv_dtype, observed)
        if name not in self.files:
            raise UnsupportedError(f"the folder has no {name}: convert the model again")
        return name


def graph_name(kv_dtype: str, observed: bool) -> str:
    """`model.onnx` keeps KV rows in float32; `model.f16.observed.onnx` in float16, and outputs queries.

    Graphs with integer rows always output queries.
    """
    middle = ("" if kv_dtype == "f32" else f".{kv_dtype}") + (".observed" if observed and kv_dtype[0] == "f" else "")
    return f"model{middle}.onnx"


def is_model_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check the files' sizes.

    Raises ModelFormatError if it is damaged or a file is missing or of another size; UnsupportedError for a format of a
    later version.
    """
    path = folder / MANIFEST
    try:
        manifest = _parsed(_read(path))
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f" ({error})" if isinstance(error, _DamagedError) else ""
        raise ModelFormatError(f"{path}: not what edge writes{what}: the file is damaged") from None
    for name, record in manifest.files.items():
        found = folder / name
        if not found.is_file() or found.stat().st_size != record.bytes:
            raise ModelFormatError(f"{found}: missing, or not the {record.bytes} bytes that it should be")
    return manifest


def check_content(folder: Path, manifest: Manifest, name: str, sha256: str) -> None:
    """Raise ModelFormatError unless a file has the hash that it was written with."""
    if sha256 != manifest.files[name].sha256:
        raise ModelFormatError(f"{folder / name}: not the file that was written (its hash differs): convert it again")


def read_folder(folder: Path) -> GGUFFile:
    """The header of the folder's source model. Its tensors have no bytes, except RoPE's factors."""
    manifest = read_manifest(folder)
    file = read_gguf(folder / METADATA)
    check_content(folder, manifest, METADATA, fingerprint(folder / METADATA).sha256)
    for name, info in file.tensors.items():
        known = manifest.tensors.get(name)
        if not name.startswith(FACTORS) or known is None or (known.shape, known.type) != (info.shape, info.type):
            raise ModelFormatError(f"{file.path}: has a tensor {name!r} that {MANIFEST} does not: the file is damaged")
    return replace(file, tensors=manifest.tensors | file.tensors, folder=folder, compiled=manifest.npu)


def content_hash(file: GGUFFile) -> str:
    """The SHA-256 over the hashes of all of a model's files, hexadecimal. Raises InputError, ModelFormatError."""
    folder = file.folder
    files = [file.path] if folder is None else [folder / name for name in sorted(read_manifest(folder).files)]
    import hashlib  # loads OpenSSL

    return hashlib.sha256("".join(fingerprint(path).sha256 for path in files).encode()).hexdigest()


class _DamagedError(ValueError):
    """States why edge.json is not valid."""


def _read(path: Path) -> bytes:
    data = read_regular(path, _MOST_BYTES + 1)
    brackets = data.count(b"[") + data.count(b"{")
    if len(data) > _MOST_BYTES or data.count(b",") > _MOST_COMMAS or brackets > _MOST_BRACKETS:
        raise _DamagedError("it is too large")
    return data


def _parsed(data: bytes) -> Manifest:
    said = json.loads(data)
    if not isinstance(said, dict):
        raise _DamagedError("no object")
    if said["format"] != FORMAT:
        raise UnsupportedError(f"format {brief(said['format'])}: this version of edge reads {FORMAT}")
    files, tensors, source = said["files"], said["tensors"], said["source"]
    if not (isinstance(files, dict) and isinstance(tensors, list) and isinstance(source, str)):
        raise _DamagedError("files, tensors or source is missing")
    if len(files) > _MOST_FILES or len(tensors) > MAX_COUNT:
        raise _DamagedError(f"{len(files)} files and {len(tensors)} tensors")
    manifest = Manifest(
        files={name: _file(name, each) for name, each in files.items()},
        tensors={info.name: info for info in map(_tensor, tensors)},
        outliers=_outliers(said.get("outliers", {})),
        source="".join(filter(str.isprintable, source[:255])),
        npu=None if said.get("npu") is None else parse(Compiled, said["npu"], "npu", strict=True),
    )
    if manifest.npu and (missing := set(manifest.npu.contexts) - set(manifest.files)):
        raise _DamagedError(f"no {min(missing)}")
    if len(manifest.tensors) != len(tensors):
        raise _DamagedError("a tensor appears twice")
    if missing := {METADATA, WEIGHTS} - set(manifest.files):
        raise _DamagedError(f"no {min(missing)}")
    return manifest


def _file(name: str, said: Any) -> FileRecord:
    if not _FILE.fullmatch(name):
        raise _DamagedError(f"{brief(name)} is no file of the folder")
    size, sha256 = said["bytes"], said["sha256"]
    if not _is_count(size, 1 << 48) or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _DamagedError(f"the size or hash of {name}")
    return FileRecord(size, sha256)


def _tensor(said: Any) -> TensorInfo:
    """Parse a tensor, with the header checks of the GGUF reader: rows of whole blocks, and a possible size."""
    name, kind, shape = said
    if not isinstance(name, str) or not _TENSOR.fullmatch(name):
        raise _DamagedError(f"a tensor called {brief(name)}")
    if not isinstance(kind, str) or kind not in _TYPES or not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise _DamagedError(f"the type or shape of {name}")
    code, block, size = _TYPES[kind]
    if not all(_is_count(extent, 1 << 40) and extent for extent in shape) or not math.prod(shape) < 1 << 48:
        raise _DamagedError(f"the shape of {name}")
    if shape[0] % block:
        raise _DamagedError(f"the shape of {name}")
    return TensorInfo(name, tuple(shape), kind, code, 0, math.prod(shape) // block * size)


def _outliers(said: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(said, dict):
        raise _DamagedError("outliers")
    for name, channels in said.items():
        if not _TENSOR.fullmatch(name) or not isinstance(channels, list):
            raise _DamagedError(f"outliers of {brief(name)}")
        if not all(_is_count(each, 1 << 32) for each in channels):
            raise _DamagedError(f"outliers of {name}")
    return {name: tuple(channels) for name, channels in said.items()}


def _is_count(value: Any, below: int) -> bool:
    return type(value) is int and 0 <= value < below
