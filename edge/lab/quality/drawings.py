"""A small task for models that see: shapes, colours, digits and numbers of things, drawn here and shipped nowhere.

Each question has one right word among a few. An answer counts by the first of these words in it: so a model may answer
in a sentence. The drawings are the same everywhere: they are computed, not rendered by a library.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.errors import InputError
from edge.lab.quality.tasks import TaskScore, TaskScores
from edge.run.session import Session
from edge.sampling import SamplingParams

NAME = "drawings"
_VERSION = "1"
_SIDE, _EACH = 448, 12  # pixels of a side; questions of a kind
_TOKENS = 24  # of an answer
_COLOURS = {
    "red": (220, 30, 30), "green": (30, 150, 60), "blue": (30, 60, 220), "yellow": (240, 210, 40),
    "black": (20, 20, 20),
}  # fmt: skip
_NUMBERS = ("one", "two", "three", "four", "five")
_DIGITS = ("zero", *_NUMBERS, "six", "seven", "eight", "nine")
_SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


@dataclass(frozen=True)
class Drawing:
    """A question about a picture. pixels: uint8 [height, width, 3]. words: of which `right` is the right one."""

    kind: str
    pixels: Any
    question: str
    words: tuple[str, ...]
    right: str

    def is_answered_by(self, text: str) -> bool:
        """Whether the first of the words in a text, or of the numbers' digits, is the right one."""
        spelt = {str(_DIGITS.index(word)): word for word in self.words if word in _DIGITS}
        found = re.search(rf"\b(?:{'|'.join((*self.words, *spelt))})(?=\b|s\b)", text.lower())
        return found is not None and spelt.get(found[0], found[0]) == self.right


def drawings() -> list[Drawing]:
    """All questions, the kinds in turn."""
    chance = np.random.default_rng(1)
    kinds = (_shape, _colour, _digit, _number)
    return [kind(number, chance) for number in range(_EACH) for kind in kinds]


def eval_drawings(
    session: Session, *, limit: int | None = None, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> TaskScores:
    """Score a session's greedy answers. limit: only the first questions. Raises InputError for a model that sees no
    pictures."""
    if "picture" not in session.model.senses:
        raise InputError(f"{session.model.name} sees no pictures: name its encoder by --mmproj, or choose other tasks")
    asked, started = drawings()[:limit], time.perf_counter()
    right: dict[str, list[bool]] = {}
    for done, each in enumerate(asked, start=1):
        text = session.generate(
            each.question, images=[each.pixels], max_tokens=_TOKENS, sampling=SamplingParams(temperature=0)
        )
        right.setdefault(each.kind, []).append(each.is_answered_by(text))
        on_progress(done, len(asked))
    everything = [one for kind in right.values() for one in kind]
    scores = [_score(NAME, everything), *(_score(f"{NAME}_{kind}", found) for kind, found in right.items())]
    return TaskScores(tuple(scores), {NAME: 0}, {NAME: _VERSION}, 0, time.perf_counter() - started)


def _score(name: str, right: Sequence[bool]) -> TaskScore:
    share, count = sum(right) / len(right), len(right)
    stderr = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return TaskScore(name, "acc", share, stderr, count, higher_is_better=True)


def _shape(number: int, chance: Any) -> Drawing:
    shapes = tuple(_SHAPES)
    right, colour = shapes[number % len(shapes)], _any(chance, tuple(_COLOURS))
    pixels = _drawn([(right, colour, *chance.integers(150, _SIDE - 150, 2), int(chance.integers(70, 120)))])
    return Drawing("shape", pixels, f"Which shape is it: {_listed(shapes)}? Answer with one word.", shapes, right)


def _colour(number: int, chance: Any) -> Drawing:
    colours = tuple(_COLOURS)
    right, shape = colours[number % len(colours)], _any(chance, tuple(_SHAPES))
    pixels = _drawn([(shape, right, *chance.integers(150, _SIDE - 150, 2), int(chance.integers(70, 120)))])
    question = f"Which colour has the shape: {_listed(colours)}? Answer with one word."
    return Drawing("colour", pixels, question, colours, right)


def _digit(number: int, chance: Any) -> Drawing:
    """In seven segments."""
    digit, thick = number % 10, 24
    left, top, size = (int(chance.integers(*between)) for between in ((40, 160), (40, 160), (100, 130)))
    lines = {
        "a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2), "e": (0, 1, 0, 2),
        "f": (0, 0, 0, 1), "g": (0, 1, 1, 1),
    }  # fmt: skip
    pixels = _drawn([])
    for segment in _SEGMENTS[digit]:
        x, y, right, bottom = (size * each for each in lines[segment])
        pixels[top + y : top + bottom + thick, left + x : left + right + thick] = _COLOURS["black"]
    return Drawing("digit", pixels, "Which digit is it? Answer with the digit alone.", _DIGITS, _DIGITS[digit])


def _number(number: int, chance: Any) -> Drawing:
    count = number % len(_NUMBERS) + 1
    cells = chance.permutation(9)[:count].tolist()  # of 3 × 3, so that none touches another
    colour, step = _any(chance, tuple(_COLOURS)), _SIDE // 3
    things = [("circle", colour, step * (cell // 3) + step // 2, step * (cell % 3) + step // 2, 50) for cell in cells]
    question = "How many circles are there? Answer with a number."
    return Drawing("number", _drawn(things), question, _NUMBERS, _NUMBERS[count - 1])


_SHAPES: dict[str, Callable[[Any, Any], Any]] = {  # of rows and columns in units of the size, from the middle
    "circle": lambda y, x: x**2 + y**2 < 1,
    "square": lambda y, x: np.maximum(np.abs(x), np.abs(y)) < 0.85,
    "triangle": lambda y, x: (y < 0.8) & (np.abs(x) < (y + 1) / 1.8),
    "cross": lambda y, x: (np.minimum(np.abs(x), np.abs(y)) < 0.25) & (np.maximum(np.abs(x), np.abs(y)) < 1),
}


def _drawn(things: Sequence[tuple[str, str, int, int, int]]) -> Any:
    """Things on white: shape, colour, row and column of the middle, size."""
    rows, columns = np.mgrid[:_SIDE, :_SIDE].astype(np.float64)
    found = np.full((_SIDE, _SIDE, 3), 255, np.uint8)
    for shape, colour, row, column, size in things:
        found[_SHAPES[shape]((rows - row) / size, (columns - column) / size)] = _COLOURS[colour]
    return found


def _any(chance: Any, words: tuple[str, ...]) -> str:
    return words[int(chance.integers(len(words)))]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
