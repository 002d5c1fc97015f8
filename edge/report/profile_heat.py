"""What heat does to a device's speed, as tables: temperatures, clocks, and a long run's beginning against its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.profiling.profile import EngineProfile, Profile, Sustained, Window
from edge.report.figures import NONE, clock, clock_range, duration, joules, milliseconds, rate
from edge.report.profile_tables import how
from edge.report.table import Section


def climate_table(profile: Profile) -> Section:
    rows = []
    for engine in profile.engines:
        climate = engine.timeline.climate
        celsius = [each.celsius for each in climate if each.celsius is not None]
        hertz = [each.hertz for each in climate if each.hertz is not None]
        allowed = [each.allowed for each in climate if each.allowed is not None]
        rows.append([
            engine.engine,
            f"{celsius[0]:.0f} → {max(celsius):.0f} °C" if celsius else NONE,
            clock_range(hertz),
            f"{min(allowed):.0%}" if allowed else NONE,
        ])  # fmt: skip
    timeline = profile.engines[0].timeline
    sensor = f"Temperature of {timeline.sensor}, measured." if timeline.sensor else "This device shows no temperature."
    trip = [f"The kernel slows it down at {timeline.trip:.0f} °C."] if timeline.trip else []
    return Section("Heat and clock", ["engine", "temperature", "clock", "top clock allowed"], rows, [], [sensor, *trip])


def sustained_table(profile: Profile) -> Section | None:
    """The first window of a long run against its last, engine by engine; None if there was none."""
    runs = [(engine, engine.sustained) for engine in profile.engines if engine.sustained]
    if not runs:
        return None
    first, last = _window_names(runs[0][1])
    kinds = "/".join(dict.fromkeys(how(engine) for engine, _ in runs))
    headings = [
        "engine", f"{first} tok/s", f"{last} tok/s", "last / first", "highest", "clock",
        f"per token ({kinds})", "other programs",
    ]  # fmt: skip
    rows = [
        [
            engine.engine, rate(run.first.tok_s), rate(run.last.tok_s), f"{run.ratio:.2f}",
            _highest(run.windows), _then(run, "hertz", clock),
            _then(run, "joules_per_token", joules), _most(run.windows),
        ]
        for engine, run in runs
    ]  # fmt: skip
    notes = [
        f"Measured: answers one after another for {duration(profile.settings.sustained_s)} without a pause; tokens by "
        f"time, in the first {duration(runs[0][1].length)} and in the last."
    ]
    if len(runs) > 1:
        notes.append("Engines take turns: all but the first begin on a device that the ones before have warmed.")
    return Section("Sustained", headings, rows, notes)


def windows_table(engine: EngineProfile, run: Sustained) -> Section:
    """A long run, window after window."""
    rows = [
        [
            f"{window.start:.0f} s", rate(window.tok_s), *milliseconds(window.per_token),
            joules(window.joules_per_token), _highest([window]), clock(window.hertz), _most([window]),
        ]
        for window in run.windows
    ]  # fmt: skip
    headings = [
        "from", "tok/s", "ms/token p10", "p50", "p90", f"per token ({how(engine)})", "highest", "clock",
        "other programs",
    ]  # fmt: skip
    notes = [
        f"Measured, in windows of {duration(run.length)}; tok/s: tokens by time. Other programs: their share of all "
        "cores' time."
    ]
    return Section(f"{engine.engine}: the long run", headings, rows, notes)


def _window_names(run: Sustained) -> tuple[str, str]:
    if run.length >= 60:
        return "minute 1", f"minute {len(run.windows)}"
    return f"first {duration(run.length)}", f"last {duration(run.length)}"


def _then(run: Sustained, name: str, said: Callable[[float], str]) -> str:
    """A figure of the first window and of the last."""
    values: list[float | None] = [getattr(run.first, name), getattr(run.last, name)]
    words = [said(each) for each in values if each is not None]
    return " → ".join(dict.fromkeys(words)) if len(words) == len(values) else NONE


def _highest(windows: Sequence[Window]) -> str:
    celsius = [each.celsius for each in windows if each.celsius is not None]
    return f"{max(celsius):.0f} °C" if celsius else NONE


def _most(windows: Sequence[Window]) -> str:
    others = [each.others for each in windows if each.others is not None]
    return f"{max(others):.0%}" if others else NONE
