"""The C library of a bundle: compilers, archives, and what a linker and Android's loader ask of it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from runtime_library import build

pytest.importorskip("tvm_ffi")

from edge.embed.library import archive, exported, find_toolchain
from edge.errors import UnsupportedError


def test_the_functions_of_the_header_are_exported() -> None:
    names = exported()
    assert {"edge_open", "edge_begin", "edge_end", "edge_next", "edge_cancel", "edge_tokenize"} <= set(names)
    assert len(names) == len(set(names)) >= 15


def test_a_linker_takes_our_archive(tmp_path: Path) -> None:
    (tmp_path / "part.c").write_text("int part(void);\nint part(void) { return 42; }\n")
    (tmp_path / "main.c").write_text("int part(void);\nint main(void) { return part(); }\n")
    member = build([tmp_path / "part.c"], ("-c",), ".o").read_bytes()
    (tmp_path / "libpart.a").write_bytes(archive("part.o", member, ["part"]))
    program = build([tmp_path / "main.c", tmp_path / "libpart.a"])
    assert subprocess.run([program]).returncode == 42
    said = subprocess.run(["nm", "--print-armap", tmp_path / "libpart.a"], capture_output=True, text=True, check=True)
    assert "part in part.o" in said.stdout


def test_a_compiler_for_another_machine_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = find_toolchain(platform.machine(), "linux")
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    monkeypatch.setenv("CC", own.compiler[0])
    monkeypatch.delenv("ANDROID_NDK_HOME", raising=False)
    monkeypatch.setattr("edge.embed.library.sys.executable", str(tmp_path / "no-python"))  # which might have zig
    assert find_toolchain(platform.machine(), "android").compiler == own.compiler
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", own.compiler[0] if own.compiler[0].startswith("/") else "/usr/bin/" + own.compiler[0])
    with pytest.raises(UnsupportedError, match=f"no C compiler for {other}: apt-get install gcc-.*ziglang.*NDK_HOME"):
        find_toolchain(other, "android")
    with pytest.raises(UnsupportedError, match="a library for ios is built there"):
        find_toolchain("aarch64", "ios")
