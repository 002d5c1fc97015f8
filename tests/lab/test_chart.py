"""Charts: what stands on their axes, and where."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.lab.report.chart import NARROW, Axis, Chart, width_of


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e9))
def test_round_numbers_lie_within_axis(low: float, span: float) -> None:
    axis = Axis(low, low + span)
    marked = [value for value, _ in axis.marked()]
    assert len(marked) <= 7
    assert all(axis.low <= each <= axis.high for each in marked)
    assert marked == sorted(set(marked))


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e290))
def test_logarithmic_axes_have_few_numbers(low: float, times: float) -> None:
    marked = [value for value, _ in Axis(low, low * times, log=True).marked()]
    assert len(marked) <= 9
    assert marked == sorted(set(marked))


@pytest.mark.parametrize(("axis", "words"), [
    (Axis(0, 436), "0 100 200 300 400"), (Axis(0.97, 1.28), "1 1.1 1.2"), (Axis(0.3, 2000, log=True), "1 10 100 1,000"),
    (Axis(3, 40, log=True), "5 10 20"), (Axis(0, 0), "0"),
])  # fmt: skip
def test_numbers_are_round(axis: Axis, words: str) -> None:
    assert " ".join(said for _, said in axis.marked()) == words


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=12, unique=True).map(sorted))
def test_words_below_chart_have_room_on_phone(contexts: list[int]) -> None:
    x = Axis(contexts[0], contexts[-1], log=True, ticks=[(each, f"{each:,}") for each in contexts])
    drawn = re.findall(r'<text x="([\d.]+)%" y="218.0" [^>]*>([^<]+)<', Chart("", "", x, Axis(0, 1)).figure())
    assert drawn[0][1] == f"{contexts[0]:,}"
    ends = [(float(at) / 100 * NARROW, width_of(words) / 2) for at, words in drawn]
    assert all(one + half <= other - behind for (one, half), (other, behind) in pairwise(ends))


def test_words_of_chart_are_escaped() -> None:
    chart = Chart("a <label>", "a & b", Axis(0, 1), Axis(0, 1))
    chart.mark(0.5, 0.5, "currentColor", said="<here>")
    chart.key("<key>", "currentColor")
    text = "".join(ElementTree.fromstring(chart.figure()).itertext())
    assert "a & b" in text
    assert 'aria-label="a &lt;label&gt;"' in chart.figure()
    assert "<here>" in text
    assert "<key>" in text
