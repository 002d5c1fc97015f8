"""The packed file of weights: a model's tensors, reordered once for the kernels, then mapped.

Mapped weights are file pages: processes share them, and the system may drop and reread them. The file lies in the cache
folder under a key of everything that it depends on; `edge.storage.cache` checks that it is complete.
"""

from __future__ import annotations

import sys
import threading
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
from edge.devices.keys import key_of
from edge.devices.platform import map_file
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.tensors import Source
from edge.storage import cache
from edge.storage.fingerprint import Fingerprint, fingerprint
from edge.types import AnyArray, Progress

_BLOCK = 2 << 20  # bytes that Linux may map as one page
_SLICE = 512 << 10  # bytes of a tensor that a thread packs at once, which limits the memory that packing takes
_AT_ONCE = 2  # threads; slices that are larger, as those of large experts, are packed by one
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
    return key_of(repr(depends))


def pack_weights(file: GGUFFile, layout: PackedLayout, target: Path, progress: Progress | None = None) -> None:
    """Write the packed file."""
    with open(target, "wb") as out:
        write_weights(file, layout, out, 0, progress)


def write_weights(
    file: GGUFFile, layout: PackedLayout, out: BinaryIO, start: int, progress: Progress | None = None
) -> None:
    """Write the packed bytes into a new file from `start` on."""
    from concurrent.futures import ThreadPoolExecutor  # here: first runs need it

    end, zeros, filled = start + layout.nbytes, bytes(_BLOCK), set[int]()
    out.truncate(end)
    places = [place for place in layout.places.values() if not place.shared]
    writing, slices = threading.Lock(), [each for place in places for each in _slices(file, place)]

    def fill(first: int, nbytes: int) -> None:
        """Write the blocks of these bytes whole: file systems with large pages keep them in such, cheap to map."""
        for block in set(range(first // _BLOCK, (first + nbytes - 1) // _BLOCK + 1)) - filled:
            filled.add(block)
            at = max(start, block * _BLOCK)
            out.seek(at)
            out.write(zeros[: min(end, (block + 1) * _BLOCK) - at])

    def pack(each: Slice) -> int:
        with open(file.path, "rb") as source:
            packed = _pack(source, file.tensors[each.place.source.tensor], each)
        with writing:
            for at, data in packed:
                if sys.platform == "linux":
                    fill(start + at, data.nbytes)
                out.seek(start + at)
                out.write(data.data)
        return sum(data.nbytes for _, data in packed)

    at_once = _AT_ONCE if all(each.nbytes <= _SLICE for each in slices) else 1
    with ThreadPoolExecutor(at_once) as pool:  # NumPy releases Python's lock
        try:
            for done in accumulate(pool.map(pack, slices)):
                if progress:  # often: it may raise, to end the packing of a large matrix
                    progress(min(1.0, done / layout.nbytes))
        finally:
            pool.shutdown(cancel_futures=True)
    out.flush()


class Slice(NamedTuple):
    """Rows of a tensor that are packed at once."""

    place: Place
    first: int  # row of the source
    rows: int
    nbytes: int  # in the model's file


def _slices(file: GGUFFile, place: Place) -> Iterator[Slice]:
    info, rows, unit = file.tensors[place.source.tensor], place.source.rows, place.unit
    if place.source.transposed:  # a head at a time, whose rows are columns in the file
        row_bytes, step = info.nbytes * (place.rows * place.columns // rows) // info.elements, place.columns
    else:
        row_bytes = info.nbytes * place.columns // info.elements
        whole = BAND * unit if place.halved else unit
        step = unit if place.stride else max(1, _SLICE // (whole * row_bytes)) * whole
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield Slice(place, first, count, count * row_bytes)


def _pack(source: BinaryIO, info: TensorInfo, each: Slice) -> list[tuple[int, AnyArray]]:
    """The packed bytes of a slice: offsets, and contiguous arrays."""
    place, first, rows, nbytes = each
    raw, block = _read_rows(source, info.offset, nbytes // rows, place.source, first, rows), place.block
    if place.source.transposed:  # blocks become `TRANSPOSED`
        padded = transpose(raw, info.type, info.factor)
        factor, before = 1.0, first // place.columns * len(padded)
    else:
        padded, factor = pad_rows(raw, place.unit, place.interleaved), info.factor
        before = 0 if place.stride else first // place.unit * round_up(place.unit, 16)
    if block is None:
        return [(place.quants + before * padded.shape[1], padded)]
    if isinstance(block, IntegerBlock) and not place.source.transposed and info.type != block.stored:
        from edge.model.structure.rounding import round_to_q8_0  # here: encoders need it

        padded = round_to_q8_0(padded, info.type)
    quants, scales = block.pack(padded.reshape(len(padded), -1, block.raw_bytes), factor)
    moved = first // place.unit * place.stride
    quants_at, scales_at = (moved + size for size in block.packed_bytes(before, place.columns))
    return [(place.quants + quants_at, quants), (place.scales + scales_at, scales)]


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
    if not (interleaved or unit % 16 or len(raw) % unit):
        return raw
    units, width = -(-len(raw) // unit), raw.shape[1]
    order = np.arange(unit)
    for stop, count in zip(accumulate(interleaved), interleaved, strict=True):
        order[stop - count : stop] = order[stop - count : stop].reshape(2, -1).T.reshape(-1)
    padded = np.zeros((units, round_up(unit, 16), width), np.uint8)
    for index in range(units):
        part = raw[index * unit : (index + 1) * unit]
        padded[index, : len(part)] = part[order[: len(part)]]
    return padded.reshape(-1, width)
