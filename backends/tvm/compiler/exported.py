"""Passes for apps: object files that the C runtime (edge/apps/runtime) calls, one per instruction set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from edge.backends.tvm.compiler.compiled import APP_QUICK_BYTES, about_design, compile_design, design_key
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import PackedLayout
from edge.backends.tvm.targets import ASSEMBLY, Target, app_targets, with_tuning
from edge.devices.host import usable_cores
from edge.devices.memory import memory_limit, memory_use
from edge.errors import UnsupportedError
from edge.storage import cache
from edge.types import Progress

_AT_ONCE = 2  # compilers
_FAMILIES = {"avxvnni", "avx2"}, {"i8mm", "dotprod", "neon"}  # the same but for dot products of bytes and BF16


def exported_designs(
    layout: PackedLayout, kv_dtype: str, machine: str, system: str,
    tuning: Callable[[str], Mapping[str, int]] | None = None, isas: Sequence[str] | None = None, *, lora: bool = False,
    part: str = "", taps: bool = False,
) -> list[Design]:  # fmt: skip
    """The designs of a model for all instruction sets of a machine, or for `isas` of them, best first.

    tuning: values that `edge tune` found for an instruction set. lora: with code for adapters. part, taps: of Design.
    Raises UnsupportedError if the machine or the system lacks one of them.
    """
    targets = app_targets(machine, system)
    if isas is not None:
        known = [each.name for each in targets]
        for name in isas or [""]:
            if name not in known:
                raise UnsupportedError(f"{machine} has no instruction set {name!r}: choose {', '.join(known)}")
        targets = [each for each in targets if each.name in isas]
    if tuning is not None:
        targets = [with_tuning(each, tuning(each.name)) for each in targets]
    designs = list[Design]()
    for target in reversed(targets):  # a plainer one first
        design = replace(Design.of(layout, kv_dtype, target), exported=True, lora=lora, part=part, taps=taps)
        plainer = designs[0] if designs else None
        if plainer and _adds_pairs(target, plainer.target):
            found = replace(design, shared=plainer.shared, like=plainer.target.name)
        else:
            found = replace(design, shared=_shared(design, plainer))
        designs.insert(0, found)
    return designs


def as_assembly(designs: Sequence[Design]) -> list[Design]:
    """The same designs as assembly text."""
    return [replace(each, target=replace(each.target, system=ASSEMBLY)) for each in designs]


def exported_objects(designs: Sequence[Design], progress: Progress | None = None) -> list[Path]:
    """The object files of exported designs, in order; or assembly text (`Target.is_text`). They lie in the cache and
    are compiled if missing, one at a time and in less memory where this machine is short of it; copy them soon.

    Raises EngineError if TVM's compiler fails, MissingExtraError if there is none, CacheError.
    """
    shares = [0.0] * len(designs)
    at_once = min(_AT_ONCE, usable_cores())
    frugal = memory_limit().bytes - memory_use().rss < at_once * APP_QUICK_BYTES

    def make(number: int) -> Path:
        def tell(share: float) -> None:
            shares[number] = share
            if progress is not None:
                progress(sum(shares) / len(shares))

        found = exported_object(designs[number], tell, frugal=frugal)
        tell(1.0)
        return found

    with ThreadPoolExecutor(1 if frugal else at_once) as pool:
        return list(pool.map(make, range(len(designs))))


def exported_object(design: Design, progress: Progress | None = None, *, frugal: bool = False) -> Path:
    """The object file of one design; see `exported_objects`."""
    make = functools.partial(compile_design, design, progress=progress, frugal=frugal)
    suffix = ".s" if design.target.is_text else ".o"
    return cache.find_or_make("kernels", design_key(design), suffix, make, about=about_design(design))


def _shared(design: Design, plainer: Design | None) -> dict[str, str]:
    """Units that reuse code of a simpler target's pass in the same library: those without int8 dot products, and the
    steps of i8mm, whose instructions need several tokens."""
    if not design.head and not design.shape.encoder:  # steps alone
        return {}
    shared = {"step_embed": design.symbol("chunk_embed")}
    if plainer is None or not _alike(design.target, plainer.target):
        return shared
    names, target = ["step_embed", "chunk_embed"], design.target
    alike_in_bytes = target.byte_rows == plainer.target.byte_rows
    if alike_in_bytes or design.kv_dtype != "int8":
        names.append("verify_attend")
    if target.pair_rows == plainer.target.pair_rows and (alike_in_bytes or not design.shape.encoder):
        names.append("chunk_attend")
    if (target.name, plainer.target.name) == ("i8mm", "dotprod"):
        units = ["qkv", "output", "gate_up", "down", "head"] + ["estimate"] * design.estimates
        names += [f"step_{unit}" for unit in units]
    return {name: plainer.symbol(name) for name in names}


def _adds_pairs(target: Target, plainer: Target) -> bool:
    """Whether two targets differ in a chunk's attention alone: tuned ones may divide other work differently."""
    same = replace(plainer, name=target.name, llvm=target.llvm, flags=target.flags, pair_rows=target.pair_rows)
    return target.pair_rows > 0 and same == target and not _related(target, plainer)


def _alike(target: Target, plainer: Target) -> bool:
    """Whether two targets have the same registers and float32's instructions, and divide work alike."""
    told = replace(
        plainer, name=target.name, llvm=target.llvm, flags=target.flags, gemm_tokens=target.gemm_tokens,
        pair_rows=target.pair_rows, byte_rows=target.byte_rows,
    )  # fmt: skip
    return told == target and _related(target, plainer)


def _related(*targets: Target) -> bool:
    return any({each.name for each in targets} <= family for family in _FAMILIES)


def passes_source(designs: Sequence[Design]) -> str:
    """passes.c: the tables of compiled passes, in the order in which the runtime tries them: EDGE_PASSES of the model,
    and one of each other part's."""
    declared = "".join(f"compiled_run {each.symbol('run')};\n" for each in designs)
    parts = dict.fromkeys(each.part for each in designs)
    return (
        "/* The compiled passes of this library, the best first. Written by edge export. */\n"
        f'#include "bundle.h"\n\n{declared}' + "".join(_table(part, designs) for part in parts)
    )


def _table(part: str, designs: Sequence[Design]) -> str:
    own = [each for each in designs if each.part == part]
    rows = "".join(f'    {{"{each.target.name}", {each.symbol("run")}}},\n' for each in own)
    name = f"EDGE_{part.upper()}_PASSES" if part else "EDGE_PASSES"
    return f"\nconst compiled_pass {name}[] = {{\n{rows}    {{NULL, NULL}},\n}};\n"
