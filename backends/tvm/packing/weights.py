"""The packed file of weights: a model's tensors, reordered once for the kernels, then mapped.

Mapped weights are file pages: processes share them, and the system may drop and reread them. The file lies in the cache
folder under a key of everything that it depends on; `edge.storage.cache` checks that it is complete.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from edge.backends.tvm.packing.blocks import BAND, BLOCKS, FloatBlock, IntegerBlock
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import TRANSPOSED, PackedLayout, Place
from edge.backends.tvm.sources import source_hash
from edge.devices.platform import map_file
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.tensors import Source
from edge.storage import cache
from edge.storage.fingerprint import Fingerprint, fingerprint
from edge.types import AnyArray, Progress

_BLOCK = 2 << 20  # bytes that Linux may map as one page
_SLICE = 4 << 20  # bytes of a tensor that are packed at once, which limits the memory that packing takes
_HASHING = 0.1  # share of the time of packing, for the progress bar
_HUGEPAGE, _POPULATE_READ = 14, 22  # of Linux's madvise

Ranges = Sequence[tuple[int, int]]  # first byte and length


class PackedWeights(NamedTuple):
    """The file of packed weights, and its bytes, uint8 [nbytes], mapped read-only."""

    path: Path
    bytes: AnyArray


def open_weights(
    file: GGUFFile, layout: PackedLayout, progress: Progress | None = None, resident: Ranges | None = None,
    *, experts: bool = True,
) -> PackedWeights:  # fmt: skip
    """Map the packed file; pack it first if the cache folder lacks it.

    resident: ranges to bring into memory at once; None: everything. experts: map their matrices, too. Raises EdgeError
    if the cache folder cannot be written.
    """
    found = fingerprint(file.path, progress and (lambda part: progress(_HASHING * part)))

    def write(target: Path) -> None:
        pack_weights(file, layout, target, progress and (lambda part: progress(_HASHING + (1 - _HASHING) * part)))
        found.check()

    path = cache.find_or_make(
        "weights", _key(file, layout, found), ".bin", write, about=file.path.name, expected=layout.nbytes
    )
    with open(path, "rb") as data:
        length = layout.nbytes if experts else layout.nbytes_without_experts
        mapped = map_file(data.fileno(), length, at_once=False)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without large pages
            mapped.madvise(_HUGEPAGE)
        with suppress(OSError):  # before 5.14: pages are mapped when they are first read, by ten times as many faults
            for start, length in [(0, len(mapped))] if resident is None else resident:
                mapped.madvise(_POPULATE_READ, start, length)
    return PackedWeights(path, np.frombuffer(mapped, np.uint8))


def _key(file: GGUFFile, layout: PackedLayout, found: Fingerprint) -> str:
    """A hash of everything that the packed bytes depend on: the model, the places of its tensors, and the packing
    code."""
    how = source_hash("packing")
    places = [(name, each.block and each.block.name, each.quants, each.scales) for name, each in layout.places.items()]
    depends = (how, sorted(places), list(file.tensors.values()), found.sha256)
    return hashlib.sha256(repr(depends).encode()).hexdigest()[:32]


def pack_weights(file: GGUFFile, layout: PackedLayout, target: Path, progress: Progress | None = None) -> None:
    """Write the packed file."""
    with open(target, "wb") as out:
        write_weights(file, layout, out, 0, progress)
    _reread(target)


def write_weights(
    file: GGUFFile, layout: PackedLayout, out: BinaryIO, start: int, progress: Progress | None = None
) -> None:
    """Write the packed bytes into a new file from `start` on."""
    done = 0
    out.truncate(start + layout.nbytes)
    with open(file.path, "rb") as source:
        for place in layout.places.values():
            if place.shared:
                continue
            for written in _pack_tensor(source, file.tensors[place.source.tensor], place, out, start):
                done += written
                if progress:  # often: it may raise, to end the packing of a large matrix
                    progress(min(1.0, done / layout.nbytes))
    out.flush()


def _reread(path: Path) -> None:
    """Read the file again, so that the page cache holds it in large pages, which are cheaper to map than small ones."""
    if sys.platform != "linux":
        return
    with open(path, "rb") as file, suppress(OSError), mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped.madvise(_HUGEPAGE)
        for start in range(0, len(mapped), _BLOCK):
            mapped[start]  # read a block
            mapped.madvise(mmap.MADV_DONTNEED, start, min(_BLOCK, len(mapped) - start))


def _pack_tensor(source: BinaryIO, info: TensorInfo, place: Place, out: BinaryIO, start: int) -> Iterator[int]:
    """Write a tensor in slices, and yield the bytes of each."""
    rows, unit = place.source.rows, place.unit
    if place.source.transposed:
        yield from _pack_transposed(source, info, place, out, start)
        return
    row_bytes = info.nbytes * place.columns // info.elements
    whole = BAND * unit if place.halved else unit
    step = unit if place.stride else max(1, _SLICE // (whole * row_bytes)) * whole
    quants_at, scales_at = start + place.quants, start + place.scales
    for first in range(0, rows, step):
        if place.stride:
            moved = start + first // unit * place.stride
            quants_at, scales_at = place.quants + moved, place.scales + moved
        raw = _read_rows(source, info.offset, row_bytes, place.source, first, min(step, rows - first))
        padded = pad_rows(raw, unit, place.interleaved)
        if place.block is None:
            out.seek(quants_at)
            written = out.write(padded.tobytes())
            quants_at += written
            yield written
            continue
        if isinstance(place.block, IntegerBlock) and info.type != place.block.stored:
            from edge.model.rounding import round_to_q8_0  # here: encoders need it

            padded = round_to_q8_0(padded, info.type)
        quants, scales = place.block.pack(padded.reshape(len(padded), -1, place.block.raw_bytes), info.factor)
        for at, packed in ((quants_at, quants), (scales_at, scales)):
            out.seek(at)
            out.write(packed.tobytes())
        quants_at, scales_at = quants_at + quants.nbytes, scales_at + scales.nbytes
        yield quants.nbytes + scales.nbytes


def _pack_transposed(source: BinaryIO, info: TensorInfo, place: Place, out: BinaryIO, start: int) -> Iterator[int]:
    """As `_pack_tensor`, of the heads' matrices, each of which the file has transposed. Blocks become `TRANSPOSED`."""
    assert place.block is not None
    columns, heads = place.columns, place.source.rows // place.columns
    rows = place.rows // heads
    row_bytes = info.nbytes * rows // info.elements
    quants_at, scales_at = start + place.quants, start + place.scales
    for head in range(heads):
        raw = _read_rows(source, info.offset, row_bytes, place.source, head * columns, columns)
        turned = transpose(raw, info.type, info.factor).reshape(rows, -1, place.block.raw_bytes)
        quants, scales = place.block.pack(turned)
        for at, packed in ((quants_at, quants), (scales_at, scales)):
            out.seek(at)
            out.write(packed.tobytes())
        quants_at, scales_at = quants_at + quants.nbytes, scales_at + scales.nbytes
        yield quants.nbytes + scales.nbytes


def transpose(raw: AnyArray, kind: str, factor: float = 1.0) -> AnyArray:
    """The rows of a matrix's transpose, uint8 [columns, bytes], from the matrix's, uint8 [rows, bytes]: floats as they
    are, blocks as `TRANSPOSED`, times `factor`."""
    if isinstance(block := BLOCKS[kind], FloatBlock):
        turned = raw.reshape(len(raw), -1, block.raw_bytes).swapaxes(0, 1)
        return np.ascontiguousarray(turned).reshape(len(turned), -1)
    from gguf.constants import GGMLQuantizationType  # imported late: gguf costs 6 MB
    from gguf.quants import quantize

    values = np.ascontiguousarray(dequantize(raw, kind).T) * np.float32(factor)
    return np.asarray(quantize(values, GGMLQuantizationType[TRANSPOSED]))


def _read_rows(file: BinaryIO, offset: int, row_bytes: int, source: Source, first: int, count: int) -> AnyArray:
    """Rows first … first + count − 1 of a source, uint8 [count, row_bytes], of a tensor at this offset of the file."""
    parts, at = [], 0
    for start, length in source.runs:
        begin, end = max(first, at), min(first + count, at + length)
        if begin < end:
            file.seek(offset + (start + begin - at) * row_bytes)
            parts.append(file.read((end - begin) * row_bytes))
        at += length
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, row_bytes)


def pad_rows(raw: AnyArray, unit: int, interleaved: Sequence[int] = ()) -> AnyArray:
    """Pad every `unit` rows with zero rows to whole tiles. interleaved: see `Place`."""
    units, width = -(-len(raw) // unit), raw.shape[1]
    order = np.arange(unit)
    for stop, count in zip(accumulate(interleaved), interleaved, strict=True):
        order[stop - count : stop] = order[stop - count : stop].reshape(2, -1).T.reshape(-1)
    padded = np.zeros((units, round_up(unit, 16), width), np.uint8)
    for index in range(units):
        part = raw[index * unit : (index + 1) * unit]
        padded[index, : len(part)] = part[order[: len(part)]]
    return padded.reshape(-1, width)
