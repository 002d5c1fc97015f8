"""Plots as SVG inside a page: drawn by matplotlib, coloured by the page's style sheet, light or dark."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

from edge.errors import MissingExtraError

# Colours that stand for names of the style sheet until the picture is drawn.
INK = "#010203"
COLOURS = ("#0000f1", "#0000f2", "#0000f3", "#0000f4", "#0000f5", "#0000f6", "#0000f7", "#0000f8", "#0000f9")
_REAL = {INK: "currentColor", **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS, start=1)}}

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "font.size": 11, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "grid.color": INK, "grid.alpha": 0.12, "grid.linewidth": 0.6, "axes.grid": True,
    "axes.axisbelow": True, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "legend.frameon": False, "legend.handlelength": 1.4, "legend.columnspacing": 1.2, "lines.linewidth": 1.8,
    "axes.titlesize": 11, "axes.titlelocation": "left", "hatch.linewidth": 0.6,
}  # fmt: skip
SMALL = 10.6  # of letters within a picture, in points: 11 pixels on a phone
_WIDTH = 4.7  # inches: no more than a phone shows, so that letters keep their size there


def check_plot() -> None:
    """Raises MissingExtraError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


def draw(paint: Callable[[Any], None], height: float, label: str) -> str:
    """`paint` gets the one pair of axes. height: inches. label: what the picture shows, for those who cannot see it.

    Raises MissingExtraError without matplotlib.
    """
    check_plot()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": label}):
        figure, axes = pyplot.subplots(figsize=(_WIDTH, height), layout="constrained")
        try:
            paint(axes)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
        finally:
            pyplot.close(figure)
    return _inline(out.getvalue(), label)


def _inline(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[a-zA-Z_0-9]+_\d+">', "<g>", svg)  # the same in every picture, and used by none
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    names = 'xmlns:xlink="http://www.w3.org/1999/xlink" role="img"'
    head = f'<svg {view[0] if view else ""} {names} aria-label="{escape(label)}">'
    svg = head + svg[svg.index(">") + 1 :]
    for colour, real in _REAL.items():
        svg = svg.replace(colour, real)
    return svg
