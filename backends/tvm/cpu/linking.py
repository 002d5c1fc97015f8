"""From an object file to an image that can be copied into memory and run: what a linker does, for one file.

Compiled passes are code and constants that refer to each other relative to where they lie, and call a function or two
from outside. So the image is those sections in a row, and behind them a stub and a slot for each outside function;
`loading.py` fills the slots. Done when a pass is compiled, by pyelftools; a device that runs it needs neither.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

from edge.backends.tvm.cpu.loading import MAGIC, PAGE
from edge.backends.tvm.cpu.relocations import MACHINES, Machine

_PREFIX = "__tvm_ffi_"  # of the functions that others may call


def link(object_file: bytes) -> bytes:
    """The image: MAGIC, the length of a JSON header, the header, and from the next page on the bytes to be copied.

    Header: entries and imports, names and offsets from the first copied byte. Raises ValueError for what is beyond
    this linker, such as variables.
    """
    elf = ELFFile(io.BytesIO(object_file))
    machine = MACHINES.get(elf.get_machine_arch())
    if machine is None:
        raise ValueError(f"an object file for {elf.get_machine_arch()}")
    image = bytearray()
    places = _copy_sections(elf, image)
    symbols = elf.get_section_by_name(".symtab")
    imports: dict[str, int] = {}
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection) and section["sh_info"] in places:
            for relocation in section.iter_relocations():
                symbol = symbols.get_symbol(relocation["r_info_sym"])
                _relocate(machine, image, places, imports, places[section["sh_info"]], relocation, symbol)
    entries = {
        symbol.name.removeprefix(_PREFIX): places[symbol["st_shndx"]] + symbol["st_value"]
        for symbol in symbols.iter_symbols()
        if symbol.name.startswith(_PREFIX) and symbol["st_shndx"] in places
    }
    header = json.dumps({"entries": entries, "imports": imports}).encode()
    start = MAGIC + struct.pack("<Q", len(header)) + header
    return start.ljust(-(-len(start) // PAGE) * PAGE, b"\0") + bytes(image)


def _copy_sections(elf: ELFFile, image: bytearray) -> dict[int, int]:
    """Append code and constants; returns where each section begins."""
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
    machine: Machine, image: bytearray, places: dict[int, int], imports: dict[str, int], start: int,
    relocation: Any, symbol: Any,
) -> None:  # fmt: skip
    """Write into the code how to reach what it refers to."""
    kind, at, outside = relocation["r_info_type"], start + relocation["r_offset"], symbol["st_shndx"] == "SHN_UNDEF"
    if not outside and (write := machine.calls.get(kind) or machine.places.get(kind)):
        target = places[symbol["st_shndx"]] + symbol["st_value"]
    elif outside and (write := machine.calls.get(kind)):
        target = _slot(machine, image, imports, symbol.name) - len(machine.stub)
    elif outside and (write := machine.slots.get(kind)):
        target = _slot(machine, image, imports, symbol.name)
    else:
        raise ValueError(f"relocation {kind} of {symbol.name or 'a section'}")
    write(image, at, target + relocation["r_addend"])


def _slot(machine: Machine, image: bytearray, imports: dict[str, int], name: str) -> int:
    """Where the address of an outside function will be; a stub that jumps there lies before it."""
    if name not in imports:
        _align(image, 16)
        image += machine.stub
        imports[name] = len(image)
        image += bytes(8)
    return imports[name]


def _align(image: bytearray, step: int) -> None:
    image += bytes(-len(image) % step)
