"""A linker for compiled passes: object files are read into pieces, and pieces joined into an image.

Compiled passes are code and constants, which refer to each other by relative addresses and call a few outside
functions. So an image is those sections in a row, followed by a stub and a slot for each outside function.

`read_object` runs where a pass is compiled, `join` also elsewhere: a device without a compiler joins pieces of an
installed package (`compiler/package.py`), which images of several designs share.

The form of object files: "Tool Interface Standard: ELF", and its extension to 64 bits. The relocation types that
compiled passes use: "ELF for the Arm 64-bit Architecture", section "Relocation", and the x86-64 psABI, table 4.9.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge.backends.tvm.cpu.elf import MAGIC, PAGE
from edge.records import dataclass

_Write = Callable[[bytearray, int, int], None]  # in these bytes, at this offset, refer to that offset

_PREFIX = "__tvm_ffi_"  # of functions with TVM's calling convention
_BY_NAME = -1  # as a section: of a symbol that the object file does not define

# Of an ELF file: its machine, where the headers of sections begin, their size and number, and which has the names.
_FILE = struct.Struct("<18xH20xQ10xHHH")
_HEADER, _SYMBOL, _RELOCATION = struct.Struct("<IIQ8xQQIIQ8x"), struct.Struct("<IBxHQ8x"), struct.Struct("<QQq")
_NUMBERS = {62: "x64", 183: "AArch64"}  # machines
_SYMBOLS, _RELOCATIONS = 2, 4  # kinds of sections
_WRITTEN, _ALLOCATED = 1, 2  # flags of sections
_GLOBAL = 1  # a symbol that other files see


class _Header(NamedTuple):
    """A section of an ELF file. link, info: the sections that it refers to."""

    name: int
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int

    def of(self, object_file: bytes) -> bytes:
        return object_file[self.offset : self.offset + self.size]


class Section(NamedTuple):
    """Code or constants. align: of its first byte, in bytes."""

    align: int
    data: bytes


class Relocation(NamedTuple):
    """A place that refers to another one, with the numbers of its object file. to: the section in which the target
    lies at offset `value`; -1: it is the function `name` of another file, or of the system."""

    kind: int
    section: int
    offset: int
    name: str
    to: int
    value: int
    addend: int


@dataclass(frozen=True)
class Piece:
    """An object file's code, and the relocations to write once the places of all pieces are known."""

    machine: str  # a key of MACHINES
    sections: tuple[Section, ...]
    functions: tuple[tuple[str, int, int], ...]  # names, sections and offsets: other pieces can call them
    relocations: tuple[Relocation, ...]


def read_object(object_file: bytes) -> Piece:
    """Raises ValueError for anything that this linker does not support, such as variables."""
    number, headers, step, count, of_names = _FILE.unpack_from(object_file)
    if number not in _NUMBERS:
        raise ValueError(f"an object file for machine {number}")
    found = [_Header(*_HEADER.unpack_from(object_file, headers + step * index)) for index in range(count)]

    def name_of(strings: int, at: int) -> str:
        start = found[strings].offset + at
        return object_file[start : object_file.index(b"\0", start)].decode()

    numbers, sections = dict[int, int](), list[Section]()
    for index, header in enumerate(found):
        name = name_of(of_names, header.name)
        if not header.flags & _ALLOCATED or name == ".eh_frame" or not header.size:
            continue
        if header.flags & _WRITTEN:
            raise ValueError(f"the object file has variables ({name})")
        numbers[index] = len(sections)
        sections.append(Section(max(1, header.align), header.of(object_file)))
    table = next(header for header in found if header.kind == _SYMBOLS)
    symbols = list(_SYMBOL.iter_unpack(table.of(object_file)))
    functions = [
        (name_of(table.link, name), numbers[section], value)
        for name, info, section, value in symbols
        if info >> 4 == _GLOBAL and section in numbers
    ]
    relocations = list[Relocation]()
    for header in found:
        if header.kind != _RELOCATIONS or header.info not in numbers:
            continue
        for at, info, addend in _RELOCATION.iter_unpack(header.of(object_file)):
            name, _, section, value = symbols[info >> 32]
            to, value = (numbers[section], value) if section else (_BY_NAME, 0)
            outside = "" if section else name_of(table.link, name)
            relocations.append(Relocation(info & 0xFFFFFFFF, numbers[header.info], at, outside, to, value, addend))
    return Piece(_NUMBERS[number], tuple(sections), tuple(functions), tuple(relocations))


def link(object_files: Sequence[bytes]) -> bytes:
    """The image of object files. Raises ValueError as `read_object` and `join`."""
    return join(list(map(read_object, object_files)))


def join(pieces: Sequence[Piece]) -> bytes:
    """The image: MAGIC, the length of a JSON header, the header, and from the next page on the bytes of the code.

    Header: entries and imports, names and offsets from the first byte of the code. Raises ValueError for relocations
    that this linker does not know.
    """
    machine, image = MACHINES[pieces[0].machine], bytearray()
    placed = [(piece, _copy_sections(piece, image)) for piece in pieces]
    functions = dict[str, int]()
    for piece, places in placed:
        functions |= {name: places[section] + at for name, section, at in piece.functions}
    imports: dict[str, int] = {}
    try:
        for piece, places in placed:
            for each in piece.relocations:
                _relocate(machine, image, each, places, functions, imports)
    except struct.error:
        raise ValueError("the image is too large for this machine's jumps") from None
    entries = {name.removeprefix(_PREFIX): at for name, at in functions.items() if name.startswith(_PREFIX)}
    header = json.dumps({"entries": entries, "imports": imports}).encode()
    start = MAGIC + struct.pack("<Q", len(header)) + header
    return start.ljust(-(-len(start) // PAGE) * PAGE, b"\0") + bytes(image)


def _copy_sections(piece: Piece, image: bytearray) -> list[int]:
    """Append code and constants; returns the offset of each section."""
    places = []
    for section in piece.sections:
        _align(image, section.align)
        places.append(len(image))
        image += section.data
    return places


def _relocate(
    machine: _Machine, image: bytearray, relocation: Relocation, places: Sequence[int], functions: Mapping[str, int],
    imports: dict[str, int],
) -> None:  # fmt: skip
    """Write the address that a relocation refers to into the code of its piece."""
    kind, section, offset, name, to, value, addend = relocation
    target = functions.get(name) if to == _BY_NAME else places[to] + value
    if write := machine.calls.get(kind):
        if target is None:
            target = _slot(machine, image, imports, name) - len(machine.stub)
    elif target is None and (write := machine.slots.get(kind)):
        target = _slot(machine, image, imports, name)
    elif target is None or (write := machine.places.get(kind)) is None:
        raise ValueError(f"relocation {kind} of {name or 'a section'}")
    write(image, places[section] + offset, target + addend)


def _slot(machine: _Machine, image: bytearray, imports: dict[str, int], name: str) -> int:
    """The offset of the address of an outside function; before it lies a stub that jumps there."""
    if name not in imports:
        _align(image, 16)
        image += machine.stub
        imports[name] = len(image)
        image += bytes(8)
    return imports[name]


def _align(image: bytearray, step: int) -> None:
    image += bytes(-len(image) % step)


@dataclass(frozen=True)
class _Machine:
    """stub: jumps to the address in the next 8 bytes. calls, places, slots: relocations by their numbers.

    Calls and places refer to their target directly, slots to 8 bytes that hold its address.
    """

    stub: bytes
    calls: Mapping[int, _Write]
    places: Mapping[int, _Write]
    slots: Mapping[int, _Write]

    @property
    def wide(self) -> set[int]:
        """Relocations that write 8 bytes; the others write 4."""
        return {kind for kind, write in self.places.items() if write is _relative64}


def _relative32(image: bytearray, at: int, target: int) -> None:
    struct.pack_into("<i", image, at, target - at)


def _relative64(image: bytearray, at: int, target: int) -> None:
    struct.pack_into("<q", image, at, target - at)


def _branch(image: bytearray, at: int, target: int) -> None:
    """The distance in words, in the last 26 bits."""
    _put(image, at, _signed(target - at >> 2, 26), 0)


def _page(image: bytearray, at: int, target: int) -> None:
    """adrp: the distance in pages, its last 2 bits apart from the other 19."""
    pages = _signed(target // PAGE - at // PAGE, 21)
    _put(image, at, pages & 3, 29)
    _put(image, at, pages >> 2, 5)


def _within_page(size: int) -> _Write:
    """The offset within its page, in units of `size` bytes."""

    def write(image: bytearray, at: int, target: int) -> None:
        if target % size:
            raise ValueError(f"the target {target} of a relocation is not a multiple of {size}")
        _put(image, at, target % PAGE // size, 10)

    return write


def _put(image: bytearray, at: int, bits: int, shift: int) -> None:
    """Add bits to an instruction that has zeros there."""
    (word,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, word | bits << shift)


def _signed(value: int, bits: int) -> int:
    """Two's complement. Raises ValueError for numbers that do not fit."""
    if not -1 << bits - 1 <= value < 1 << bits - 1:
        raise ValueError("the image is too large for this machine's jumps")
    return value % (1 << bits)


MACHINES = {  # by the names that volumes have
    "x64": _Machine(
        stub=b"\xff\x25\x02\x00\x00\x00\x90\x90",  # jmp *[rip + 2]
        calls={2: _relative32, 4: _relative32},  # PC32, which with an outside function is a call, and PLT32
        places={},
        slots={41: _relative32, 42: _relative32},  # GOTPCRELX, REX_GOTPCRELX
    ),
    "AArch64": _Machine(
        stub=struct.pack("<II", 0x5800_0050, 0xD61F_0200),  # ldr x16, [pc + 8]; br x16
        calls={282: _branch, 283: _branch},  # JUMP26, CALL26
        places={
            260: _relative64, 261: _relative32,  # PREL64, PREL32
            275: _page, 277: _within_page(1),  # ADR_PREL_PG_HI21, ADD_ABS_LO12_NC
            278: _within_page(1), 284: _within_page(2), 285: _within_page(4),  # LDST8, 16, 32 _ABS_LO12_NC,
            286: _within_page(8), 299: _within_page(16),  # 64, 128
        },
        slots={311: _page, 312: _within_page(8)},  # ADR_GOTPAGE, LD64_GOT_LO12_NC
    ),
}  # fmt: skip
