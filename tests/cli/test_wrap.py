"""Answers on a terminal: no word is broken at its edge, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.cli.terminal.wrap import WordWrap


def wrapped(pieces: list[str], columns: int | None) -> str:
    written: list[str] = []
    wrap = WordWrap(lambda: columns, written.append)
    for piece in pieces:
        wrap.write(piece)
    wrap.end()
    return "".join(written)


def test_lines_end_between_words() -> None:
    pieces = ["The sky ap", "pears blue be", "cause of sc", "attering.\n\n  - in", "dented"]
    assert wrapped(pieces, 16) == "The sky appears\nblue because of\nscattering.\n\n  - indented"
    assert wrapped(pieces, None) == "".join(pieces)


def test_long_words_and_wide_characters_wrap() -> None:
    assert wrapped(["a", " ", "b" * 25], 10) == "a\n" + "b" * 25
    assert wrapped(["天空是蓝色的"], 6) == "天空是\n蓝色的"


@given(st.lists(st.text("ab \n天", max_size=9), max_size=9), st.integers(2, 12))
def test_wrapping_keeps_all_text_within_the_width(pieces: list[str], columns: int) -> None:
    shown = wrapped(pieces, columns)
    assert "".join(shown.split()) == "".join("".join(pieces).split())
    for line in shown.splitlines():
        size = sum(2 if each == "天" else 1 for each in line.rstrip())
        indented = len(line) - len(line.lstrip()) + max(map(len, line.split()), default=0)
        assert size <= columns or len(line.split()) < 2 or indented >= columns  # a word too long for a line of its own
