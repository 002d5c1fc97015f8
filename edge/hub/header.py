"""Reader of a remote GGUF file's header by HTTP Range, so that a plan can be made before the download."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import MAX_HEADER, CutHeaderError, GGUFFile, TensorInfo, read_gguf
from edge.formats.gguf_parts import PART, joined_header
from edge.hub.download import read_bytes
from edge.hub.repository import RemoteFile, Repository
from edge.storage import cache

_FIRST = 4 << 20  # bytes; doubled until the header is complete. Large vocabularies take 6 to 16 MiB
_FACTORS, _MOST_FACTORS = "rope_", 1 << 16  # tensors that belong to the architecture, and their bytes


def read_header(repository: Repository, file: RemoteFile) -> GGUFFile:
    """Read and check the header, including RoPE's factors, which are tensors; other weights cannot be read.

    It is cached in edge's cache folder under the file's hash. Raises DownloadError, CacheError, ModelFormatError,
    UnsupportedError.
    """
    if file.parts:
        return joined_header([read_header(repository, part) for part in file.parts])
    name = f"{repository.name}/{file.path}"
    if file.size == 0:
        raise ModelFormatError(f"{name}: the file is empty")
    try:
        path = cache.find_or_make(
            "headers", file.hash, ".gguf", lambda target: _write(repository, file, target), about=name
        )
        header = read_gguf(path, file.size, part=PART.search(file.path) is not None)
    except (ModelFormatError, UnsupportedError) as error:  # its message names a file of the cache
        raise type(error)(f"{name}: {str(error).partition('.gguf: ')[2] or error}") from None
    at, tensors = header.data_offset, dict(header.tensors)
    for info in _factors(header):
        tensors[info.name] = replace(info, offset=at)
        at += info.nbytes
    return replace(header, tensors=tensors)


def _write(repository: Repository, file: RemoteFile, target: Path) -> None:
    """Write the header, followed by the factors."""
    have, upto = 0, min(_FIRST, file.size)
    while True:
        with open(target, "ab") as out:
            read_bytes(repository, file, have, upto, out)
        try:
            header = read_gguf(target, file.size, part=PART.search(file.path) is not None)
            break
        except CutHeaderError:
            if upto >= min(MAX_HEADER, file.size):
                raise
            have, upto = upto, min(2 * upto, MAX_HEADER, file.size)
    factors = io.BytesIO()
    for info in _factors(header):
        stop = info.offset + info.nbytes
        if stop <= upto:
            factors.write(header.tensor_bytes(info).tobytes())
        else:
            read_bytes(repository, file, info.offset, stop, factors)
    os.truncate(target, header.data_offset)
    with open(target, "ab") as out:
        out.write(factors.getvalue())


def _factors(header: GGUFFile) -> list[TensorInfo]:
    found = [info for info in header.tensors.values() if info.name.startswith(_FACTORS)]
    return [info for info in found if len(info.shape) == 1 and info.nbytes <= _MOST_FACTORS]
