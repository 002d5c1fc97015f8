"""The Swift package: its sources by their grammar, and its C target and passes as macOS builds them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from kotlin_programs import KOTLIN
from runtime_library import RUNTIME

from edge import export

SWIFT = RUNTIME.parent / "swift"
SOURCES = sorted(SWIFT.rglob("*.swift"))


def errors(source: bytes) -> list[str]:
    """What the grammar of tree-sitter-swift cannot read."""
    tree_sitter = pytest.importorskip("tree_sitter")
    language = tree_sitter.Language(pytest.importorskip("tree_sitter_swift").language())

    def walk(node: Any) -> list[str]:
        own = [f"{node.start_point}: {node.text[:60]!r}"] if node.is_error or node.is_missing else []
        return own + [error for child in node.children for error in walk(child)]

    return walk(tree_sitter.Parser(language).parse(source).root_node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_follow_swift_s_grammar(path: Path) -> None:
    text = path.read_bytes()
    assert errors(text) == []
    last = text.rindex(b")")
    assert errors(text[:last] + text[last + 1 :])  # so that its silence means something


def test_the_sample_view_is_short() -> None:
    assert len((SWIFT / "Sample" / "ChatView.swift").read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize(("name", "prefix"), [("Role", "EDGE_SYSTEM"), ("Finish", "EDGE_GOING"), ("Trim", "EDGE_TRIM")])
def test_bindings_count_as_edge_h_does(name: str, prefix: str) -> None:
    """Roles, reasons and levels have the numbers of their places; the bindings' are in the same order."""
    header = re.sub(r"/\*.*?\*/", "", (RUNTIME / "edge.h").read_text(encoding="utf-8"), flags=re.DOTALL)
    listed = re.search(rf"enum \{{\s*({prefix}.*?)\}}", header, re.DOTALL)
    assert listed is not None
    names = [each.strip().removeprefix("EDGE_").removeprefix("TRIM_") for each in listed[1].split(",")]
    swift = "".join((SWIFT / "Sources" / "EdgeKit" / "EdgeOptions.swift").read_text(encoding="utf-8"))
    body = re.search(rf"enum {name}: Int32.*?\{{(.*?)\n\}}", swift, re.DOTALL)
    assert body is not None
    cases = [word for line in re.findall(r"case (.*)", body[1]) for word in re.findall(r"\w+", line)]
    assert [case.upper() for case in cases] == [each for each in names if each != "IDS"]
    kotlin = (KOTLIN / "src" / "edge" / "runtime" / "EdgeOptions.kt").read_text(encoding="utf-8")
    listed = re.search(rf"enum class {name} \{{(.*?)[;}}]", kotlin, re.DOTALL)
    assert listed is not None
    assert re.findall(r"\b[A-Z]{2,}\b", re.sub(r"/\*.*?\*/", "", listed[1], flags=re.DOTALL)) == [
        each for each in names if each != "IDS"
    ]


@pytest.mark.exhaustive
def test_the_c_target_builds_for_apple_s_systems(tmp_path: Path) -> None:
    """With clang and the headers of macOS, which zig brings: without warnings, and nothing is left undefined."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no ziglang")
    export(GOLDEN / "llama-gqa-tied.gguf", tmp_path / "kit", device="iphone-16", memory="200MiB", max_kv_size=64)
    sources = tmp_path / "kit" / "Sources" / "CEdge"
    clang = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos"]
    command = [*clang, "-std=c11", "-Os", "-Wall", "-Werror", f"-I{sources / 'include'}", "-shared"]
    files = [str(path) for path in sorted(sources.iterdir()) if path.suffix in (".c", ".s")]
    assert len([path for path in files if path.endswith(".s")]) == 3  # neon, dotprod, i8mm
    caches = {f"ZIG_{each}_CACHE_DIR": str(tmp_path / each) for each in ("GLOBAL", "LOCAL")}
    command += [*files, "-o", str(tmp_path / "libedge.dylib")]
    subprocess.run(command, check=True, env=os.environ | caches)
    assert (tmp_path / "libedge.dylib").read_bytes()[:8] == bytes.fromhex("cffaedfe0c000001")  # Mach-O, ARM64
