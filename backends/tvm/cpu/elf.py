"""Compiled passes as images: object files linked into bytes that are copied into memory and run.

`link` is a linker. Compiled passes are code and constants, which refer to each other by relative addresses and call a
few outside functions. So an image is those sections in a row, followed by a stub and a slot for each outside function.
`link` runs once, where a pass is compiled, and needs pyelftools.

An image is the same on all systems but for the functions that it calls and, on Windows, how it calls.

`Image` loads an image and fills the slots, with Python and the system's libraries alone. An image is code that runs as
this user, so it is loaded only from a file that no other user can have written. Its header is checked: no offset may
lie outside the image.

The relocation types that compiled passes use: "ELF for the Arm 64-bit
Architecture", section "Relocation", and the x86-64 psABI, table 4.9.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.devices.executable import Executable, system_function
from edge.devices.private import open_private
from edge.errors import EngineError
from edge.records import dataclass

_Write = Callable[[bytearray, int, int], None]  # in these bytes, at this offset, refer to that offset

MAGIC, PAGE = b"EDGEIMG1", 4096  # the first bytes of an image, and the alignment of its code
MOST_BYTES = 64 << 20  # a pass has a few hundred KiB
_LENGTH, _SLOT = struct.Struct("<Q"), 8
_INTEGER, _POINTER = 1, 4  # type_index of TVM's calling convention
_PREFIX = "__tvm_ffi_"  # of functions with TVM's calling convention


class _Any(ctypes.Structure):
    """An argument in TVM's calling convention, which passes arrays of them."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64))


_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.POINTER(_Any))
_Complaint = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int32)


class Call:
    """A compiled function with its arguments, ready to be called any number of times, from one thread at a time."""

    def __init__(self, image: Image, name: str, arguments: Sequence[int | ctypes.c_void_p]) -> None:
        self._image, self._name = image, name  # keeps the image in memory
        self._function = _Function(image.entry(name))
        self._arguments = (_Any * len(arguments))(*(_pack(each) for each in arguments))
        self._result = _Any()

    def __call__(self) -> None:
        """Raises EngineError if the function refuses its arguments."""
        if self._function(None, self._arguments, len(self._arguments), ctypes.byref(self._result)):
            raise EngineError(f"the compiled function {self._name} failed: {self._image.complaint}")


class Image:
    """An image in memory, whose slots have the addresses of outside functions."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError for a file that is not an image, or if the system forbids executable memory."""
        try:
            with open_private(path) as file:
                size = os.fstat(file.fileno()).st_size  # read() allocates as much memory as it is asked to read
                self._entries, imports, body = parse(file.read(min(size, MOST_BYTES) + 1))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise EngineError(
                f"{path} is no compiled pass ({why}): edge cache clear --kind kernels removes it"
            ) from None
        self.complaint = ""
        self._complain = _Complaint(self._note)
        filled = bytearray(body)
        for name, slot in imports.items():
            struct.pack_into("<Q", filled, slot, self._outside(name))
        self._code = Executable(bytes(filled))

    def entry(self, name: str) -> int:
        """Raises EngineError if there is no such function."""
        if name not in self._entries:
            raise EngineError(f"the compiled pass has no function {name}: edge cache clear --kind kernels removes it")
        return self._code.address + self._entries[name]

    def _outside(self, name: str) -> int:
        if name == "TVMFFIErrorSetRaisedFromCStrParts":
            return int(ctypes.cast(self._complain, ctypes.c_void_p).value or 0)
        function = system_function(name)
        if function is None:
            raise EngineError(f"the compiled pass calls {name[:40]!r}, which this system does not have")
        return function

    def _note(self, kind: bytes, parts: Any, count: int) -> None:
        self.complaint = f"{kind.decode()}: {b''.join(parts[:count]).decode(errors='replace')}"


def parse(data: bytes) -> tuple[dict[str, int], dict[str, int], bytes]:
    """Offsets of functions, offsets of slots for outside functions, and the bytes that both count in.

    Raises ValueError unless `link` could have written the header and every offset lies within the bytes.
    """
    start = len(MAGIC) + _LENGTH.size
    if len(data) > MOST_BYTES or len(data) < start or not data.startswith(MAGIC):
        raise ValueError("it does not begin as one, or is too long")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    body = data[-(-(start + length) // PAGE) * PAGE :]
    try:
        header = json.loads(data[start : start + length])
        entries, imports = header["entries"], header["imports"]
        places = [(at, 1) for at in entries.values()] + [(at, _SLOT) for at in imports.values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("its header is damaged") from None
    if not all(type(at) is int and 0 <= at <= len(body) - size for at, size in places):
        raise ValueError("a place in its header lies outside of it")
    return entries, imports, body


def _pack(argument: int | ctypes.c_void_p) -> _Any:
    if isinstance(argument, int):
        return _Any(_INTEGER, 0, argument)
    return _Any(_POINTER, 0, argument.value or 0)


def link(object_files: Sequence[bytes]) -> bytes:
    """The image: MAGIC, the length of a JSON header, the header, and from the next page on the bytes of the code.

    Header: entries and imports, names and offsets from the first byte of the code. Raises ValueError for anything that
    this linker does not support, such as variables.
    """
    from elftools.elf.elffile import ELFFile

    elves = [ELFFile(io.BytesIO(each)) for each in object_files]
    machine = MACHINES.get(elves[0].get_machine_arch())
    if machine is None:
        raise ValueError(f"an object file for {elves[0].get_machine_arch()}")
    image = bytearray()
    placed = [(elf, _copy_sections(elf, image)) for elf in elves]
    functions: dict[str, int] = {}  # that files can call in each other, and the engine if they have the prefix
    for elf, places in placed:
        for symbol in elf.get_section_by_name(".symtab").iter_symbols():
            if symbol["st_info"]["bind"] == "STB_GLOBAL" and symbol["st_shndx"] in places:
                functions[symbol.name] = places[symbol["st_shndx"]] + symbol["st_value"]
    imports: dict[str, int] = {}
    for elf, places in placed:
        _relocate(machine, image, elf, places, functions, imports)
    entries = {name.removeprefix(_PREFIX): at for name, at in functions.items() if name.startswith(_PREFIX)}
    header = json.dumps({"entries": entries, "imports": imports}).encode()
    start = MAGIC + struct.pack("<Q", len(header)) + header
    return start.ljust(-(-len(start) // PAGE) * PAGE, b"\0") + bytes(image)


def _copy_sections(elf: Any, image: bytearray) -> dict[int, int]:
    """Append code and constants; returns the offset of each section."""
    from elftools.elf.constants import SH_FLAGS

    places = {}
    for index, section in enumerate(elf.iter_sections()):
        flags = section["sh_flags"]
        if not flags & SH_FLAGS.SHF_ALLOC or section.name == ".eh_frame" or not section["sh_size"]:
            continue
        if flags & SH_FLAGS.SHF_WRITE:
            raise ValueError(f"the object file has variables ({section.name})")
        _align(image, max(1, section["sh_addralign"]))
        places[index] = len(image)
        image += section.data()
    return places


def _relocate(
    machine: _Machine, image: bytearray, elf: Any, places: dict[int, int], functions: dict[str, int],
    imports: dict[str, int],
) -> None:  # fmt: skip
    """Write the addresses that one object file refers to into its code."""
    from elftools.elf.relocation import RelocationSection

    symbols = elf.get_section_by_name(".symtab")
    for section in elf.iter_sections():
        if not isinstance(section, RelocationSection) or section["sh_info"] not in places:
            continue
        for relocation in section.iter_relocations():
            symbol = symbols.get_symbol(relocation["r_info_sym"])
            kind, at = relocation["r_info_type"], places[section["sh_info"]] + relocation["r_offset"]
            target = functions.get(symbol.name)
            if symbol["st_shndx"] != "SHN_UNDEF":
                target = places[symbol["st_shndx"]] + symbol["st_value"]
            if write := machine.calls.get(kind):
                if target is None:
                    target = _slot(machine, image, imports, symbol.name) - len(machine.stub)
            elif target is None and (write := machine.slots.get(kind)):
                target = _slot(machine, image, imports, symbol.name)
            elif target is None or (write := machine.places.get(kind)) is None:
                raise ValueError(f"relocation {kind} of {symbol.name or 'a section'}")
            write(image, at, target + relocation["r_addend"])


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


MACHINES = {  # by pyelftools' names
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
