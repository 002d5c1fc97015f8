"""Report on a device profile: complete for a page or Markdown, shortened for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edge.budget import format_bytes
from edge.devices.load import DISTURBED
from edge.lab.profiling.memory import split
from edge.lab.profiling.profile import EngineProfile, PhaseOperators, Profile
from edge.lab.profiling.sustained import Sustained, Window
from edge.lab.report import profile_charts as charts
from edge.lab.report.document import NONE, Report, Section, Table
from edge.lab.report.figures import clock, clock_range, duration, giga, joules, milliseconds, per_s, percent, rate
from edge.lab.report.profile_charts import PHASE_WORDS
from edge.model.structure.spec import format_count


def profile_report(profile: Profile) -> Report:
    first, contexts, roofline = profile.engines[0], _contexts(profile), roofline_table(profile)
    sources = " and ".join(dict.fromkeys(each.energy.certainty for each in profile.engines))
    sections = [
        Section(
            "Speed",
            [_speed(profile), _tokens(profile), *(_threads(each) for each in profile.engines if each.by_threads)],
        ),
        Section(
            "Speed against context", [replace(contexts, remarks=(), folded=True)], contexts.remarks,
            [charts.context_chart(profile, phase) for phase in ("decode", "prefill")],
            ["The band around an answer’s line: from p10 to p90 of its tokens."],
        ),
        Section(
            "Where the time goes", [_operators(each, phase) for each in profile.engines for phase in each.operators],
            _operator_remarks(profile), [charts.operator_chart(each) for each in profile.engines],
        ),
        Section(
            "Against this device’s ceilings", [replace(roofline, remarks=()), *_kinds(profile)], roofline.remarks,
            [charts.roofline_chart(profile)],
        ),
        Section("Memory over time", [_memory(profile)], (), [charts.memory_chart(each) for each in profile.engines]),
        Section(f"Energy ({sources})", [energy_table(profile)]),
        Section(
            "Heat and clock", [_climate(profile)], (),
            [charts.climate_chart(profile, what) for what in ("celsius", "hertz")],
        ),
    ]  # fmt: skip
    if any(each.sustained for each in profile.engines):
        held = profile.settings.watts
        windows = [_windows(each, each.sustained, held) for each in profile.engines if each.sustained]
        sections.append(Section("Sustained", [_sustained(profile), *windows], (), [charts.sustained_chart(profile)]))
    return Report(
        kind=f"{'quick device profile' if profile.quick else 'device profile'} · {profile.date[:10]}",
        name=profile.model.name,
        title=f"{profile.model.name} on {profile.device.name}",
        about=f"{profile.model.label} on {profile.device.name}, {first.engine} engine, {first.threads} threads",
        limit=f"Limit: {profile.verdict.limit}",
        sentences=[profile.verdict.sentence],
        figures=_headline(first),
        note="All figures were measured on this device, unless it says otherwise.",
        advice=profile.verdict.advice,
        sections=[*sections, Section("Device, model, plan", facts=_facts(profile))],
    )


def profile_summary(profile: Profile) -> Report:
    """The terminal's report: the conclusion, every engine's figures, contexts, the long run, and advice."""
    first, contexts = profile.engines[0], _contexts(profile)
    headings = [
        "engine", "answer tok/s", "ms p10 p50 p90", "prompt tok/s", "first token", "load", "peak",
        f"per token ({'/'.join(dict.fromkeys(each.energy.certainty for each in profile.engines))})",
    ]  # fmt: skip
    rows = [
        [
            each.engine, rate(each.decode.tok_s), " ".join(milliseconds(each.decode.per_token, "{:.3g}")),
            rate(each.prefill.tok_s), duration(each.ttft.p50), duration(each.load_s),
            format_bytes(each.timeline.peak), joules(each.decode.joules_per_token),
        ]
        for each in profile.engines
    ]  # fmt: skip
    tables = [Table(headings, rows)]
    tables.append(replace(contexts, notes=(), remarks=[*contexts.remarks, *_engine_remarks(profile)]))
    if any(each.sustained for each in profile.engines):
        tables.append(_sustained(profile))
    return Report(
        kind="device profile",
        name=profile.model.name,
        title=f"{profile.model.name} on {profile.device.name}, {first.engine}, {first.threads} threads",
        sentences=[profile.verdict.sentence],
        advice=profile.verdict.advice,
        sections=[Section("", tables)],
    )


def _headline(engine: EngineProfile) -> list[tuple[str, str, str]]:
    figures = [
        ("answers", f"{rate(engine.decode.tok_s)} tok/s", "measured"),
        ("prompts", f"{rate(engine.prefill.tok_s)} tok/s", "measured"),
        ("first token", duration(engine.ttft.p50), f"measured, {engine.prefill.tokens} tokens of prompt"),
        ("peak memory", format_bytes(engine.timeline.peak), "measured, the whole process"),
    ]
    spent, end = engine.decode.joules_per_token, engine.throttled
    if spent is not None:
        figures.append(("energy per token", joules(spent), f"{engine.energy.certainty}, of the answer"))
    if end is not None and engine.sustained:
        then = f"after {duration(engine.sustained.seconds)}"
        figures.append((f"answers {then}", f"{rate(end.tok_s)} tok/s", "measured; the device throttles: this ranks"))
        if end.joules_per_token is not None:
            figures.append((f"energy per token {then}", joules(end.joules_per_token), engine.energy.certainty))
    return figures


def _speed(profile: Profile) -> Table:
    headings = ["engine", "answer tok/s", "prompt tok/s", "first token", "load", "first load"]
    rows = [
        [
            each.engine, rate(each.decode.tok_s), rate(each.prefill.tok_s),
            duration(each.ttft.p50), duration(each.load_s), duration(each.first_load_s),
        ]
        for each in profile.engines
    ]  # fmt: skip
    notes = [
        "Measured; medians. First token: from the prompt to the first choice, loading left out. First load: with what "
        "had to be compiled or converted, if it was not there from earlier."
    ]
    return Table(headings, rows, notes, _engine_remarks(profile))


def _tokens(profile: Profile) -> Table:
    rows = [
        [each.engine, PHASE_WORDS[phase.name], *milliseconds(phase.per_token), f"{phase.per_token.count:,}"]
        for each in profile.engines
        for phase in (each.decode, each.prefill)
    ]
    first = profile.engines[0]
    notes = [
        f"Measured: up to {profile.settings.repetitions} times a prompt of {first.prefill.tokens} random tokens, in "
        f"passes of {first.prefill.at_once} on {first.engine}, and an answer of {first.decode.tokens}, as often as "
        f"{profile.settings.speed_s:g} s allow; a short run before them is not counted. "
        "p10: a tenth of the passes took no longer."
    ]
    headings = ["engine", "phase", "p10", "p50", "p90", "passes"]
    return Table(headings, rows, notes, left=2, title="Milliseconds per token")


def _threads(engine: EngineProfile) -> Table:
    rows = [
        [str(each.threads), rate(1 / each.decode.p50), rate(1 / each.prefill), *milliseconds(each.decode)]
        for each in engine.by_threads
    ]
    notes = ["Measured with a prompt of at most 128 tokens, and an answer to it."]
    headings = ["threads", "answer tok/s", "prompt tok/s", "ms p10", "p50", "p90"]
    return Table(headings, rows, notes, left=0, title=f"{engine.engine}: fewer threads")


def _engine_remarks(profile: Profile) -> list[str]:
    """Disturbed figures, departures from the request, and the reasons for missing engines."""
    remarks = [
        f"Other programs took {each.others:.0%} of the cores while {each.engine} was measured: it is faster than this."
        for each in profile.engines
        if each.others is not None and each.others >= DISTURBED
    ]
    remarks += [f"{each.engine}: {note}." for each in profile.engines for note in each.notes]
    if len({each.plan.config.kv_dtype for each in profile.engines}) > 1:
        dtypes = ", ".join(f"{each.plan.config.kv_dtype} in {each.engine}" for each in profile.engines)
        remarks.append(f"KV rows are not alike: {dtypes}; --kv-dtype sets one for all that have it.")
    return remarks + [f"{name} was not measured: {reason}" for name, reason in profile.missing.items()]


def _contexts(profile: Profile) -> Table:
    """A table of tokens per second by context, for decode and prefill of each engine."""
    curves = [{point.context: point for point in each.curve} for each in profile.engines]
    rows = []
    for context in sorted({context for curve in curves for context in curve}):
        cells = [f"{context:,}"]
        for curve in curves:
            point = curve.get(context)
            cells += [rate(1 / point.decode.p50), rate(1 / point.prefill)] if point else [NONE, NONE]
        rows.append(cells)
    headings = ["context", *(f"{each.engine} {what}" for each in profile.engines for what in ("answer", "prompt"))]
    notes = ["tok/s, measured: of an answer behind that many rows, and of the part of a prompt that filled them."]
    remarks = [f"{each.engine}: {each.curve_end}" for each in profile.engines if each.curve_end]
    return Table(headings, rows, notes, remarks, left=0)


def _operators(engine: EngineProfile, phase: PhaseOperators) -> Table:
    rows = [
        [
            each.name, each.phase, f"{each.share:.1%}", duration(each.seconds), f"{each.calls:,}",
            giga(each.bytes, each.seconds), giga(each.flops, each.seconds),
            NONE if each.waited is None else f"{each.waited:.0%}",
        ]
        for each in sorted(phase.operators, key=lambda each: -each.seconds)
    ]  # fmt: skip
    what = f"A pass of {phase.tokens} tokens" if phase.tokens > 1 else "A token"
    headings = ["operator", "part", "share", "time", "calls", "GB/s", "GFLOP/s", "waiting"]
    notes = [
        f"{what} with {phase.context:,} rows in the cache, in an instrumented engine, which is somewhat slower. Times "
        "are measured, bytes and operations counted. Waiting: share of all threads' time."
    ]
    title = f"{engine.engine}: operators of the {PHASE_WORDS[phase.name]}"
    return Table(headings, rows, notes, left=2, title=title, folded=True)


def _operator_remarks(profile: Profile) -> list[str]:
    """Why engines have no operator times and, under a stated --memory, the memory of instrumented engines."""
    limit, remarks = profile.settings.memory, list[str]()
    for engine in profile.engines:
        if engine.operators_reason:
            remarks.append(f"{engine.engine}: {engine.operators_reason}")
        elif limit is not None and engine.operators_peak is not None:
            more = ", more than that: instruments take room" if engine.operators_peak > limit else ""
            remarks.append(
                f"{engine.engine}: operators of the same plan as all else; with its instruments the process took "
                f"{format_bytes(engine.operators_peak)} of {format_bytes(limit)} (measured){more}."
            )
    return remarks


def roofline_table(profile: Profile) -> Table:
    roofs, rows = profile.roofs, []
    for engine in profile.engines:
        for phase in (engine.decode, engine.prefill):
            computes = percent(phase.flops_per_s, roofs.computing(engine) if roofs else None)
            rows.append([
                engine.engine, PHASE_WORDS[phase.name], per_s(phase.bytes_per_s, "GB/s"),
                percent(phase.bytes_per_s, roofs.reading(engine) if roofs else None),
                per_s(phase.flops_per_s, "GFLOP/s"),
                f"{computes} of float32" if roofs and roofs.lacks_int8(engine) else computes,
                NONE if phase.intensity is None else rate(phase.intensity),
            ])  # fmt: skip
    headings = ["engine", "phase", "reads", "of ceiling", "computes", "of ceiling", "flops per byte"]
    notes = ["What a pass must read and compute is counted, its time measured."]
    if roofs is None:
        return Table(headings, rows, notes, ["The ceilings of this device could not be measured."], left=2)
    remarks = list[str]()
    if roofs.int8_ops is None:
        int8 = "int8 products unknown"
        if bytewise := [each.engine for each in profile.engines if roofs.lacks_int8(each)]:
            remarks.append(
                f"{' and '.join(bytewise)} may exceed the ceiling of float32: most products are of int8, whose ceiling "
                "was not measured."
            )
    else:
        below = [each.engine for each in profile.engines if roofs.computing(each) == roofs.int8_ops]
        of = f", the ceiling of {' and '.join(below)}" if below else ""
        int8 = f"{roofs.int8_ops / 1e9:.4g} Gop/s of int8 products{of}"
    gpu = f" {roofs.gpu.name} reads {roofs.gpu.read_bytes_per_s / 1e9:.3g} GB/s (measured)." if roofs.gpu else ""
    notes.append(
        f"Ceilings, measured here with {roofs.threads} threads: {roofs.read_bytes_per_s / 1e9:.3g} GB/s read from "
        f"memory, {roofs.f32_flops / 1e9:.3g} GFLOP/s of float32 products, {int8}. More than 100 %: caches hold some "
        f"of the bytes.{gpu}"
    )
    return Table(headings, rows, notes, remarks, left=2)


def _kinds(profile: Profile) -> list[Table]:
    """A table of the ceilings of each kind of cores, if there are several kinds."""
    kinds = profile.roofs.kinds if profile.roofs else []
    rows = [
        [
            each.name, str(each.cores), clock(each.mhz * 1e6 or None), per_s(each.read_bytes_per_s, "GB/s"),
            per_s(each.f32_flops, "GFLOP/s"), per_s(each.int8_ops, "Gop/s"),
        ]
        for each in kinds
    ]  # fmt: skip
    headings = ["kind", "cores", "clock", "reads", "float32 products", "int8 products"]
    notes = ["Measured by a thread on each core of a kind, while the others had no work of edge."]
    return [Table(headings, rows, notes, title="Ceilings of each kind of cores")] if kinds else []


def _memory(profile: Profile) -> Table:
    rows = []
    for engine in profile.engines:
        timeline, config, parts = engine.timeline, engine.plan.config, [NONE] * 4
        if timeline.base is not None and timeline.samples:
            at = split(max(timeline.samples, key=lambda each: each.rss), timeline.base)
            parts = [format_bytes(each) for each in (at.interpreter, at.weights, at.kv, at.scratch)]
        sizes = [format_bytes(timeline.peak), format_bytes(engine.plan.predicted_peak), *parts]
        rows.append([engine.engine, *sizes, f"{config.capacity:,} in {config.kv_dtype}"])
    headings = ["engine", "peak", "predicted", "interpreter", "weights", "KV cache", "scratch", "KV rows"]
    first, plan = profile.engines[0].engine, profile.engines[0].plan
    stated = plan.limit_source == "budget"
    source = "stated with --memory" if stated else f"what the system grants ({plan.limit_source})"
    notes = [
        "Peak of the process's resident set and the pages of mapped weights: measured. Interpreter: the memory "
        "before loading, with the libraries. KV cache: counted, by the rows in use, or all of it where memory grew by "
        "as much in the first passes; scratch: the rest."
    ]
    remarks = [f"Limit of {first}: {format_bytes(plan.limit)}, {source}."]
    remarks += [
        f"{each.engine}: at most {format_bytes(each.timeline.peak_anonymous)} resident of its own (RssAnon), and "
        f"{format_bytes(each.timeline.peak_swap or 0)} swapped out (VmSwap); the rest are pages of files."
        for each in profile.engines
        if each.timeline.peak_anonymous is not None
    ]
    remarks += [
        f"{each.engine}: edge_trim took {duration(each.trim.soft.p50)} for what holds nothing (soft), then "
        f"{duration(each.trim.all.p50)} for all rows that can be spared, of {each.trim.rows:,}; the last "
        f"time they gave back {format_bytes(each.trim.freed)} (measured, medians of {each.trim.all.count})."
        for each in profile.engines
        if each.trim
    ]
    return Table(headings, rows, notes, remarks)


def energy_table(profile: Profile) -> Table:
    rows = []
    for engine in profile.engines:
        decode, prefill = engine.decode, engine.prefill
        rows.append([
            engine.engine, engine.energy.certainty, joules(decode.joules_per_token), joules(prefill.joules_per_token),
            joules(prefill.joules_per_token and prefill.joules_per_token * prefill.tokens),
            joules(engine.energy.load), NONE if decode.watts is None else f"{decode.watts:.1f} W",
        ])  # fmt: skip
    headings = ["engine", "kind", "per token of answer", "per token of prompt", "whole prompt", "loading"]
    headings += ["while answering"]
    sources = dict.fromkeys(
        f"{energy.certainty.capitalize()}: {energy.source}, the whole {energy.scope}."
        for energy in (each.energy for each in profile.engines)
    )
    notes = []
    if any(each.energy.kind == "estimate" for each in profile.engines):
        notes.append(
            "Nothing here measures joules: these follow from busy time and bytes by a profile's figures. Compare them "
            "with each other, not with a wattmeter."
        )
    return Table(headings, rows, notes, list(sources), left=2)


def _climate(profile: Profile) -> Table:
    rows = []
    for engine in profile.engines:
        climate = engine.timeline.climate
        celsius = [each.celsius for each in climate if each.celsius is not None]
        allowed = [each.allowed for each in climate if each.allowed is not None]
        rows.append([
            engine.engine,
            f"{celsius[0]:.0f} → {max(celsius):.0f} °C" if celsius else NONE,
            clock_range([each.hertz for each in climate if each.hertz is not None]),
            f"{min(allowed):.0%}" if allowed else NONE,
        ])  # fmt: skip
    timeline = profile.engines[0].timeline
    remarks = [
        f"Temperature of {timeline.sensor}, measured." if timeline.sensor else "This device shows no temperature."
    ]
    remarks += [f"The kernel slows it down at {timeline.trip:.0f} °C."] if timeline.trip else []
    return Table(["engine", "temperature", "clock", "top clock allowed"], rows, (), remarks)


def _sustained(profile: Profile) -> Table:
    """A table of the first and last windows of long runs, by engine."""
    runs = [(engine, engine.sustained) for engine in profile.engines if engine.sustained]
    length, count = runs[0][1].length, len(runs[0][1].windows)
    first, last = f"first {duration(length)}", f"last {duration(length)}"
    if length >= 60:
        first, last = "minute 1", f"minute {count}"
    watts = profile.settings.watts
    certainty = "/".join(dict.fromkeys(engine.energy.certainty for engine, _ in runs))
    headings = [
        "engine", f"{first} tok/s", f"{last} tok/s", "last / first", "highest", "clock",
        f"per token ({certainty})", "other programs", *([f"watts ({certainty})", "paused"] if watts else []),
    ]  # fmt: skip
    rows = [
        [
            engine.engine, rate(run.first.tok_s), rate(run.last.tok_s), f"{run.ratio:.2f}", _celsius(run.windows),
            _then(run.first.hertz, run.last.hertz, clock),
            _then(run.first.joules_per_token, run.last.joules_per_token, joules), _others(run.windows),
            *([_then(run.first.watts, run.last.watts, _watts), _paused(run.windows)] if watts else []),
        ]
        for engine, run in runs
    ]  # fmt: skip
    held = f"held to {watts:g} W by pauses, which count" if watts else "without a pause"
    notes = [
        f"Measured: answers one after another for {duration(profile.settings.sustained_s)} {held}; tokens by time, in "
        f"the first {duration(length)} and in the last."
    ]
    if watts and certainty != "measured":
        notes.append("Where nothing measures watts, pauses go by the estimate.")
    if slow := [engine.engine for engine, _ in runs if engine.throttled]:
        notes.append(f"The device throttles with {', '.join(slow)}: the last window ranks, not the speed at first.")
    if len(runs) > 1:
        notes.append("Engines take turns: all but the first begin on a device that the ones before have warmed.")
    return Table(headings, rows, notes)


def _windows(engine: EngineProfile, run: Sustained, watts: float | None) -> Table:
    """A table of a long run, window by window."""
    rows = [
        [
            f"{window.start:.0f} s", rate(window.tok_s), *milliseconds(window.per_token),
            joules(window.joules_per_token), _celsius([window]), clock(window.hertz), _others([window]),
            *([_watts(window.watts), _paused([window])] if watts else []),
        ]
        for window in run.windows
    ]  # fmt: skip
    headings = [
        "from", "tok/s", "ms/token p10", "p50", "p90", f"per token ({engine.energy.certainty})", "highest", "clock",
        "other programs", *([f"watts ({engine.energy.certainty})", "paused"] if watts else []),
    ]  # fmt: skip
    paused = ", with pauses" if watts else ""
    notes = [
        f"Measured, in windows of {duration(run.length)}; tok/s: tokens by time{paused}. Other programs: their share "
        "of all cores' time."
    ]
    return Table(headings, rows, notes, title=f"{engine.engine}: the long run", folded=True)


def _then(first: float | None, last: float | None, said: Callable[[float], str]) -> str:
    """A figure of the first and last windows: `first → last`, or one if they read the same."""
    return NONE if first is None or last is None else " → ".join(dict.fromkeys([said(first), said(last)]))


def _celsius(windows: Sequence[Window]) -> str:
    celsius = [each.celsius for each in windows if each.celsius is not None]
    return f"{max(celsius):.0f} °C" if celsius else NONE


def _watts(watts: float | None) -> str:
    return NONE if watts is None else f"{watts:.2f} W"


def _paused(windows: Sequence[Window]) -> str:
    """The share of time spent in pauses, and their seconds."""
    paused, seconds = sum(each.paused for each in windows), sum(each.seconds for each in windows)
    return f"{paused / seconds:.0%}, {duration(paused)}"


def _others(windows: Sequence[Window]) -> str:
    others = [each.others for each in windows if each.others is not None]
    return f"{max(others):.0%}" if others else NONE


def _facts(profile: Profile) -> list[tuple[str, str]]:
    """The device, the model and the conditions of the measurements."""
    device, model, first = profile.device, profile.model, profile.engines[0]
    plans = [
        (
            f"plan of {each.engine}",
            f"{each.plan.config.capacity:,} KV rows in {each.plan.config.kv_dtype}, policy {each.plan.kv_policy}, "
            f"prompts in passes of {each.plan.config.chunk}, tuned: {each.plan.tuned}",
        )
        for each in profile.engines
    ]
    versions = profile.versions | {name: each for engine in profile.engines for name, each in engine.versions.items()}
    return [
        ("device", device.name),
        ("system", f"{device.system} ({device.machine})"),
        ("cores", f"{device.physical_cores}, {first.threads} threads used"),
        ("instruction sets", " ".join(device.instruction_sets) or "none of note"),
        ("caches", ", ".join(f"{name} {format_bytes(size)}" for name, size in device.caches.items()) or "unknown"),
        ("memory", format_bytes(device.memory)),
        ("model", f"{model.name}: {model.label}"),
        (
            "weights",
            f"{format_count(model.parameters)} in {format_bytes(model.weight_bytes)}, "
            f"layers mostly {model.weight_type}",
        ),
        *plans,
        ("measured", f"{profile.date}, {profile.seconds:.0f} s{', --quick' if profile.quick else ''}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
