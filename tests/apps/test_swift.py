"""The Swift package: its sources by their grammar, and its C target and passes as macOS builds them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bundles import model_of, pair_of
from conftest import GOLDEN
from runtime_library import C_FILES, RUNTIME, includes, said_by
from small_models import Small, write_small
from test_tool_grammar import MODELS

from edge import export
from edge.apps.bindings import copy_source
from edge.backends.tvm.targets import choose_target

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
def test_sources_follow_swift_s_grammar(path: Path, tmp_path: Path) -> None:
    copy_source(path, tmp_path / path.name)
    text = (tmp_path / path.name).read_bytes().replace(b", _version: 2", b"")  # which the grammar does not know
    assert errors(text) == []
    last = text.rindex(b")")
    assert errors(text[:last] + text[last + 1 :])  # so that its silence means something


NEEDS_SWIFT = pytest.mark.skipif(shutil.which("swift") is None, reason="no swift on the path")


def swift(package: Path, *words: str, flags: Sequence[str] = ()) -> str:
    """What `swift` says in the folder of a package; it must end well. flags: of its compiler."""
    passed = [each for flag in flags for each in ("-Xswiftc", flag)]
    done = subprocess.run(["swift", *words, *passed], cwd=package, capture_output=True, text=True, timeout=1500)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    return said


MODEL, ROWS = "llama-gqa-tied", {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
SHOWN = """import Testing

@testable import EdgeKit

@Test func shows() async throws {
    var options = EdgeOptions()
    options.temperature = 0
    options.maxTokens = 12
    options.ignoreEos = true
    var tokens: [Int32] = []
    for try await piece in try EdgeModel().session(options).pieces(of: "Hi") where piece.token >= 0 {
        tokens.append(piece.token)
    }
    print("TOKENS=\\(tokens)")
}
"""


@NEEDS_SWIFT
def test_package_passes_its_tests_on_linux(tmp_path: Path) -> None:
    """`swift test` of what was exported, without a warning in language modes 5 and 6; greedy tokens are Python's."""
    kit = tmp_path / "kit"
    export(model_of(MODEL), kit, isas=[choose_target().name], package="swift", **ROWS)
    (kit / "Tests" / "EdgeKitTests" / "Shown.swift").write_text(SHOWN)
    strict = ["-strict-concurrency=complete", "-warnings-as-errors"]
    for command, chosen in (("build", strict), ("test", ["-swift-version", "6", "-warnings-as-errors"])):
        said = swift(kit, command, flags=chosen)
        assert "warning: " not in said
    with pair_of(MODEL, **ROWS) as pair:
        tokens, _, _ = pair.ask("Hi", temperature=0, max_tokens=12, ignore_eos=1)
    assert f"TOKENS={tokens}" in said
    lint = subprocess.run(
        ["swift", "format", "lint", "-r", "Sources/EdgeKit", "Tests", "Sample"], cwd=kit, capture_output=True, text=True
    )
    assert lint.stderr == "" or "unable to invoke" in lint.stderr  # older ones have none


DOUBLE = Path(__file__).parent / "foundation"


@NEEDS_SWIFT
def test_apple_s_sessions_answer_as_ours(tmp_path: Path) -> None:
    """`EdgeLanguageModel` against declarations of Apple's protocol: its types, and what it makes of transcripts."""
    kit, model = tmp_path / "kit", tmp_path / "m.gguf"
    write_small(model, Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"])
    export(model, kit, isas=[choose_target().name], package="swift", threads=2, max_kv_size=3000)
    package = (kit / "Package.swift").read_text().replace('["CEdge"],', '["CEdge", "FoundationModels"],')
    package = package.replace('dependencies: ["EdgeKit"]', 'dependencies: ["EdgeKit", "FoundationModels"]').replace(
        '.target(name: "EdgeKit"', '.target(name: "FoundationModels", swiftSettings: [.unsafeFlags('
        '["-user-module-version", "2"])]), .target(name: "EdgeKit"',
    )  # fmt: skip
    (kit / "Package.swift").write_text(package)
    (kit / "Sources" / "FoundationModels").mkdir()
    shutil.copy(DOUBLE / "FoundationModels.swift", kit / "Sources" / "FoundationModels")
    shutil.copy(DOUBLE / "FollowerTests.swift", kit / "Tests" / "EdgeKitTests")
    said = swift(kit, "test", flags=("-swift-version", "6"))
    assert "schemasHoldAndToolsAreCalled() passed" in said, said[-3000:]


ZIG = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang")


def clang(folder: Path, target: str, *arguments: str | Path) -> str:
    """Compile as Apple's clang does, with the headers that zig brings. Returns the warnings."""
    caches = {f"ZIG_{each}_CACHE_DIR": str(folder / each) for each in ("GLOBAL", "LOCAL")}
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-std=c11", "-Os", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | caches).stderr


@ZIG
@pytest.mark.skipif(shutil.which("llvm-objdump") is None, reason="no llvm-objdump")
@pytest.mark.exhaustive
def test_c_target_builds_for_ios(tmp_path: Path) -> None:
    """For the plainest of Apple's CPUs without a word from compiler or assembler. Objects have the platform that the
    app is built for, no code that is written, and call nothing private."""
    kit, defined, called = tmp_path / "kit", set[str](), set[str]()
    export(GOLDEN / "llama-gqa-tied.gguf", kit, device="iphone-16", memory="200MiB", max_kv_size=64, gpu=True)
    c_target = kit / "Sources" / "CEdge"
    zig = Path(importlib.import_module("ziglang").__file__ or "").parent
    headers = zig / "lib" / "libc" / "include" / "any-darwin-any"
    flags = ("-Wall", "-Wextra", "-isystem", headers, f"-I{c_target / 'include'}", "-c")
    sources = [path for path in sorted(c_target.iterdir()) if path.suffix in (".c", ".S")]
    assert len([path for path in sources if path.suffix == ".S"]) == 3  # neon, dotprod, i8mm
    for source in sources:
        out = tmp_path / f"{source.name}.o"
        assert clang(tmp_path, "aarch64-ios.15.0", *flags, source, "-o", out) == "", source.name
        told = said_by("llvm-objdump", "--macho", "--private-headers", out)
        assert re.search(r"LC_BUILD_VERSION\n.*\n +platform ios\n.*\n +minos 15\.0", told), source.name
        if source.suffix == ".S":
            assert set(re.findall(r"segname (__\w+)", told)) <= {"__TEXT", "__LD"}  # nothing that is written
        symbols = said_by("llvm-objdump", "--syms", out).splitlines()
        called |= {line.split()[-1] for line in symbols if "*UND*" in line}
        defined |= {line.split()[-1] for line in symbols if re.match(r"\w+ g ", line)}
    assert {"_edge_open", "_edge_run_neon", "_edge_run_i8mm", "_METAL"} <= defined
    assert not defined & {"_OPENCL", "_WEBGPU"}
    assert {"_edge_doze", "_mmap", "_dlsym"} <= called
    assert all(name.startswith("_") for name in defined | called)
    private = re.compile(r"_+(ulock|os_|_pthread_|syscall|sandbox|MGCopy)")
    assert not [name for name in called - defined if private.match(name)]


@ZIG
@pytest.mark.exhaustive
def test_clang_imports_the_module_of_the_c_target(tmp_path: Path) -> None:
    """Swift imports edge.h in the same way, so the header must include all that it needs."""
    (tmp_path / "include").mkdir()
    for path in (RUNTIME / "edge.h", SWIFT / "Sources" / "CEdge" / "include" / "module.modulemap"):
        shutil.copy(path, tmp_path / "include")
    program, out = tmp_path / "use.m", tmp_path / "use.s"
    call = "edge_piece piece = {0}; piece.size = sizeof piece; return edge_next(session, &piece, error);"
    program.write_text(f"@import CEdge;\nedge_status use(edge_session *session, edge_error *error) {{ {call} }}\n")
    modules = ("-fmodules", f"-fmodules-cache-path={tmp_path}", f"-I{tmp_path / 'include'}")
    clang(tmp_path, "aarch64-macos", *modules, "-x", "objective-c", "-S", program, "-o", out)
    assert "_edge_next" in out.read_text()


@ZIG
@pytest.mark.exhaustive
def test_products_and_sums_round_apart_without_options(tmp_path: Path) -> None:
    """A package cannot have unsafe options, and clang would fuse them: other numbers than Python's."""
    fused, out = re.compile(r"\bf(n?m(add|sub)|ml[as])\b"), tmp_path / "out.s"
    seen = 0
    for source in C_FILES:
        clang(tmp_path, "aarch64-macos", "-S", *includes(), source, "-o", out)
        text = out.read_text()
        assert not fused.search(text), source.name
        seen += len(re.findall(r"\bfmul\b", text))
    assert seen > 20
