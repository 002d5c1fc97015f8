"""Tables and answers on a terminal: nothing is lost when it is narrow, and programs read one line a row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.cli.terminal.wrap import WordWrap
from edge.lab.report.document import table

CELLS = st.text("abc d/.", max_size=60).map(lambda text: " ".join(text.split()))
TABLES = st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4))


def read(shown: str) -> list[list[str]]:
    """The cells of every line but the rule."""
    lines = [line for line in shown.splitlines() if not set(line) <= set("|-: ") or not set(line) & set("-:")]
    return [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines]


@given(TABLES, st.integers(0, 5), st.integers(1, 200))
def test_narrow_table_keeps_all_text(rows: list[list[str]], left: int, width: int) -> None:
    shown = table(rows[0], rows[1:], left, width)
    columns = len(rows[0])
    letters = ["".join("".join(line[i] for line in read(shown)).split()) for i in range(columns)]
    assert letters == ["".join("".join(row[i] for row in rows).split()) for i in range(columns)]
    lengths = {len(line) for line in shown.splitlines()}
    assert len(lengths) == 1
    if left >= columns and width >= 9 * columns + 1:
        assert lengths.pop() <= width


@given(TABLES, st.integers(0, 5))
def test_row_is_line_where_there_is_room(rows: list[list[str]], left: int) -> None:
    plain = table(rows[0], rows[1:], left)
    assert read(plain) == rows
    assert plain == table(rows[0], rows[1:], left, len(plain.splitlines()[0]))


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
