"""Bundles for Windows: what is in them, and under Wine the answers of the Python session."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import Pair, Text, bundle_of, model_of, recorded_session, refused
from ctypes_bundle import ERRORS, BundleSession, Piece, _options, _Usage
from runtime_library import said_by
from wine import COMPILER, build_for_windows, command, run, windows_path

from edge.apps.enums import Finish, Role
from edge.apps.library import exported
from edge.errors import InputError, ModelFormatError

if shutil.which(COMPILER) is None:
    pytest.skip(f"no {COMPILER}", allow_module_level=True)
if platform.machine() != "x86_64":
    pytest.skip("Wine runs programs for x86-64 on x86-64", allow_module_level=True)

SYSTEM = ("platform.c", "windows.c", "cpu.c", "error.c")
MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 64, "prefill_step_size": 16, "threads": 2}
BUNDLE = {"device": "windows-x86", "memory": "100MiB", **ROWS}
BRIEF = "Be brief."
TEXT = "The quick brown fox jumps over the lazy dog. "


class WindowsSession:
    """A session of a bundle in a program that Wine runs. A context manager."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(**command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, *words: object) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(map(str, words)) + "\n")
        process.stdin.flush()
        said = process.stdout.readline().rstrip("\r\n")
        if found := re.fullmatch(r"error (-\d+) (.*)", said):
            raise ERRORS[int(found[1])](found[2])
        assert process.poll() is None, f"it ended: {process.returncode}"
        return said

    def __enter__(self) -> WindowsSession:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            try:
                if process.stdin is not None:
                    process.stdin.close()
                assert process.wait(600) == 0
            finally:
                process.kill()

    def open(self, path: Path) -> None:
        self.tell("open", windows_path(path).encode().hex())

    def set(self, **options: Any) -> None:
        self.tell("set", bytes(_options(options)).hex())

    def append(self, role: Role, text: Text) -> None:
        data = text.encode() if isinstance(text, str) else np.array(text, np.int32).tobytes()
        self.tell("append", int(role), data.hex())

    def next(self) -> Piece:
        token, finish, *text = self.tell("next").split()
        said = bytes.fromhex("".join(text)).decode()
        return Piece(None if int(token) < 0 else int(token), said, Finish(int(finish)))

    pieces, answer = BundleSession.pieces, BundleSession.answer

    def rewind(self, turns: int | None = None) -> None:
        self.tell("rewind", 0xFFFFFFFF if turns is None else turns)

    def use(self) -> dict[str, Any]:
        found = _Usage.from_buffer_copy(bytes.fromhex(self.tell("use")))
        return {str(name): getattr(found, name) for name, kind, *_ in _Usage._fields_ if kind is not ctypes.c_char_p}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in a folder whose name has letters of several alphabets."""
    folder = tmp_path_factory.mktemp("windows") / "é模\N{GRINNING FACE}"
    return shutil.copytree(bundle_of(MODEL, **BUNDLE), folder)


@pytest.fixture(scope="module")
def program(bundle: Path) -> Path:
    """Beside the DLL, where Windows looks for it."""
    built = build_for_windows(["windows_session.c", bundle / "edge.lib"], f"-I{bundle}")
    return shutil.copy(built, bundle / "program.exe")


def test_dll_exports_the_header_and_imports_system_libraries(bundle: Path) -> None:
    said = said_by("x86_64-w64-mingw32-objdump", "-p", bundle / "edge.dll")
    assert "file format pei-x86-64" in said
    assert set(re.findall(r"^\t\[ *\d+\] (\w+)$", said, re.M)) == set(exported())
    assert {name.lower() for name in re.findall(r"DLL Name: (\S+)", said)} == {
        "advapi32.dll", "kernel32.dll", "msvcrt.dll", "api-ms-win-core-synch-l1-2-0.dll",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_imports_of_the_windows_library(tmp_path: Path) -> None:
    program = build_for_windows([*SYSTEM, "windows_system.c"])
    assert run(program, windows_path(tmp_path)) == "fine\n"


def test_answers_are_those_of_the_python_session(program: Path, bundle: Path, tmp_path: Path) -> None:
    """The conversation has evictions, a follow-up, a saved state, a cancelled answer, and sampling. The Python session
    keeps the rows of the system's text, as bundles do."""
    kept, missing = model_of(MODEL).system_rows(BRIEF), tmp_path / "né.edge"
    with (
        recorded_session(MODEL, kv_policy="streaming", keep=kept, **ROWS) as (python, recorded),
        WindowsSession(program) as windows,
    ):
        with pytest.raises(ModelFormatError) as raised:
            windows.open(missing)
        assert str(raised.value) == f"cannot open {windows_path(missing)}: check that it is there and may be read"
        windows.open(bundle / "model.edge")
        pair = Pair(python, windows, recorded)
        pair.ask(TEXT * 2, system=BRIEF, max_tokens=40, temperature=0, ignore_eos=1)
        state = windows_path(tmp_path / "état").encode().hex()
        windows.tell("save", state)
        expected = pair.ask("And?", max_tokens=6, seed=3, temperature=3.0, top_p=0.95, ignore_eos=1)
        use = windows.use()
        assert use["evicted"] > 0
        assert use["threads"] == 2
        assert use["anonymous"] > use["kv"]
        windows.rewind()
        windows.tell("load", state)
        assert windows.answer("And?") == expected
        refused(InputError, "threads must be at most 2, for which the model was exported", windows.set, threads=3)
        windows.append(Role.USER, "Hi")
        assert windows.next().finish == Finish.GOING
        windows.tell("cancel")
        assert windows.next().finish == Finish.INTERRUPTED
        pair.forget()
        pair.ask("Hi", max_tokens=5, temperature=0, ignore_eos=1)
