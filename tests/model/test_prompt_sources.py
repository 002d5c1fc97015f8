"""Where `edge run` takes its prompt from: the command line, a file, what is piped in; a silent pipe stops nothing."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edge.cli.terminal import prompts
from edge.cli.terminal.prompts import read_prompt
from edge.errors import InputError

ASKED = "What is it?"


Connect = Callable[[int], None]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes a descriptor stdin."""
    monkeypatch.setattr(prompts, "PATIENCE_S", 0.05)
    with ExitStack() as files:

        def make(descriptor: int) -> None:
            monkeypatch.setattr(sys, "stdin", files.enter_context(open(descriptor, encoding="utf-8")))

        yield make


def pipe(connect: Connect) -> int:
    """stdin is a pipe; returns its other end."""
    end, writer = os.pipe()
    connect(end)
    return writer


def asked(*given: str, file: Path | None = None) -> str:
    return "".join(read_prompt(given, file))


def test_terminal_without_prompt_is_told_of_chat(connect: Connect) -> None:
    leader, terminal = os.openpty()
    connect(terminal)
    with pytest.raises(InputError, match=r"^no prompt: .*; edge chat holds a conversation$"):
        read_prompt([], None)
    os.close(leader)


@pytest.mark.parametrize(("text", "whole"), [
    ("A red apple.", "A red apple.\n\nWhat is it?"), ("A red apple.\n", "A red apple.\n\nWhat is it?"),
    ("Red\napple.\n\n", "Red\napple.\n\nWhat is it?"), ("{\n}", "{\n}\n\nWhat is it?"), ("\n", "\n\nWhat is it?"),
    ("", "What is it?"),
])  # fmt: skip
def test_piped_text_precedes_the_prompt(text: str, whole: str, tmp_path: Path, connect: Connect) -> None:
    writer = pipe(connect)
    os.write(writer, text.encode())
    os.close(writer)
    assert asked(ASKED) == whole
    (tmp_path / "text").write_text(text, encoding="utf-8")
    connect(os.open(tmp_path / "text", os.O_RDONLY))
    assert asked(ASKED) == whole


def test_silent_pipe_is_not_waited_for(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    writer = pipe(connect)
    assert asked(ASKED) == ASKED
    assert "nothing came on stdin" in capsys.readouterr().err
    os.close(writer)
    here, there = socket.socketpair()
    with there:
        connect(here.detach())
        assert asked(ASKED) == ASKED


def test_dash_waits_for_stdin(connect: Connect) -> None:
    writer = pipe(connect)

    def write() -> None:
        os.write(writer, b"A pear.")
        os.close(writer)

    late = threading.Timer(0.3, write)
    late.start()
    assert asked(ASKED, "-") == "A pear.\n\nWhat is it?"
    late.join()


def test_empty_stdin_beside_a_prompt_is_fine(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(os.open(os.devnull, os.O_RDONLY))
    assert asked(ASKED) == ASKED
    with pytest.raises(InputError, match=r"^stdin is empty"):
        asked()
    monkeypatch.setattr(sys, "stdin", None)  # as python sees a closed one
    assert asked(ASKED) == ASKED
    for given in ((), ("-",), (ASKED, "-")):
        with pytest.raises(InputError, match="no prompt: give one"):
            asked(*given)


def test_file_is_read_and_stdin_is_not(tmp_path: Path, connect: Connect) -> None:
    writer = pipe(connect)
    os.write(writer, b"piped")
    (tmp_path / "letter.txt").write_text("Dear all", encoding="utf-8")
    assert asked(file=tmp_path / "letter.txt") == "Dear all"
    assert asked(ASKED, file=tmp_path / "letter.txt") == "Dear all\n\nWhat is it?"
    os.close(writer)


@pytest.mark.parametrize(
    ("given", "file", "says"), [((ASKED, "Why?"), None, "the prompt once"), (("-",), Path("letter.txt"), "not both")]
)
def test_prompt_is_given_once(given: tuple[str, ...], file: Path | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        asked(*given, file=file)
