"""The instruction sets of x86-64 CPUs, asked of the CPU itself on Windows, which names few of them.

Bits: Intel's manual, volume 2A, CPUID. The system must also keep the registers when it switches threads (XGETBV).
"""

from __future__ import annotations

import ctypes

from edge.devices.executable import Executable

# By Windows' calling convention: arguments in ecx, edx and r8, the result in eax, rbx is the caller's.
_CPUID = bytes.fromhex("53 89c8 89d1 0fa2 418900 41895804 41894808 4189500c 5b c3")  # (leaf, part, four words)
_XGETBV = bytes.fromhex("31c9 0f01d0 c3")
_EAX, _EBX, _ECX = 0, 1, 2
_OSXSAVE = (1, 0, _ECX, 27)
_YMM, _ZMM = 0x6, 0xE6  # registers that the system keeps
_FLAGS = {  # by Linux's names: leaf, part, register, bit, and what the system must keep
    "fma": ((1, 0, _ECX, 12), _YMM),
    "f16c": ((1, 0, _ECX, 29), _YMM),
    "avx2": ((7, 0, _EBX, 5), _YMM),
    "avx_vnni": ((7, 1, _EAX, 4), _YMM),
    "avx512f": ((7, 0, _EBX, 16), _ZMM),
    "avx512dq": ((7, 0, _EBX, 17), _ZMM),
    "avx512bw": ((7, 0, _EBX, 30), _ZMM),
    "avx512vl": ((7, 0, _EBX, 31), _ZMM),
    "avx512_vnni": ((7, 0, _ECX, 11), _ZMM),
    "avx512_bf16": ((7, 1, _EAX, 5), _ZMM),
}


def windows_flags() -> frozenset[str]:
    """The `_FLAGS` that this CPU and Windows support. Raises UnsupportedError if executable memory is forbidden."""
    code = Executable(_CPUID)
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(code.address)
    words = (ctypes.c_uint32 * 4)()
    cpuid(0, 0, words)
    last = words[_EAX]

    def has(leaf: int, part: int, register: int, bit: int) -> bool:
        cpuid(leaf, part, words)
        return leaf <= last and bool(words[register] >> bit & 1)

    if not has(*_OSXSAVE):
        return frozenset()
    other = Executable(_XGETBV)
    kept = ctypes.CFUNCTYPE(ctypes.c_uint32)(other.address)()
    return frozenset(flag for flag, (place, wanted) in _FLAGS.items() if kept & wanted == wanted and has(*place))
