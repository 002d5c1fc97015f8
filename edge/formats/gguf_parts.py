"""Models in several GGUF files, `model-00001-of-00003.gguf`: the first has the header, each some of the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge.errors import InputError, ModelFormatError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.types import AnyArray

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MOST = 1000
_KEYS = "split."  # of fields that number parts


def names_of_parts(name: str) -> list[str]:
    """The names of all parts of a model, given the name of one; empty if it is not the name of a part."""
    found = PART.search(name)
    if not found or not 0 < int(found[1]) <= int(found[2]) <= _MOST:
        return []
    stem, count = name[: found.start()], int(found[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def whole_name(name: str) -> str:
    """The name of the whole model, given the name of a part."""
    return PART.sub(".gguf", name)


def find_parts(path: Path) -> list[Path]:
    """The parts of a model, given one of them; empty if it is not a part. Raises InputError if some are missing."""
    parts = [path.with_name(name) for name in names_of_parts(path.name)]
    if missing := next((each for each in parts if not each.is_file()), None):
        raise InputError(f"{path} is one of {len(parts)} parts of a model: {missing.name} is missing beside it")
    return parts


def joined_header(headers: Sequence[GGUFFile]) -> GGUFFile:
    """The header of the whole model, not its weights. Raises ModelFormatError if the parts do not fit each other."""
    first, count = headers[0], len(headers)
    stated = [(each.metadata.get("split.no"), each.metadata.get("split.count")) for each in headers]
    if stated != [(number, count) for number in range(count)]:
        raise ModelFormatError(f"{first.path}: its {count} parts are not those of one model, in order")
    tensors = {name: info for each in headers for name, info in each.tensors.items()}
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != sum(len(each.tensors) for each in headers) or len(tensors) != total:
        raise ModelFormatError(f"{first.path}: its parts have {len(tensors)} tensors, and should have {total}")
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith(_KEYS)}
    return replace(first, metadata=metadata, tensors=tensors, size=sum(each.size for each in headers))


def join(paths: Sequence[Path], target: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write the parts as one file, atomically; one tensor is in memory at a time. Raises InputError, ModelFormatError,
    UnsupportedError."""
    parts = [read_gguf(path, part=True) for path in paths]
    whole = joined_header(parts)

    def data() -> Iterator[AnyArray]:
        return (part.tensor_bytes(info) for part in parts for info in part.tensors.values())

    write_gguf(target, fields_of(whole), planned_as(whole.tensors.values()), data(), progress)
