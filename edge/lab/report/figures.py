"""Formatting of figures, in few digits with units."""

from __future__ import annotations

from edge.budget import format_joules
from edge.lab.profiling.sustained import Spread

NONE = "–"


def duration(seconds: float) -> str:
    """0.0023 -> `2.3 ms`, 300 -> `5 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds >= 100:
        return f"{seconds / 60:.3g} min"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f}".removesuffix(".0") + " s"


def milliseconds(per_token: Spread, form: str = "") -> list[str]:
    """p10, p50 and p90 in milliseconds."""
    spread = (1e3 * per_token.p10, 1e3 * per_token.p50, 1e3 * per_token.p90)
    return [form.format(each) if form else rate(each) for each in spread]


def rate(value: float) -> str:
    """Three significant digits, or an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def joules(value: float | None) -> str:
    return NONE if value is None else format_joules(value)


def clock(hertz: float | None) -> str:
    return NONE if hertz is None else f"{hertz / 1e9:.2f} GHz"


def clock_range(hertz: list[float]) -> str:
    """The lowest and the highest clock."""
    if not hertz:
        return NONE
    low, high = f"{min(hertz) / 1e9:.2f}", f"{max(hertz) / 1e9:.2f}"
    return f"{high} GHz" if low == high else f"{low} – {high} GHz"


def giga(count: int | None, seconds: float) -> str:
    """Billions per second."""
    return NONE if count is None or not seconds else rate(count / seconds / 1e9)


def per_s(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{rate(value / 1e9)} {unit}"


def percent(value: float | None, most: float | None) -> str:
    """`value` as a percentage of `most`."""
    if value is None or not most:
        return NONE
    return f"{value / most:.0%}" if value >= 0.01 * most else f"{value / most:.2%}"
