"""Quality against bytes, as a picture in SVG text."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any

from edge.errors import MissingExtraError
from edge.report.kv import Figure, Row

_MIB = 1 << 20
_PANELS = {
    "ratio": "perplexity × full (lower is better)",
    "known": "digits right, question known",
    "streamed": "digits right, streamed",
    "repeat": "perplexity of a repeated segment",
}
_HIGHEST = 1.4  # ratios above are drawn at the edge, with their value: controls would hide the others
_MARKERS = "osD^vP*X"
_ORDER = [*range(0, 20, 2), *range(1, 20, 2)]  # of the palette's colours: the strong ones first


def check_plot() -> None:
    """Raises MissingExtraError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "plot")


def plot_svg(rows: Sequence[Row]) -> str:
    """A panel for each kind of figure, against the bytes allocated; "" if there are none. Colours are policies, marks
    are dtypes; the dashed line is the full cache. Raises MissingExtraError without matplotlib."""
    check_plot()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [name for name in _PANELS if any(name in row.figures for row in rows[1:])]
    if not names:
        return ""
    lines = math.ceil(len(names) / 2)
    with matplotlib.rc_context({"svg.hashsalt": "edge", "svg.fonttype": "none", "font.size": 9}):
        figure, grid = pyplot.subplots(lines, min(2, len(names)), figsize=(11, 4 * lines), squeeze=False)
        for axes, name in zip(grid.flat, [*names, *[""] * (grid.size - len(names))], strict=True):
            if name:
                _panel(axes, name, rows)
            else:
                axes.set_axis_off()
        handles = _legend(rows)
        figure.legend(handles=handles, loc="lower center", ncols=min(6, len(handles)), frameon=False)
        figure.tight_layout(rect=(0, 0.04 + 0.02 * math.ceil(len(handles) / 6), 1, 1))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
        pyplot.close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


def _panel(axes: Any, name: str, rows: Sequence[Row]) -> None:
    lines: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        figure = row.figures.get(name)
        if figure is not None and row.nbytes:
            _point(axes, name, row, figure, rows)
            line = lines.setdefault((row.cell.policy, row.kv_dtype), [])
            line.append((row.nbytes / _MIB, min(figure.value, _HIGHEST) if name == "ratio" else figure.value))
    for (policy, _), points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), color=_colours(rows)[policy], linewidth=0.7, alpha=0.6)
    reference = rows[0].figures.get(name)
    if reference is not None:
        axes.axhline(reference.value, color="gray", linestyle="--", linewidth=1, zorder=1)
    axes.set(xlabel="KV cache, MiB allocated", ylabel=_PANELS[name], xscale="log")
    scales = [axes.xaxis]
    if name == "repeat":
        axes.set_yscale("log")
        scales.append(axes.yaxis)
    if name in ("known", "streamed"):
        axes.set_ylim(-0.03, 1.05)
    for scale in scales:  # plain numbers, not powers of ten
        scale.set_major_formatter(lambda value, _: f"{value:g}")
        scale.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "235" else "")
    axes.grid(alpha=0.3)


def _point(axes: Any, name: str, row: Row, figure: Figure, rows: Sequence[Row]) -> None:
    assert row.nbytes
    colour, marker = _colours(rows)[row.cell.policy], _markers(rows)[row.kv_dtype]
    at = row.nbytes / _MIB
    if name == "ratio" and figure.value > _HIGHEST:
        axes.plot(at, _HIGHEST, color=colour, marker=marker, linestyle="", clip_on=False)
        axes.annotate(f"{figure.value:.2f} ↑", (at, _HIGHEST), xytext=(6, -9), textcoords="offset points", color=colour)
        return
    axes.errorbar(at, figure.value, figure.stderr or 0, color=colour, marker=marker, linestyle="", capsize=2)


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    import matplotlib

    palette = matplotlib.colormaps["tab20"]
    policies = dict.fromkeys(row.cell.policy for row in rows)
    return {policy: palette(_ORDER[index % 20]) for index, policy in enumerate(policies)}


def _markers(rows: Sequence[Row]) -> dict[str | None, str]:
    dtypes = dict.fromkeys(row.kv_dtype for row in rows)
    return {dtype: _MARKERS[index % len(_MARKERS)] for index, dtype in enumerate(dtypes)}


def _legend(rows: Sequence[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    used = [row for row in rows if row.nbytes]
    policies = {row.cell.policy for row in used}
    shown = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=policy)
        for policy, colour in _colours(rows).items()
        if policy in policies
    ]
    dtypes = {row.kv_dtype for row in used}
    return shown + [
        Line2D([], [], color="black", marker=marker, linestyle="", label=dtype)
        for dtype, marker in _markers(rows).items()
        if dtype in dtypes
    ]
