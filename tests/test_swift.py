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


ZIG = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang")


def clang(folder: Path, *arguments: str | Path) -> None:
    """As Apple's compiles a package: clang with the headers of macOS, which zig brings."""
    caches = {f"ZIG_{each}_CACHE_DIR": str(folder / each) for each in ("GLOBAL", "LOCAL")}
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos", "-std=c11", "-Os", *arguments]
    subprocess.run(
        command, check=True, stderr=subprocess.DEVNULL if "-S" in arguments else None, env=os.environ | caches
    )


@ZIG
@pytest.mark.exhaustive
def test_the_c_target_builds_for_apple_s_systems(tmp_path: Path) -> None:
    """Without warnings, and nothing is left undefined."""
    export(GOLDEN / "llama-gqa-tied.gguf", tmp_path / "kit", device="iphone-16", memory="200MiB", max_kv_size=64)
    sources, out = tmp_path / "kit" / "Sources" / "CEdge", tmp_path / "libedge.dylib"
    files = [path for path in sorted(sources.iterdir()) if path.suffix in (".c", ".s")]
    assert len([path for path in files if path.suffix == ".s"]) == 3  # neon, dotprod, i8mm
    clang(tmp_path, "-Wall", "-Werror", f"-I{sources / 'include'}", "-shared", *files, "-o", out)
    assert out.read_bytes()[:8] == bytes.fromhex("cffaedfe0c000001")  # Mach-O, ARM64


@ZIG
@pytest.mark.exhaustive
def test_products_and_sums_round_apart_without_options(tmp_path: Path) -> None:
    """A package cannot have unsafe options, and clang would fuse them: other numbers than Python's."""
    fused, out = re.compile(r"\bf(n?m(add|sub)|ml[as])\b"), tmp_path / "out.s"
    seen = 0
    for source in sorted(RUNTIME.glob("*.c")):
        clang(tmp_path, "-S", f"-I{RUNTIME}", source, "-o", out)
        text = out.read_text()
        assert not fused.search(text), source.name
        seen += len(re.findall(r"\bfmul\b", text))
    assert seen > 20
