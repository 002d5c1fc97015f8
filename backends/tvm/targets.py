"""Targets of the native engine: CPUs' instruction sets, and the detection of this CPU's.

A design names its target, so this file lies beside `design.py`. TVM is not needed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from edge.devices.host import cpu_flags
from edge.errors import InputError, UnsupportedError
from edge.records import dataclass

ASSEMBLY = "assembly"  # as `Target.system`: text, for packages


@dataclass(frozen=True)
class Target:
    """An instruction set, and sizes of work that suit its registers."""

    name: str
    llvm: dict[str, Any]  # TVM's description of the CPU
    flags: frozenset[str] = frozenset()  # of the CPU, by Linux's names (`cpu_flags`)
    gemm_tokens: int = 4  # tokens that are multiplied with a weight tile at once in prefill
    score_rows: int = 4  # query rows × key tiles (of 16 rows) in registers while scores are computed
    score_tiles: int = 1
    fetch_ahead: int = 8192  # bytes by which decode prefetches weights
    fetch_into: int = (
        2  # the cache level that they go to, as LLVM counts: 3 is L1, 2 is L2, 0 bypasses both where possible
    )
    mix_registers: int = 4  # 16-lane accumulators while values are mixed
    # Tiles of 16 cache rows between two corrections of attention's running maximum: few in a step, which is bound by
    # memory and best alternates between keys and values; many in a chunk, which is bound by arithmetic.
    step_block: int = 8
    chunk_block: int = 32
    # Query rows of a chunk that share a block of keys and values in BF16 (`kernels/pairs.py`); 0: float32.
    pair_rows: int = 0
    # Likewise of an encoder, with keys in 8 bits (`kernels/byte_scores.py`); 0: float32.
    byte_rows: int = 0
    # Pieces of work go to the threads in turn, rather than one contiguous range to each thread.
    step_dealt: bool = False
    chunk_dealt: bool = False
    # Pauses at a barrier before a thread sleeps, about 150 µs. With all cores busy, far fewer or more cost a third.
    spins: int = 10_000
    # linux, macos or windows, whose functions a pass calls; passes for apps call none, and may be ASSEMBLY.
    system: str = "linux"

    @property
    def machine(self) -> str:
        """x86_64, aarch64 or wasm32."""
        return str(self.llvm["mtriple"]).partition("-")[0]

    @property
    def paired(self) -> int:
        """`pair_rows` in whole groups of `score_rows`."""
        return -(-self.pair_rows // self.score_rows) * self.score_rows

    @property
    def quantized_rows(self) -> int:
        """`byte_rows`, likewise."""
        return -(-self.byte_rows // self.score_rows) * self.score_rows

    @property
    def returns(self) -> bool:
        """Whether threads leave the compiled code after every job, not only at the end: WebAssembly's engines cannot
        replace a running function by a faster version of it."""
        return self.machine == "wasm32"

    @property
    def is_text(self) -> bool:
        """Whether passes are assembly text instead of object files, for packages whose build assembles it."""
        return self.is_apple or self.system == ASSEMBLY

    @property
    def is_apple(self) -> bool:
        return "-apple-" in str(self.llvm["mtriple"])


def _x86(cpu: str, *features: str) -> dict[str, Any]:
    return {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "mattr": list(features), "num-cores": 2}


def _arm(*features: str) -> dict[str, Any]:
    return {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": list(features), "num-cores": 2}


def _wasm(*features: str) -> dict[str, Any]:
    always = ["+simd128", "+atomics", "+bulk-memory", "+nontrapping-fptoint", "+sign-ext"]
    return {
        "kind": "llvm", "mtriple": "wasm32-unknown-unknown", "mcpu": "generic", "mattr": [*always, *features],
        "num-cores": 2, "vector-width": 128,
    }  # fmt: skip


_AVX512 = Target(
    "avx512vnni",
    _x86("x86-64-v4", "+avx512vnni"),
    frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
    gemm_tokens=8,
    score_rows=12,
    score_tiles=2,
    mix_registers=24,
    byte_rows=96,
)
_LOOKS = 100_000  # the same 150 µs: WebAssembly has no pause

TARGETS = (
    replace(
        _AVX512,
        name="avx512bf16",
        llvm=_x86("x86-64-v4", "+avx512vnni", "+avx512bf16"),
        flags=_AVX512.flags | {"avx512_bf16"},
        pair_rows=96,
    ),
    _AVX512,
    Target(
        "avxvnni",
        _x86("x86-64-v3", "+avxvnni"),
        frozenset({"avx_vnni", "avx2", "fma", "f16c"}),
        score_rows=6,
        byte_rows=96,
    ),
    Target("avx2", _x86("x86-64-v3"), frozenset({"avx2", "fma", "f16c"}), score_rows=6),
    Target("generic", _x86("x86-64")),
    # 32 registers of 128 bits: 16 lanes of float32 or of words are four of them.
    Target("i8mm", _arm("+i8mm", "+bf16", "+dotprod"), frozenset({"i8mm", "bf16", "asimddp"}), pair_rows=96),
    Target("dotprod", _arm("+dotprod"), frozenset({"asimddp"})),
    Target("neon", _arm(), gemm_tokens=2),
    # A module for web pages has one of them.
    Target("relaxed", _wasm("+relaxed-simd"), fetch_ahead=0, mix_registers=16, spins=_LOOKS),
    Target("relaxed16", _wasm("+relaxed-simd"), fetch_ahead=0, mix_registers=16, spins=_LOOKS),
    Target("simd", _wasm(), fetch_ahead=0, mix_registers=16, spins=_LOOKS),
)


# For systems with a single machine that libraries are made for: that machine, and LLVM's triple.
_SYSTEMS = {
    "ios": ("aarch64", "aarch64-apple-ios"), "macos": ("aarch64", "aarch64-apple-ios"),
    "windows": ("x86_64", "x86_64-pc-windows-gnu"),
}  # fmt: skip


# Computers other than Linux's for which there is a TVM: the machine by our name, and what compiled code must know.
# Object files are ELF everywhere (`cpu/linker.py`); LLVM's name of Windows stands for its calling convention.
_COMPUTERS: dict[tuple[str, str], tuple[str, str, dict[str, Any], list[str]]] = {
    ("Windows", "AMD64"): ("x86_64", "windows", {"mtriple": "x86_64-pc-windows-msvc-elf"}, []),
    ("Darwin", "arm64"): ("aarch64", "macos", {}, ["+reserve-x18"]),  # a register that belongs to the system
}


def choose_target(name: str | None = None) -> Target:
    """The target called `name`, else EDGE_ISA, else this CPU's best.

    Raises InputError for an unknown name, UnsupportedError where the CPU lacks it, and on other computers than those
    with Linux, Windows on x86-64 and macOS on ARM64.
    """
    name = name or os.environ.get("EDGE_ISA") or None
    runnable = _runnable()
    if not runnable:
        system = f"{platform.system()} ({platform.machine()})"
        raise UnsupportedError(f"the cpu engine does not run on {system} yet: use --backend=llamacpp")
    if name is None:
        return runnable[0]
    target_named(name, f"EDGE_ISA {name!r} is unknown")
    for target in runnable:
        if target.name == name:
            return target
    raise UnsupportedError(f"this CPU has no {name}: choose {', '.join(target.name for target in runnable)}")


def planning_target() -> Target:
    """This computer's target, for plans; they may be for other devices, so one without a target gets generic x86-64."""
    return choose_target() if _runnable() else target_named("generic", "")


def _runnable() -> list[Target]:
    """The targets of this computer, best first."""
    system, machine = platform.system(), platform.machine()
    if system == "Linux":
        return [each for each in TARGETS if each.machine == machine and each.flags <= _cpu_flags()]
    machine, system, llvm, features = _COMPUTERS.get((system, machine), ("", "", {}, []))
    return [
        replace(each, system=system, llvm=each.llvm | llvm | {"mattr": [*each.llvm["mattr"], *features]})
        for each in TARGETS if each.machine == machine and each.flags <= _cpu_flags()
    ]  # fmt: skip


def app_targets(machine: str, system: str) -> list[Target]:
    """The targets of an app's library, best first: all of the machine's but generic x86-64.

    Each uses only its own instruction set, whatever the device's CPU, and only registers that the system leaves it: x18
    belongs to Android and to Apple's systems. LLVM's level 2 makes code that is a tenth smaller and as fast. Raises
    UnsupportedError for other machines.
    """
    only, triple = _SYSTEMS.get(system, (machine, None))
    found = [target for target in TARGETS if target.machine == machine and target.name != "generic"]
    if not found or machine != only:
        machines = {"aarch64": "ARM64", "x86_64": "x86-64"}
        wanted = machines[only] if only != machine else " or ".join(machines.values())
        raise UnsupportedError(f"no library is made for {system} on {machine}: choose a device with {wanted}")
    foreign = {"mtriple": triple} if triple else {}
    features = ["+reserve-x18"] if machine == "aarch64" else []
    if "-apple-" in foreign.get("mtriple", ""):
        # Vectors are zeroed as the first of Apple's 64-bit CPUs need it: Xcode's assembler warns of other ways.
        features.append("+zcz-fp-workaround")
    return [
        replace(each, llvm=each.llvm | foreign | {"mattr": [*each.llvm["mattr"], *features], "opt-level": 2})
        for each in found
    ]


def target_named(name: str, problem: str) -> Target:
    """A target by name, even if this machine cannot run it. Raises InputError, with `problem`, for unknown names."""
    known = {target.name: target for target in TARGETS}
    if name not in known:
        raise InputError(f"{problem}: choose {', '.join(known)}")
    return known[name]


def with_tuning(target: Target, values: Mapping[str, int]) -> Target:
    """The target with tuned values. Values that are not fields of a target are ignored."""
    known = {field.name for field in fields(Target)}
    return replace(target, **{name: value for name, value in values.items() if name in known})  # type: ignore[arg-type]


_cpu_flags = lru_cache(cpu_flags)
