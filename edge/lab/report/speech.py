"""A transcript's report as text for a terminal."""

from __future__ import annotations

from edge.budget import format_bytes, format_joules
from edge.errors import several
from edge.run.speech.report import SpeechReport
from edge.run.speech.segments import clock_of


def speech_line(report: SpeechReport) -> list[str]:
    """The report on one line; `--verbose` prints the rest."""
    timings, memory, energy, minute = report.timings, report.memory, report.energy, report.joules_per_minute
    spent = format_joules(energy.joules) + (f" of {format_joules(energy.budget)}" if energy.budget else "")
    said = [
        f"{clock_of(report.sound.heard_s)[:-2]} of sound",
        "" if timings.real_time is None else f"{timings.real_time:.2g} × its length",
        "" if timings.first_s is None else f"first text after {timings.first_s:.2f} s",
        f"peak {format_bytes(memory.peak_rss)}" + (f" of {format_bytes(memory.budget)}" if memory.budget else ""),
        spent + ("" if minute is None else f" · {format_joules(minute)} a minute of sound") + f" ({energy.certainty})",
        "" if report.stop_reason == "eos" else f"stopped: {report.stop_reason}",
    ]
    return ["", " · ".join(filter(None, said))]


def speech_lines(report: SpeechReport) -> list[str]:
    """The full report."""
    timings, memory, energy, sound = report.timings, report.memory, report.energy, report.sound
    sure = "" if report.certainty is None else f" ({report.certainty:.0%})"
    return [
        *speech_line(report),
        f"language {report.language or 'none'}{sure} · {several(report.segments, 'segment')} in "
        f"{several(report.windows, 'window')} · {several(report.tokens, 'token')} "
        f"· {several(report.again, 'window')} decoded again · {sound.silent_s:.1f} s of silence",
        f"load {timings.load_s:.2f} s · work {timings.total_s - timings.waited_s - timings.paused_s:.2f} s · waited "
        f"for the sound {timings.waited_s:.2f} s · paused {timings.paused_s:.2f} s",
        f"memory peak {format_bytes(memory.peak_rss)} (measured) · interpreter {format_bytes(memory.interpreter)} + "
        f"weights {format_bytes(memory.weights)} + KV {format_bytes(memory.kv)} + scratch "
        f"{format_bytes(memory.scratch)} (counted)",
        f"energy {format_joules(energy.joules)} at {energy.watts:.2g} W ({energy.certainty}: {energy.source}, the "
        f"whole {energy.scope})",
    ]
