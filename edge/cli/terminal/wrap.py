"""An answer on a terminal: lines end between words, where the terminal would end them within one."""

from __future__ import annotations

from collections.abc import Callable

_WIDE = "WF"  # East Asian characters of two columns, after each of which a line may end


class WordWrap:
    """Writes text that comes in pieces. A word is held back until it has ended, so that its place is known.

    columns: of the terminal, None if there is none. write: None writes to stdout.
    """

    def __init__(self, columns: Callable[[], int | None], write: Callable[[str], object] | None = None) -> None:
        self._write, self._columns = write or _to_stdout, columns
        self._column, self._blanks, self._word, self._size = 0, "", "", 0
        self._goes_on = False  # the word has begun in what is written

    def write(self, text: str) -> None:
        """Text is written as it is if stdout is no terminal."""
        if (most := self._columns()) is None:
            self._write(text)
            return
        for each in text:
            if each.isspace():
                self._end_word(most)
                self._blanks, self._goes_on = self._blanks + each, False
                if each == "\n":
                    self._put(self._blanks)
                    self._column, self._blanks = 0, ""
            else:
                self._word += each
                columns = 1 if each.isascii() else _columns_of(each)
                self._size += columns
                wide = columns == 2
                if wide or self._size >= most:
                    self._end_word(most)
                    self._goes_on = not wide  # the terminal breaks what is longer than a line, such as an address

    def end(self) -> None:
        """Write the text that is held back."""
        if (most := self._columns()) is not None:
            self._end_word(most)
            self._put(self._blanks)
            self._blanks = ""

    def _end_word(self, most: int) -> None:
        if not self._word:
            return
        before = self._column + len(self._blanks)
        if self._column and before + self._size > most and not self._goes_on:
            self._blanks, before = "\n", 0
        self._put(self._blanks + self._word)
        end = before + self._size
        self._column = end if end <= most else end % most
        self._blanks, self._word, self._size, self._goes_on = "", "", 0, False

    def _put(self, text: str) -> None:
        if text:
            self._write(text)


def _to_stdout(text: str) -> None:
    print(text, end="", flush=True)


def _columns_of(letter: str) -> int:
    import unicodedata  # 0.7 MiB of tables

    if unicodedata.east_asian_width(letter) in _WIDE:
        return 2
    return 0 if unicodedata.combining(letter) else 1
