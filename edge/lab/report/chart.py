"""Charts as SVG in a page: they scale with their container, while letters and marks keep their size.

Horizontal positions are percentages, vertical ones are pixels; only lines and areas are stretched. Colours come from
the style sheet, so that a chart is light or dark with its page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape

NARROW = 270  # pixels, the width of a chart on a phone: words that fit there fit everywhere
INK = "currentColor"
COLOURS = tuple(f"var(--c{number})" for number in range(1, 10))
SHAPES = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "square": "M-4 -4h8v8h-8z",
    "diamond": "M0 -5.8L5.8 0L0 5.8L-5.8 0z",
    "triangle": "M0 -5.5L5.5 4.5H-5.5z",
    "block": "M-6 -5h12v10h-12z",
    "line": "M-9 0h18",
}
DASHED, DOTTED = "5 4", "1.5 3"
_LETTER = 7.2  # pixels per letter, in wide fonts
_TICKS = 5
_LABEL = 'class="label" text-anchor="end"'

Points = Iterable[tuple[float, float]]


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


@cache
def stylesheet(name: str) -> str:
    """Read a CSS file beside this module."""
    from importlib.resources import files

    return files("edge.lab.report").joinpath(name).read_text(encoding="utf-8")


def width_of(words: str) -> float:
    """The approximate width of a text in pixels."""
    return _LETTER * len(words)


@dataclass(frozen=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    ticks: Sequence[tuple[float, str]] | None = None  # values and their labels; None: round numbers

    def at(self, value: float) -> float:
        """Map a value to 0 (the low edge) … 1."""
        of: Callable[[float], float] = math.log if self.log else float
        return (of(value) - of(self.low)) / ((of(self.high) - of(self.low)) or 1.0)

    def marked(self) -> Sequence[tuple[float, str]]:
        if self.ticks is not None:
            return self.ticks
        return [(each, f"{each:,.10g}") for each in self._round() if self.low <= each <= self.high]

    def _round(self) -> list[float]:
        if self.log:
            wide = self.high > 30 * self.low
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            powers = powers[:: 1 + len(powers) // 8]
            return [float(f"{digit}e{power}") for power in powers for digit in ((1,) if wide else (1, 2, 5))]
        least = (self.high - self.low) / _TICKS or 1.0
        power = math.floor(math.log10(least))
        step = next(float(f"{digit}e{power}") for digit in (1, 2, 5, 10) if float(f"{digit}e{power}") >= 0.999 * least)
        return [step * each for each in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """A chart under construction."""

    label: str  # description for screen readers
    caption: str  # text above it
    x: Axis
    y: Axis
    height: int = 200  # of the plot, in pixels
    keys: list[tuple[str, str]] = field(default_factory=list)
    _stretched: str = ""
    _placed: str = ""

    def line(self, points: Points, colour: str, dash: str = "none", width: float = 2.0) -> None:
        """Draw a line, or a bar; `width` in pixels."""
        self._stretched += (
            f'<polyline points="{self._points(points)}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-dasharray="{dash}"/>'
        )

    def across(self, y: float, colour: str, dash: str = "none") -> None:
        self.line([(self.x.low, y), (self.x.high, y)], colour, dash, 1.2)

    def area(self, upper: Points, lower: Points, colour: str, opacity: float) -> None:
        """Fill between two lines, both from left to right."""
        points = f"{self._points(upper)} {self._points(reversed(list(lower)))}"
        self._stretched += f'<polygon points="{points}" fill="{colour}" fill-opacity="{opacity}"/>'

    def mark(self, x: float, y: float, colour: str, shape: str = "circle", said: str = "") -> None:
        """Draw a mark. said: its tooltip."""
        self._placed += (
            f'<svg x="{self._percent(x)}" y="{self._down(y):.1f}"><path class="mark" d="{SHAPES[shape]}" '
            f'fill="{colour}"><title>{escape(said)}</title></path></svg>'
        )

    def word(self, x: float, y: float, words: str, *, dx: float = 0, dy: float = 4, anchor: str = "start") -> None:
        self._placed += _text(self._percent(x), self._down(y) + dy, words, f'dx="{dx}" text-anchor="{anchor}"')

    def key(self, words: str, colour: str, shape: str = "circle", dash: str = "none") -> None:
        """Add a legend entry."""
        paint = f'fill="{colour}" stroke="{colour}" stroke-width="{2 * (shape == "line")}" stroke-dasharray="{dash}"'
        self.keys.append((f'<path d="{SHAPES[shape]}" {paint}/>', words))

    def figure(self) -> str:
        """The chart as HTML, for a page with the style sheet."""
        keys = "".join(
            f'<span><svg width="20" height="12" viewBox="-10 -6 20 12" aria-hidden="true">{sample}</svg>'
            f"{escape(words)}</span>"
            for sample, words in self.keys
        )
        left = max([0.0, *(width_of(words) for _, words in self.y.marked())]) + 10
        return (
            f'<figure><figcaption>{escape(self.caption)}</figcaption><p class="key">{keys}</p>'
            f'<svg class="chart" role="img" aria-label="{escape(self.label)}" '
            f'style="height:{self.height}px;margin-left:{left:.0f}px;width:calc(100% - {left + 18:.0f}px)">'
            f"{self._inside()}</svg></figure>"
        )

    def _inside(self) -> str:
        parts, end, bottom = "", -math.inf, self.height
        for value, words in self.y.marked():
            down = self._down(value)
            if self.y.ticks is None:  # stated ticks are names, without lines
                parts += f'<line class="grid" x2="100%" y1="{down:.1f}" y2="{down:.1f}"/>'
            parts += _text("-8", down + 4, words, 'text-anchor="end"')
        for value, words in self.x.marked():
            at, middle, half = self._percent(value), self.x.at(value) * NARROW, width_of(words) / 2
            parts += f'<line class="grid" x1="{at}" x2="{at}" y2="{bottom}"/>'
            if middle - half >= end:
                parts += _text(at, bottom + 18, words, 'text-anchor="middle"')
                end = middle + half + 4
        return (
            f'{parts}<line class="axis" x2="100%" y1="{bottom}" y2="{bottom}"/>'
            f"{_text('100%', bottom + 35, self.x.label, _LABEL)}"
            f'<svg class="flat" viewBox="0 0 100 {bottom}" preserveAspectRatio="none" width="100%" height="{bottom}">'
            f"{self._stretched}</svg>{self._placed}"
        )

    def _points(self, points: Points) -> str:
        return " ".join(f"{100 * self.x.at(x):.2f},{self._down(y):.1f}" for x, y in points)

    def _percent(self, x: float) -> str:
        return f"{100 * self.x.at(x):.2f}%"

    def _down(self, y: float) -> float:
        return self.height * (1 - self.y.at(y))


def pictures(charts: Iterable[Chart | None]) -> str:
    """Lay charts out side by side, in full rows. "" without charts."""
    shown = [chart.figure() for chart in charts if chart]
    few = " threes" if len(shown) % 3 == 0 else ""
    return f'<div class="pictures{few}">{"".join(shown)}</div>\n' if shown else ""


def _text(x: str, y: float, words: str, how: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" {how}>{escape(words)}</text>' if words else ""
