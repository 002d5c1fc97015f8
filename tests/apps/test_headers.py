"""The files of the C runtime: headers that stand alone, direct includes, and no circles among files. The enums and
structs of edge.h are those of the schema in every language."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from ctypes_bundle import _TYPES
from runtime_library import COMMON, RUNTIME, includes

from edge.apps.bindings import EXPORTED, FILES, generated
from edge.apps.enums import ROLES_OF_TEXT, Engine, Finish, Form, Pooling, Speculate, Trim
from edge.apps.structs import OPTIONS, STRUCTS, layout, members
from edge.flags import flags_of
from edge.options import Options
from edge.run.report import StopReason
from edge.sampling import SamplingParams

FOLDERS = (*COMMON, RUNTIME / "gpu", RUNTIME / "npu", RUNTIME / "ears")
SYSTEMS = {"linux.c", "apple.c", "posix.c", "windows.c"}  # implement system.h side by side
# Pointers that trusted.c sets, by their functions.
BUNDLE = re.compile(
    r"\bEDGE_(ADAPTERS|COMPOSER|DRAFTER|EARS|EMBED|EYES|PIECES|SCORES|SOUNDS|TOOLS|TABLE|RACE|GPU|NPU)\b"
)
TARGETS = {
    "ADAPTERS": "adapter.c", "TABLE": "table.c", "RACE": "gpu_race.c", "GPU": "gpu_pass.c", "NPU": "npu_pass.c",
    "COMPOSER": "compose.c", "EARS": "ears.c", "EMBED": "embed.c", "EYES": "see.c", "PIECES": "pieces.c",
    "DRAFTER": "assistant.c draft_model.c mtp_layer.c", "TOOLS": "tools.c", "SOUNDS": "sounds.c", "SCORES": "scores.c",
}  # fmt: skip


def code_of(path: Path) -> str:
    """The text without comments and strings."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r'(?<!#include )"(?:\\.|[^"\\\n])*"', '""', text)


SOURCES = {path.name: code_of(path) for folder in FOLDERS for path in sorted(folder.glob("*.c"))}
HEADERS = {path.name: code_of(path) for folder in FOLDERS for path in sorted(folder.glob("*.h"))}


def defined(text: str) -> set[str]:
    """Functions that other files can call."""
    return set(re.findall(r"^(?!static|typedef|#|\s)[\w ]+?\*?\b(\w+)\([^;{}]*\)\s*\{", text, re.MULTILINE))


DEFINED = {name: defined(text) for name, text in SOURCES.items()}


@cache
def called(name: str) -> dict[str, set[str]]:
    """Functions of other files that this one names, by file."""
    words = set(re.findall(r"(?<![.>])\b\w+", SOURCES[name]))
    found = {other: words & names - DEFINED[name] for other, names in DEFINED.items() if other != name}
    return {other: names for other, names in found.items() if names and not (other in SYSTEMS and name in SYSTEMS)}


def test_no_circles_among_files() -> None:
    """Calls through the pointers of a bundle count, too."""
    graph = {}
    for name, text in SOURCES.items():
        graph[name] = set(called(name)) | {to for each in BUNDLE.findall(text) for to in TARGETS[each].split()} - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_no_circles_among_headers() -> None:
    TopologicalSorter({name: set(re.findall(r'#include "(\w+\.h)"', text)) for name, text in HEADERS.items()}).prepare()


def test_files_include_headers_of_functions_they_call() -> None:
    missing, declared = [], {header: {*re.findall(r"\b(\w+)\(", text)} for header, text in HEADERS.items()}
    for name, text in SOURCES.items():
        included = set(re.findall(r'#include "(\w+\.h)"', text)) | {"base.h", "edge.h"}
        for function in sorted(set().union(*called(name).values())):
            declaring = {header for header, own in declared.items() if function in own}
            if not declaring & included:
                missing.append(f"{name}: {function} of {', '.join(declaring)}")
    assert not missing, "\n".join(missing)


@pytest.mark.exhaustive
def test_headers_compile_alone() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler cc")
    folders = [f"-I{folder}" for folder in FOLDERS]
    paths = [folder / name for folder in FOLDERS for name in HEADERS if (folder / name).exists()]
    subprocess.run(["cc", "-std=c11", "-fsyntax-only", *includes(), *folders, *paths], check=True)


# What the samples of manuals name that is the app's.
SAMPLE = """
{{
    edge_session *session = given;
    edge_error error = {{sizeof error}};
    {{
{text}    }}
    return 0;
}}
"""


def test_c_in_manuals_compiles(tmp_path: Path) -> None:
    """Each sample as the body of a function, without warnings but for what it does not go on to use."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler cc")
    own = "edge_model *model, edge_session *given, const uint8_t *rgba, const float *samples, size_t count"
    pages = [RUNTIME.parents[2] / "docs" / page for page in ("apps.md", "apps-tools.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    samples = re.findall(r"^```c\n(.*?)^```$", text, re.M | re.S)
    assert len(samples) >= 7
    lines = [f"#include <{each}.h>" for each in ("stdio", "string")] + ['#include "edge.h"']
    for at, sample in enumerate(samples):
        lines.append(f"int sample_{at}({own});\nint sample_{at}({own}){SAMPLE.format(text=sample)}")
    (tmp_path / "samples.c").write_text("\n".join(lines), encoding="utf-8")
    flags = ("-Wall", "-Werror", "-Wno-unused", f"-I{RUNTIME}")
    subprocess.run(["cc", "-std=c11", "-fsyntax-only", *flags, tmp_path / "samples.c"], check=True)


# Bindings


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
