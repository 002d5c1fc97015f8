"""The files of the C runtime: headers that stand alone, direct includes, and no circles among files."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from runtime_library import COMMON, RUNTIME, includes

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
