"""The enums and structs of edge.h in every language are those of the schema."""

from __future__ import annotations

import ctypes
import re
from typing import get_args

import pytest
from ctypes_bundle import _TYPES
from runtime_library import RUNTIME

from edge.apps.bindings import EXPORTED, FILES, generated
from edge.apps.enums import ROLES_OF_TEXT, Engine, Finish, Form, Pooling, Speculate, Trim
from edge.apps.structs import OPTIONS, STRUCTS, layout, members
from edge.flags import flags_of
from edge.options import Options
from edge.run.report import StopReason
from edge.sampling import SamplingParams


@pytest.mark.parametrize("name", FILES)
def test_generated_code_is_current(name: str) -> None:
    assert (RUNTIME.parent / name).read_text(encoding="utf-8") == generated(name)  # else: python -m edge.apps.bindings


def test_enums_have_the_values_of_edge_h() -> None:
    """Kotlin and Swift count members of those that state none; ids are no role of theirs, so that roles state them."""
    for kind in (Finish, Form, Trim, Engine, Speculate, Pooling):
        assert [*kind] == [*range(len(kind))]
    kotlin, swift = (
        generated("kotlin/src/edge/runtime/EdgeOptions.kt"),
        generated("swift/Sources/EdgeKit/EdgeOptions.swift"),
    )
    for role in ROLES_OF_TEXT:
        assert f"    {role.name}({role.value})," in kotlin
        assert f"    case {role.name.lower()} = {role.value}\n" in swift


@pytest.mark.parametrize("field", [each.name for each in OPTIONS])
def test_every_language_has_each_option(field: str) -> None:
    """Bindings declare each option and pass it to C, except languages that the schema says lack it."""
    (option,) = (each for each in OPTIONS if each.name == field)
    first, *others = field.split("_")
    name = first + "".join(map(str.capitalize, others))
    texts = {path: generated(path) for path in (*FILES, *EXPORTED)}
    own = option.kind in ("text", "texts")  # whose memory bindings keep by lines of their own
    lacks = option.without
    assert re.search(rf"\b{field}; */?", texts["runtime/edge.h"])
    kotlin = texts["kotlin/src/edge/runtime/EdgeOptions.kt"]
    assert f"    public val {name}: " in kotlin
    assert own or re.search(rf"\.put\w+\(\d+, .*\b{name}\b", kotlin)
    swift = texts["swift/Sources/EdgeKit/EdgeOptions.swift"]
    assert ("swift" in lacks) is (f"native.{field} = " not in swift)
    assert ("swift" in lacks) is (f"    public var {name}" not in swift)
    if not own:
        assert ("web" in lacks) is (f'["{name}", ' not in texts["web/package/abi.js"])
    answers = texts["web/package/index.d.ts"].partition("interface SamplingOptions {")[2].partition("\n}")[0]
    assert ("web" in lacks or "types" in lacks) is (f"  {name}?: " not in answers)


def test_options_are_called_as_in_python() -> None:
    names = {each.name for each in OPTIONS}
    assert {name for name, flag in flags_of(SamplingParams).items() if flag.apps} < names
    assert {"time", "energy", "power", "max_temp", "threads", "speculate"} == names & set(flags_of(Options))


def test_answers_end_for_the_reasons_of_reports() -> None:
    words = {each.name.lower() for each in Finish if each != Finish.GOING}
    others = {"terminated", "failed"}  # by a signal; an error, which has a status
    assert words == set(get_args(StopReason)) - others


@pytest.mark.parametrize("pointer", [8, 4], ids=["64 bits", "WebAssembly"])
def test_structs_lie_as_compilers_lay_them_out(pointer: int) -> None:
    """Kotlin and JavaScript write them byte by byte."""
    types = _TYPES | {"pointer": ctypes.c_void_p if pointer == 8 else ctypes.c_uint32}
    for name, struct in STRUCTS.items():
        fields = [(member, types[kind]) for member, kind in members(struct)]
        compiled = type(name, (ctypes.Structure,), {"_fields_": fields})
        places = {member: getattr(compiled, member).offset for member, _ in fields}
        assert layout(struct, pointer) == (places, ctypes.sizeof(compiled)), name
