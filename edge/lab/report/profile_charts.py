"""The charts of a device profile; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.base import PHASES
from edge.lab.profiling.memory import split
from edge.lab.profiling.profile import EngineProfile, Profile
from edge.lab.profiling.sustained import Spread
from edge.lab.report.chart import COLOURS, DASHED, DOTTED, INK, NARROW, Axis, Chart, colour, width_of
from edge.lab.report.figures import rate

PHASE_WORDS = {"prefill": "prompt", "decode": "answer"}
_MIB = 1 << 20
_GIGA = 1e9
_MARKS = {"decode": "circle", "prefill": "square"}
_PARTS = {
    "interpreter": ("interpreter and libraries", COLOURS[3]), "weights": ("weights", COLOURS[0]),
    "kv": ("KV cache", COLOURS[1]), "scratch": ("scratch", COLOURS[2]),
}  # fmt: skip
_VARIES = 1.01  # least ratio of highest to lowest clock for a chart: a constant clock is in the table


def context_chart(profile: Profile, phase: str) -> Chart | None:
    """tok/s against context, a line for each engine; decode with a band from p10 to p90."""
    contexts = sorted({each.context for engine in profile.engines for each in engine.curve})
    if not contexts:
        return None
    lines = []
    for engine in profile.engines:
        at = [float(each.context) for each in engine.curve]
        spreads = [each.decode for each in engine.curve] if phase == "decode" else []
        speeds = [1 / (each.decode.p50 if phase == "decode" else each.prefill) for each in engine.curve]
        lines.append((engine.engine, at, spreads, speeds))
    word = PHASE_WORDS[phase]
    x = Axis(contexts[0], contexts[-1], "tokens in the context", True, [(each, f"{each:,}") for each in contexts])
    return _speeds(f"Tokens per second of the {word} against context", f"tok/s of {word}", x, lines, _MARKS[phase])


def operator_chart(engine: EngineProfile) -> Chart | None:
    """Each part's share of the time, in prefill and decode. None if the engine reports no operators."""
    if not engine.operators:
        return None
    shares = [
        (phase.name, {part: sum(each.share for each in phase.operators if each.phase == part) for part in PHASES})
        for phase in engine.operators
    ]
    parts = [part for part in PHASES if any(found[part] > 0 for _, found in shares)]
    most = 100 * max(found[part] for _, found in shares for part in parts)
    chart = Chart(
        f"Where the time of {engine.engine} goes, part by part", engine.engine,
        Axis(0, most * 1.1, "% of the time of a pass"),
        Axis(len(parts) - 0.5, -0.5, ticks=list(enumerate(parts))), 30 * len(parts),
    )  # fmt: skip
    for number, (name, found) in enumerate(shares):
        paint = COLOURS[0] if name == "decode" else COLOURS[1]
        chart.key(PHASE_WORDS[name], paint, "block")
        for row, part in enumerate(parts):
            value = 100 * found[part]
            y = row + (number - (len(shares) - 1) / 2) * 0.42
            chart.line([(0, y), (value, y)], paint, width=11)
            chart.word(value, y, f"{value:.0f}" if value >= 0.5 else "", dx=5)
    return chart


def roofline_chart(profile: Profile) -> Chart | None:
    """Operations per second against operations per byte, below the measured ceilings. None without ceilings."""
    roofs = profile.roofs
    points = [
        (number, engine.engine, phase, phase.intensity, phase.flops_per_s / _GIGA)
        for number, engine in enumerate(profile.engines)
        for phase in (engine.decode, engine.prefill)
        if phase.intensity and phase.flops_per_s
    ]
    if roofs is None or not points:
        return None
    read, flops, ops = roofs.read_bytes_per_s / _GIGA, roofs.f32_flops / _GIGA, (roofs.int8_ops or 0.0) / _GIGA
    top, intensities, speeds = max(flops, ops), [each[3] for each in points], [each[4] for each in points]
    low, high = min(*intensities, 1.0) / 3, max(*intensities, top / read) * 4
    chart = Chart(
        "Roofline: prompts and answers below the measured ceilings of this device", "GFLOP/s",
        Axis(low, high, "operations per byte read", log=True),
        Axis(min(*speeds, read * low) / 1.5, max(*speeds, top) * 2, log=True), 260,
    )  # fmt: skip
    chart.line([(low, read * low), (flops / read, flops), (high, flops)], INK)
    if roofs.gpu:  # its arithmetic is unknown
        gpu = roofs.gpu.read_bytes_per_s / _GIGA
        chart.line([(low, gpu * low), (max(top, gpu * low) / gpu, max(top, gpu * low))], INK, DASHED)
    if ops:  # the memory roof continues up to the int8 ceiling
        chart.line([(flops / read, flops), (ops / read, ops), (high, ops)], INK, DASHED)
    for number, engine, phase, intensity, speed in points:
        said = f"{engine}, {PHASE_WORDS[phase.name]}: {rate(speed)} GFLOP/s"
        chart.mark(intensity, speed, colour(number), _MARKS[phase.name], said)
    for number, each in enumerate(profile.engines):
        chart.key(each.engine, colour(number), "block")
    for name, shape in _MARKS.items():
        chart.key(PHASE_WORDS[name], INK, shape)
    chart.key(f"ceilings: memory {read:.3g} GB/s, float32 {flops:.3g} GFLOP/s", INK, "line")
    if roofs.gpu:
        chart.key(f"{roofs.gpu.name}'s memory {roofs.gpu.read_bytes_per_s / _GIGA:.3g} GB/s", INK, "line", DASHED)
    if ops:
        chart.key(f"int8 {ops:.4g} Gop/s", INK, "line", DASHED)
    return chart


def memory_chart(engine: EngineProfile) -> Chart | None:
    """The resident set over the run, split into its parts. None if the system does not distinguish them."""
    timeline = engine.timeline
    if timeline.base is None or len(timeline.samples) < 2:
        return None
    samples = sorted(timeline.samples, key=lambda each: each.seconds)
    end, peak, limit = samples[-1].seconds, timeline.peak / _MIB, engine.plan.limit / _MIB
    stated = engine.plan.limit_source == "budget"
    x, y = Axis(0, end, "seconds"), Axis(0, 1.05 * max(peak, limit if stated else 0))
    chart = Chart(f"Memory of {engine.engine} over time", f"{engine.engine}, MiB resident", x, y, 220)
    seconds, parts = [each.seconds for each in samples], [split(each, timeline.base) for each in samples]
    below = [0.0] * len(samples)
    for name, (words, paint) in _PARTS.items():
        above = [low + getattr(each, name) / _MIB for low, each in zip(below, parts, strict=True)]
        chart.area(zip(seconds, above, strict=True), zip(seconds, below, strict=True), paint, 0.85)
        chart.key(words, paint, "block")
        below = above
    chart.across(peak, INK, DOTTED)
    chart.key(f"peak {peak:.0f}", INK, "line", DOTTED)
    if stated:
        chart.across(limit, INK, DASHED)
        chart.key(f"--memory {limit:.0f}", INK, "line", DASHED)
    for start, stop, what in _bands(engine, end):
        chart.line([(start, 0), (start, y.high)], "var(--soft)", DOTTED, 1)
        if (stop - start) * NARROW > (width_of(what) + 4) * end:
            chart.word((start + stop) / 2, y.high, what, dy=-6, anchor="middle")
    return chart


def climate_chart(profile: Profile, what: str) -> Chart | None:
    """°C or GHz over each engine's run. None without a sensor."""
    factor, unit, name = {"celsius": (1.0, "°C", "Temperature"), "hertz": (1e-9, "GHz", "Clock")}[what]
    lines = []
    for number, engine in enumerate(profile.engines):
        felt = [(each.seconds, getattr(each, what)) for each in engine.timeline.climate]
        points = [(seconds, value * factor) for seconds, value in felt if value is not None]
        lines += [(number, engine.engine, points)] if len(points) > 1 else []
    values = [value for _, _, points in lines for _, value in points]
    if not lines or (what == "hertz" and max(values) < _VARIES * min(values)):
        return None
    trip = profile.engines[0].timeline.trip if what == "celsius" else None
    low, high = (0.0, 1.15 * max(values)) if what == "hertz" else (min(values) - 2, max([*values, trip or 0.0]) + 2)
    end = max(seconds for _, _, points in lines for seconds, _ in points)
    chart = Chart(
        f"{name} over the run of each engine", f"{name}, {unit}", Axis(0, end, "seconds"), Axis(low, high), 160
    )
    for number, said, points in lines:
        chart.line(points, colour(number))
        chart.key(said, colour(number), "line")
    if trip is not None:
        chart.across(trip, INK, DASHED)
        chart.key(f"slows down at {trip:.0f} °C", INK, "line", DASHED)
    return chart


def sustained_chart(profile: Profile) -> Chart | None:
    """tok/s window by window, a line for each engine with a band from p10 to p90 of its tokens."""
    runs = [each.sustained for each in profile.engines if each.sustained]
    if not runs:
        return None
    size, unit = (60, "minutes") if runs[0].length >= 60 else (1, "seconds")
    lines = []
    for engine in profile.engines:
        windows, middle = (engine.sustained.windows, engine.sustained.length / 2) if engine.sustained else ([], 0.0)
        at = [(each.start + middle) / size for each in windows]
        bands = [] if profile.settings.watts else [each.per_token for each in windows]  # times exclude pauses
        lines.append((engine.engine, at, bands, [each.tok_s for each in windows]))
    x = Axis(0, max((run.windows[-1].start + run.length) / size for run in runs), unit)
    return _speeds("Speed of answers in a long run", "tok/s of answer", x, lines)


def _speeds(
    label: str,
    caption: str,
    x: Axis,
    lines: Sequence[tuple[str, Sequence[float], Sequence[Spread], Sequence[float]]],
    shape: str = "circle",
) -> Chart:
    """A chart with a line for each engine: x values, optional spreads of seconds per token, and tok/s."""
    highest = max(max([*speeds, *(1 / each.p10 for each in spreads)], default=0.0) for _, _, spreads, speeds in lines)
    chart = Chart(label, caption, x, Axis(0, 1.05 * highest))
    for number, (engine, at, spreads, speeds) in enumerate(lines):
        if not at:
            continue
        if spreads:
            fast, slow = ([(where, 1 / getattr(each, name)) for where, each in zip(at, spreads, strict=True)]
                          for name in ("p10", "p90"))  # fmt: skip
            chart.area(fast, slow, colour(number), 0.18)
        points = list(zip(at, speeds, strict=True))
        chart.line(points, colour(number))
        for where, speed in points:
            chart.mark(where, speed, colour(number), shape, f"{engine}: {rate(speed)} tok/s")
        chart.key(engine, colour(number), shape)
    return chart


def _bands(engine: EngineProfile, end: float) -> list[tuple[float, float, str]]:
    """Start, end and kind of the run's phases; neighbours of one kind are merged."""
    kinds: list[tuple[float, str]] = []
    for mark in engine.timeline.marks:
        what = "contexts" if mark.what.startswith("context") else mark.what
        what = "answers" if what in ("prompt", "answer") else what
        if not kinds or kinds[-1][1] != what:
            kinds.append((mark.seconds, what))
    ends = [*(start for start, _ in kinds[1:]), end]
    return [(start, stop, what) for (start, what), stop in zip(kinds, ends, strict=True)]
