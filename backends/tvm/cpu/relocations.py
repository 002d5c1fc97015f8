"""How code of each machine refers to other places: the relocation types that compiled passes use, written in place.

Numbers and rules: "ELF for the Arm 64-bit Architecture", section "Relocation", and the x86-64 psABI, table 4.9.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Write = Callable[[bytearray, int, int], None]  # in these bytes, at this place, refer to that place
_PAGE = 4096  # what AArch64 counts far distances in; images are loaded at such addresses


@dataclass(frozen=True)
class Machine:
    """stub: jumps to the address in the 8 bytes behind it. calls, places, slots: relocations by their numbers.

    Those of calls and places refer to something; those of slots to 8 bytes that hold its address.
    """

    stub: bytes
    calls: Mapping[int, Write]
    places: Mapping[int, Write]
    slots: Mapping[int, Write]


def _relative32(image: bytearray, at: int, target: int) -> None:
    struct.pack_into("<i", image, at, target - at)


def _relative64(image: bytearray, at: int, target: int) -> None:
    struct.pack_into("<q", image, at, target - at)


def _branch(image: bytearray, at: int, target: int) -> None:
    """The distance in words, in the last 26 bits."""
    _put(image, at, _signed(target - at >> 2, 26), 0)


def _page(image: bytearray, at: int, target: int) -> None:
    """adrp: the distance in pages, its last 2 bits apart from the other 19."""
    pages = _signed(target // _PAGE - at // _PAGE, 21)
    _put(image, at, pages & 3, 29)
    _put(image, at, pages >> 2, 5)


def _within_page(size: int) -> Write:
    """The place within its page, counted in `size` bytes."""

    def write(image: bytearray, at: int, target: int) -> None:
        if target % size:
            raise ValueError(f"what lies at {target} is no multiple of {size}")
        _put(image, at, target % _PAGE // size, 10)

    return write


def _put(image: bytearray, at: int, bits: int, shift: int) -> None:
    """Add bits to an instruction that has zeros there."""
    (word,) = struct.unpack_from("<I", image, at)
    struct.pack_into("<I", image, at, word | bits << shift)


def _signed(value: int, bits: int) -> int:
    """Two's complement. Raises ValueError for what does not fit."""
    if not -1 << bits - 1 <= value < 1 << bits - 1:
        raise ValueError("the image is too large for this machine's jumps")
    return value % (1 << bits)


MACHINES = {  # by the names that pyelftools gives them
    "x64": Machine(
        stub=b"\xff\x25\x02\x00\x00\x00\x90\x90",  # jmp *[rip + 2]
        calls={2: _relative32, 4: _relative32},  # PC32, which with an outside function is a call, and PLT32
        places={},
        slots={41: _relative32, 42: _relative32},  # GOTPCRELX, REX_GOTPCRELX
    ),
    "AArch64": Machine(
        stub=struct.pack("<II", 0x5800_0050, 0xD61F_0200),  # ldr x16, [pc + 8]; br x16
        calls={282: _branch, 283: _branch},  # JUMP26, CALL26
        places={
            260: _relative64, 261: _relative32,  # PREL64, PREL32
            275: _page, 277: _within_page(1),  # ADR_PREL_PG_HI21, ADD_ABS_LO12_NC
            278: _within_page(1), 284: _within_page(2), 285: _within_page(4),  # LDST8, 16, 32 _ABS_LO12_NC,
            286: _within_page(8), 299: _within_page(16),  # 64, 128
        },
        slots={311: _page, 312: _within_page(8)},  # ADR_GOT_PAGE, LD64_GOT_LO12_NC
    ),
}  # fmt: skip
