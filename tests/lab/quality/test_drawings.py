"""The task of drawings: what is drawn, how answers count, and a run of it."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import GOLDEN
from test_cli import json_here as edge_json

import edge
from edge.lab.quality.drawings import Drawing, drawings, eval_drawings
from edge.sampling import SamplingParams

EYES = GOLDEN / "eyes" / "mmproj.gguf"
MODEL = str(GOLDEN / "eyes" / "smolvlm.gguf")


def pieces(ink: np.ndarray) -> int:
    """Connected parts, by flooding."""
    left, count = ink.copy(), 0
    while left.any():
        count += 1
        part = np.zeros_like(left)
        part[np.unravel_index(left.argmax(), left.shape)] = True
        while True:
            grown = part.copy()
            for step in (1, -1):
                for axis in (0, 1):
                    grown |= np.roll(part, step, axis)
            grown &= left
            if (grown == part).all():
                break
            part = grown
        left &= ~part
    return count


def test_drawings_match_their_questions() -> None:
    every = drawings()
    assert [(each.question, each.right, each.pixels.tobytes()) for each in every] == [
        (each.question, each.right, each.pixels.tobytes()) for each in drawings()
    ]
    assert len({each.pixels.tobytes() for each in every}) > 40
    full = {"circle": 0.785, "square": 1, "triangle": 0.5, "cross": 0.44}  # shares of their boxes
    inks = {"red": 0, "green": 1, "blue": 2}
    for each in every:
        ink = (each.pixels != 255).any(axis=2)
        assert each.right in each.words
        if each.kind == "number":
            assert each.words[pieces(ink[::8, ::8]) - 1] == each.right
        if each.kind == "colour" and each.right in inks:
            assert each.pixels[ink].mean(axis=0).argmax() == inks[each.right]
        if each.kind == "shape":
            rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
            share = ink.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
            assert share == pytest.approx(full[each.right], abs=0.03)


@pytest.mark.parametrize(("text", "right"), [
    ("Two", True), ("There are 2 circles.", True), ("two circles, not three", True), ("three or two", False),
    ("22", False), ("", False), ("I see a twofold", False),
])  # fmt: skip
def test_answers_count_by_their_first_word(text: str, right: bool) -> None:
    asked = Drawing("number", None, "", ("one", "two", "three"), "two")
    assert asked.is_answered_by(text) == right


def test_scores_are_those_of_the_answers() -> None:
    with edge.load(MODEL, backend="reference", mmproj=EYES, threads=1) as session:
        found = eval_drawings(session, limit=6)
        greedy = SamplingParams(temperature=0)
        right = [
            each.is_answered_by(session.generate(each.question, images=[each.pixels], max_tokens=24, sampling=greedy))
            for each in drawings()[:6]
        ]
    assert [(each.task, each.questions) for each in found.scores] == [
        ("drawings", 6), ("drawings_shape", 2), ("drawings_colour", 2), ("drawings_digit", 1), ("drawings_number", 1),
    ]  # fmt: skip
    assert found.scores[0].value == sum(right) / 6


def test_command() -> None:
    command = ("eval", "tasks", MODEL, "--tasks", "drawings", "--backend", "reference", "--limit", "2", "-q")
    found = edge_json(*command, "--mmproj", str(EYES), "--json")
    assert [each["task"] for each in found["scores"]] == ["drawings", "drawings_shape", "drawings_colour"]
