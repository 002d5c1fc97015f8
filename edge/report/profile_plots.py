"""The pictures of a device profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edge.backends.base import PHASES
from edge.profiling.memory_timeline import split
from edge.profiling.profile import EngineProfile, Phase, Profile, Roofs, Spread
from edge.report.svg import COLOURS, INK, SMALL, draw

_MIB = 1 << 20
_GIGA = 1e9
_MARKS = {"decode": "o", "prefill": "s"}
_WORDS = {"decode": "answer", "prefill": "prompt"}
_PARTS = ("interpreter and libraries", "weights", "KV cache", "scratch")
_PART_COLOURS = (COLOURS[3], COLOURS[0], COLOURS[1], COLOURS[2])
_VARIES = 1.01  # between the lowest and the highest clock: less is a line, and the table says it
_LETTER = 0.025  # of the width: bands too narrow for their word have none


def context_plot(profile: Profile, phase: str) -> str:
    """tok/s against context, a line for each engine; of answers with the band from p10 to p90. "" without points."""
    engines = [each for each in profile.engines if each.curve]
    if not engines:
        return ""

    def paint(axes: Any) -> None:
        for number, engine in enumerate(engines):
            contexts = [each.context for each in engine.curve]
            if phase == "decode":
                spreads = [each.decode for each in engine.curve]
                _speed_line(axes, number, engine.engine, contexts, spreads, [1 / each.p50 for each in spreads])
            else:
                speeds = [1 / each.prefill for each in engine.curve]
                axes.plot(contexts, speeds, color=COLOURS[number], marker="s", markersize=4, label=engine.engine)
        _contexts(axes, sorted({each.context for engine in engines for each in engine.curve}))
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens in the context", ylabel=f"tok/s of {_WORDS[phase]}")
        _legend(axes, len(engines))

    return draw(paint, 3.0, f"Tokens per second of the {_WORDS[phase]} against context")


def operator_plot(engine: EngineProfile) -> str:
    """The share of each part of a pass in its time, for prompts and answers. "" if the engine does not tell."""
    if not engine.operators:
        return ""
    shares = [
        (phase.name, {part: sum(each.share for each in phase.operators if each.phase == part) for part in PHASES})
        for phase in engine.operators
    ]
    parts = [part for part in PHASES if any(found[part] > 0 for _, found in shares)]

    def paint(axes: Any) -> None:
        size = 0.8 / len(shares)
        for number, (name, found) in enumerate(shares):
            at = [index + (number - (len(shares) - 1) / 2) * size for index in range(len(parts))]
            values = [100 * found[part] for part in parts]
            colour = COLOURS[0] if name == "decode" else COLOURS[1]
            axes.barh(at, values, height=size * 0.9, color=colour, label=_WORDS[name])
            for y, value in zip(at, values, strict=True):
                if value >= 0.5:
                    axes.text(value + 0.6, y, f"{value:.0f}", va="center", fontsize=SMALL)
        axes.set_yticks(range(len(parts)), parts)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="% of the time of a pass")
        _legend(axes, len(shares))

    return draw(paint, 0.9 + 0.4 * len(parts), f"Where the time of {engine.engine} goes, part by part")


def roofline_plot(profile: Profile) -> str:
    """Operations per second against operations per byte, below the measured ceilings. "" without ceilings."""
    roofs = profile.roofs
    points = [
        (number, engine, phase)
        for number, engine in enumerate(profile.engines)
        for phase in (engine.decode, engine.prefill)
        if phase.intensity and phase.flops_per_s
    ]
    if roofs is None or not points:
        return ""

    def paint(axes: Any) -> None:
        intensities = [phase.intensity or 1.0 for _, _, phase in points]
        top = max(roofs.f32_flops, roofs.int8_ops or 0.0)
        low, high = min(*intensities, 1.0) / 3, max(*intensities, top / roofs.read_bytes_per_s) * 4
        axes.set_xscale("log")
        axes.set_yscale("log")
        _roof(axes, roofs, low, high)
        for number, engine, phase in points:
            _point(axes, phase, COLOURS[number], engine.engine)
        speeds = [(phase.flops_per_s or 0.0) / _GIGA for _, _, phase in points]
        floor = min(*speeds, roofs.read_bytes_per_s * low / _GIGA)
        axes.set(xlim=(low, high), ylim=(floor / 1.5, max(*speeds, top / _GIGA) * 3))
        axes.set(xlabel="operations per byte read", ylabel="GFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
        _phase_legend(axes, profile.engines)

    return draw(paint, 3.6, "Roofline: prompts and answers below the measured ceilings of this device")


def memory_plot(engine: EngineProfile) -> str:
    """The resident set over the run, split into its parts. "" where the system does not tell them apart."""
    timeline = engine.timeline
    if timeline.base is None or len(timeline.samples) < 2:
        return ""
    base = timeline.base
    samples = sorted(timeline.samples, key=lambda each: each.seconds)

    def paint(axes: Any) -> None:
        seconds = [each.seconds for each in samples]
        parts = [split(each, base) for each in samples]
        stacks = [
            [getattr(each, name) / _MIB for each in parts] for name in ("interpreter", "weights", "kv", "scratch")
        ]
        axes.stackplot(seconds, stacks, labels=_PARTS, colors=_PART_COLOURS, alpha=0.85, linewidth=0)
        top = timeline.peak / _MIB
        if engine.plan.limit_source == "budget":
            top = max(top, engine.plan.limit / _MIB)
            axes.axhline(engine.plan.limit / _MIB, color=INK, linewidth=1, linestyle="--")
            axes.text(seconds[-1], engine.plan.limit / _MIB, "--memory", ha="right", va="top", fontsize=SMALL)
        axes.axhline(timeline.peak / _MIB, color=INK, linewidth=0.8, linestyle=":")
        axes.text(
            seconds[-1],
            timeline.peak / _MIB,
            f"peak {timeline.peak / _MIB:.0f}",
            ha="right",
            va="bottom",
            fontsize=SMALL,
        )
        _bands(axes, engine, seconds[-1])
        axes.set(xlim=(0, seconds[-1]), ylim=(0, top * 1.3), xlabel="seconds", ylabel="MiB resident")
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    return draw(paint, 3.4, f"Memory of {engine.engine} over time")


def climate_plot(profile: Profile, what: str) -> str:
    """°C or GHz over the run of each engine. "" where nothing shows it."""
    factor, label, name = {"celsius": (1.0, "°C", "Temperature"), "hertz": (1e-9, "GHz", "Clock")}[what]
    lines = []
    for number, engine in enumerate(profile.engines):
        felt = [(each.seconds, getattr(each, what)) for each in engine.timeline.climate]
        points = [(seconds, value * factor) for seconds, value in felt if value is not None]
        lines += [(number, engine.engine, points)] if len(points) > 1 else []
    values = [value for _, _, points in lines for _, value in points]
    if not lines or (what == "hertz" and max(values) < _VARIES * min(values)):
        return ""
    trip = profile.engines[0].timeline.trip

    def paint(axes: Any) -> None:
        for number, engine, points in lines:
            axes.plot(*zip(*points, strict=True), color=COLOURS[number], label=engine)
        if what == "celsius" and trip is not None:
            axes.axhline(trip, color=INK, linewidth=1, linestyle="--")
            axes.text(0, trip, "slows down", va="bottom", fontsize=SMALL)
        if what == "hertz":
            axes.set_ylim(0, max(values) * 1.15)
        axes.set(xlabel="seconds", ylabel=label)
        _legend(axes, len(lines))

    return draw(paint, 2.4, f"{name} over the run of each engine")


def sustained_plot(profile: Profile) -> str:
    """tok/s, window after window, a line for each engine with a band from p10 to p90 of its tokens."""
    runs = [(number, each.engine, each.sustained) for number, each in enumerate(profile.engines) if each.sustained]
    if not runs:
        return ""
    size, unit = (60, "minutes") if runs[0][2].length >= 60 else (1, "seconds")

    def paint(axes: Any) -> None:
        for number, engine, run in runs:
            middles = [(each.start + run.length / 2) / size for each in run.windows]
            spreads = [each.per_token for each in run.windows]
            _speed_line(axes, number, engine, middles, spreads, [each.tok_s for each in run.windows])
        axes.set_ylim(bottom=0)
        axes.set(xlabel=unit, ylabel="tok/s of answer")
        _legend(axes, len(runs))

    return draw(paint, 2.8, "Speed of answers in a long run")


def _speed_line(
    axes: Any, number: int, engine: str, at: Sequence[float], spreads: Sequence[Spread], speeds: Sequence[float]
) -> None:
    """tok/s, and the band from p10 to p90 of single tokens."""
    low, high = [1 / each.p90 for each in spreads], [1 / each.p10 for each in spreads]
    axes.fill_between(at, low, high, color=COLOURS[number], alpha=0.18, linewidth=0)
    axes.plot(at, speeds, color=COLOURS[number], marker="o", markersize=4, label=engine)


def _contexts(axes: Any, contexts: Sequence[int]) -> None:
    """A logarithmic axis with the contexts themselves on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{each:,}" for each in contexts])


def _legend(axes: Any, count: int) -> None:
    if count > 1:
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(count, 4))


def _roof(axes: Any, roofs: Roofs, low: float, high: float) -> None:
    ridge = roofs.f32_flops / roofs.read_bytes_per_s
    flops, read = roofs.f32_flops / _GIGA, roofs.read_bytes_per_s / _GIGA
    axes.plot([low, ridge, high], [read * low, flops, flops], color=INK, linewidth=1.2)
    axes.text(
        low * 1.2, read * low * 1.3, f"memory {read:.3g} GB/s", fontsize=SMALL, va="bottom",
        rotation=math.degrees(math.atan(read)), rotation_mode="anchor", transform_rotates_text=True,
    )  # fmt: skip
    axes.text(high, flops * 1.1, f"float32 {flops:.3g} GFLOP/s ", ha="right", va="bottom", fontsize=SMALL)
    if roofs.int8_ops:  # memory's roof goes on up to it
        ops = roofs.int8_ops / _GIGA
        axes.plot([ridge, ops / read, high], [flops, ops, ops], color=INK, linewidth=1.2, linestyle="--")
        axes.text(high, ops * 1.1, f"int8 {ops:.4g} Gop/s ", ha="right", va="bottom", fontsize=SMALL)


def _point(axes: Any, phase: Phase, colour: str, engine: str) -> None:
    axes.plot(
        phase.intensity, (phase.flops_per_s or 0.0) / _GIGA, color=colour, marker=_MARKS[phase.name], markersize=7,
        linestyle="", zorder=3,
    )  # fmt: skip


def _phase_legend(axes: Any, engines: Sequence[EngineProfile]) -> None:
    """Colours are engines, marks are phases."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[number], marker="o", linestyle="", label=each.engine)
        for number, each in enumerate(engines)
    ]
    handles += [
        Line2D([], [], color=INK, marker=mark, linestyle="", markerfacecolor="none", label=_WORDS[name])
        for name, mark in _MARKS.items()
    ]
    axes.figure.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), 5), handletextpad=0.1)


def _bands(axes: Any, engine: EngineProfile, end: float) -> None:
    """What the run did when; neighbours of one kind are one band."""
    kinds: list[tuple[float, str]] = []
    for mark in engine.timeline.marks:
        what = "contexts" if mark.what.startswith("context") else mark.what
        what = "answers" if what in ("prompt", "answer") else what
        if not kinds or kinds[-1][1] != what:
            kinds.append((mark.seconds, what))
    for (start, what), (stop, _) in zip(kinds, [*kinds[1:], (end, "")], strict=True):
        axes.axvline(start, color=INK, linewidth=0.5, alpha=0.4)
        if stop - start > _LETTER * (len(what) + 1) * end:
            axes.text(
                (start + stop) / 2, 0.97, what, fontsize=SMALL, ha="center", va="top",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
