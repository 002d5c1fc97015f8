"""Charts: what stands on their axes, and where."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from edge.lab.report.chart import Axis, Chart


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e9))
def test_round_numbers_lie_within_axis(low: float, span: float) -> None:
    axis = Axis(low, low + span)
    marked = [value for value, _ in axis.marked()]
    assert len(marked) <= 7
    assert all(axis.low <= each <= axis.high for each in marked)
    assert marked == sorted(set(marked))


def test_words_of_chart_are_escaped() -> None:
    chart = Chart("a <label>", "a & b", Axis(0, 1), Axis(0, 1))
    chart.mark(0.5, 0.5, "currentColor", said="<here>")
    chart.key("<key>", "currentColor")
    text = "".join(ElementTree.fromstring(chart.figure()).itertext())
    assert "a & b" in text
    assert 'aria-label="a &lt;label&gt;"' in chart.figure()
    assert "<here>" in text
    assert "<key>" in text
