"""Volumes: files that hold compiled passes of a model, as pieces of code that its designs share.

A volume is an xz stream: the length of a JSON header in 4 bytes, the header, and the bytes of all pieces in a row. The
header has the pieces of each design by the design's key, in the order in which they are joined, and of each piece its
machine, sections, functions and relocations (`cpu/linker.py`). Designs that differ in their block types have
attention in common, those that differ in their KV dtype most products: each piece is stored once.
"""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from edge.backends.tvm.cpu.linker import MACHINES, Piece, Relocation, Section

MOST_BYTES = 32 << 20  # of a volume's content; those of the catalogue have 1 to 6 MiB
_WINDOW = 8 << 20  # bytes in which the compressor looks for repetitions, and the decoder's memory
_LENGTH = struct.Struct("<I")


def write_volume(designs: Mapping[str, Sequence[Piece]]) -> bytes:
    """The volume of these designs, by their keys."""
    numbers: dict[Piece, int] = {}
    orders = {key: [numbers.setdefault(piece, len(numbers)) for piece in pieces] for key, pieces in designs.items()}
    data, header = bytearray(), list[Any]()
    for piece in numbers:
        sections = [[section.align, len(section.data)] for section in piece.sections]
        header.append([piece.machine, sections, piece.functions, piece.relocations])
        data += b"".join(section.data for section in piece.sections)
    text = json.dumps({"designs": orders, "pieces": header}, separators=(",", ":"), sort_keys=True).encode()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": _WINDOW}]
    return lzma.compress(_LENGTH.pack(len(text)) + text + data, lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)


def read_volume(volume: bytes, key: str) -> list[Piece]:
    """The pieces of a design. Raises ValueError unless `write_volume` could have written the volume, KeyError if it
    lacks the design."""
    try:
        content, header, at = _unpack(volume)
        pieces = list[tuple[int, Any]]()
        for each in header["pieces"]:
            pieces.append((at, each))
            at += sum(size for _, size in each[1])
        if at != len(content):
            raise ValueError("its parts have other sizes than it says")
        numbers = header["designs"][key]
        _check(all(type(number) is int and 0 <= number < len(pieces) for number in numbers) and len(numbers) > 0)
        found = [_piece(content, *pieces[number]) for number in numbers]
        _check(len({piece.machine for piece in found}) == 1)
        return found
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({error})") from None


def volume_keys(volume: bytes) -> list[str]:
    """The keys of its designs. Raises ValueError as `read_volume`."""
    return list(_unpack(volume)[1]["designs"])


def _unpack(volume: bytes) -> tuple[bytes, dict[str, Any], int]:
    """The content of a volume, its header, and where the bytes of its pieces begin in the content."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * _WINDOW)
    try:
        content = decoder.decompress(volume, MOST_BYTES)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(str(error)) from None
    if not decoder.eof or decoder.unused_data:
        raise ValueError("it is cut short, or too long")
    try:
        start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        header = json.loads(content[_LENGTH.size : start])
        if not isinstance(header["designs"], dict) or not isinstance(header["pieces"], list):
            raise ValueError("its header has another form")
    except (struct.error, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"its header is damaged ({error})") from None
    return content, header, start


def _piece(content: bytes, at: int, told: Any) -> Piece:
    """Raises ValueError for a piece that would be read or written outside of its sections."""
    machine, sizes, functions, relocations = told
    sections = list[Section]()
    for align, size in sizes:
        _check(type(align) is int and 0 < align <= 4096 and type(size) is int and size >= 0)
        sections.append(Section(align, content[at : at + size]))
        at += size
    ends = [len(section.data) for section in sections]

    def lies(section: int, offset: int, size: int) -> bool:
        numbers = type(section) is int is type(offset)
        return numbers and 0 <= section < len(ends) and 0 <= offset <= ends[section] - size

    _check(machine in MACHINES)
    _check(all(type(name) is str and lies(section, offset, 0) for name, section, offset in functions))
    found = [Relocation(*each) for each in relocations]
    for each in found:
        _check(type(each.kind) is int is type(each.addend) and type(each.name) is str)
        _check(lies(each.section, each.offset, 8 if each.kind in MACHINES[machine].wide else 4))
        _check(bool(each.name) if each.to == -1 else lies(each.to, each.value, 0))
    return Piece(machine, tuple(sections), tuple(map(tuple, functions)), tuple(found))


def _check(right: bool) -> None:
    if not right:
        raise ValueError("a place in its header lies outside of it")
