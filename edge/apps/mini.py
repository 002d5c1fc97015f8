"""edge-mini: a program beside the C library of a bundle for Linux, which answers on a board without Python.

Its options, their ranges and units are those of `edge run`, written as tables in C from where they are defined.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from edge import budget
from edge.apps.enums import Finish
from edge.apps.library import STATIC, cached_object, compile_sources, find_toolchain, link_program
from edge.apps.structs import LARGEST, OPTIONS, Field
from edge.devices.output import work_folder
from edge.errors import BudgetError, EdgeError, EngineError, InputError, OutputError, ShortMemoryError
from edge.flags import flags_of
from edge.options import Options
from edge.sampling import SamplingParams

PROGRAM = "edge-mini"
SENSORS = Path(__file__).parent / "c" / "sensors"
_SOURCES = Path(__file__).parent / "c" / "mini"
_COMPILE = ("-std=gnu11", "-Os", "-w", "-ffunction-sections", "-fdata-sections")
_AMOUNTS = {
    "time": budget.TIME, "energy": budget.ENERGY, "power": budget.POWER,
    "max_temp": replace(budget.TEMPERATURE, what="max-temp"),
}  # fmt: skip
_MOST = {"double": LARGEST, "int32": 2**31 - 1, "seed": 2.0**64}
_EXITS: dict[str, type[EdgeError]] = {
    "WRONG": InputError, "NO_BUDGET": BudgetError, "SHORT_OF_MEMORY": ShortMemoryError, "NO_OUTPUT": OutputError,
}  # fmt: skip


def make_program(folder: Path, machine: str, peak: int) -> None:
    """Write edge-mini beside libedge.a. It is static where the compiler has a static C library.

    peak: bytes that a process with one session may hold, by the plan. Raises as `make_library`.
    """
    toolchain = find_toolchain(machine, "linux")
    sources, known = (sorted((*_SOURCES.glob(kind), *SENSORS.glob(kind))) for kind in ("*.c", "*.h"))
    program = cached_object(toolchain, _COMPILE, sources, f"{PROGRAM}, {machine}", known, headers())
    with work_folder() as work:
        (work / "peak.c").write_text(f"const double planned_peak = {peak};\n", encoding="utf-8")
        objects = [program, *compile_sources(toolchain, _COMPILE, [work / "peak.c"], work)]
        try:
            link_program(toolchain, objects, folder / STATIC, folder / PROGRAM)
        except EngineError:
            link_program(toolchain, objects, folder / STATIC, folder / PROGRAM, static=False)


def headers() -> dict[str, str]:
    """flags.h and reasons.h."""
    amounts = {"memory": budget.MEMORY, **_AMOUNTS}
    lines = []
    for name, of in amounts.items():
        units = "".join(f"{{{_c(unit)}, {factor!r}}}, " for unit, factor in of.units.items())
        text = f"{{{_c(of.what)}, {_c(of.example)}, (const unit[]){{{units}{{NULL, 0}}}}}}"
        lines.append(f"static const quantity {name.upper()} = {text};")
    lines += [f"#define MEMORY_HELP {_c(flags_of(Options)['memory'].help)}", "static const flag FLAGS[] = {"]
    lines += [f"    {row}," for each in OPTIONS if (row := _row(each))]
    names = ", ".join(_c(each.name.lower()) for each in Finish)
    codes = ", ".join(f"{name} = {error.exit_code}" for name, error in _EXITS.items())
    reasons = f"enum {{ {codes} }};\nstatic const char *const REASONS[] = {{{names}}};\n"
    return {"flags.h": "\n".join([*lines, "    {NULL},", "};", ""]), "reasons.h": reasons}


def _row(field: Field) -> str:
    """An option as a row of FLAGS; empty if `edge run` has none of this name, or none that a program alone can keep."""
    sampled, own = flags_of(SamplingParams).get(field.name), flags_of(Options).get(field.name)
    place = f"offsetof(edge_options, {field.name})"
    if sampled:
        kind = {"double": "NUMBER", "int32": "WHOLE", "seed": "SEED"}[field.kind]
        limited = replace(sampled, high=field.high if field.checked else sampled.high)
        bounds = f"{sampled.low}, {min(limited.high, _MOST[field.kind])!r}"
        return f"{{{_c(sampled.name)}, {kind}, {place}, {bounds}, {_c(limited.range)}, NULL, {_c(sampled.help)}}}"
    if own and field.name in _AMOUNTS:
        return f"{{{_c(own.name)}, AMOUNT, {place}, 0, 0, NULL, &{field.name.upper()}, {_c(own.help)}}}"
    if own and field.enum:
        words = " or ".join(each.name.lower() for each in field.enum)
        return f"{{{_c(own.name)}, CHOICE, {place}, 0, 0, {_c(words)}, NULL, {_c(own.help)}}}"
    if own and field.kind == "uint32":
        return f"{{{_c(own.name)}, WHOLE, {place}, 1, 1024, {_c('from 1 to 1024')}, NULL, {_c(own.help)}}}"
    return ""


def _c(text: str) -> str:
    return json.dumps(text)
