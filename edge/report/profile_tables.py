"""A device profile as tables: the same figures for the page, for Markdown and for the terminal."""

from __future__ import annotations

from edge.budget import format_bytes
from edge.devices.load import DISTURBED
from edge.model.spec import format_count
from edge.profiling.memory import Split, split
from edge.profiling.profile import EngineProfile, PhaseOperators, Profile
from edge.report.figures import NONE, duration, giga, joules, milliseconds, per_s, percent, rate
from edge.report.table import Section

PHASE_WORDS = {"prefill": "prompt", "decode": "answer"}


def speed_table(profile: Profile) -> Section:
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
    return Section("Speed", headings, rows, notes, engine_remarks(profile))


def token_table(profile: Profile) -> Section:
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
    return Section("Milliseconds per token", ["engine", "phase", "p10", "p50", "p90", "passes"], rows, notes, left=2)


def engine_remarks(profile: Profile) -> list[str]:
    """Why engines are missing, which figures were disturbed, and what is not as it was asked for."""
    taken = [
        f"Other programs took {each.others:.0%} of the cores while {each.engine} was measured: it is faster than this."
        for each in profile.engines
        if each.others is not None and each.others >= DISTURBED
    ]
    notes = [f"{each.engine}: {note}." for each in profile.engines for note in each.notes]
    if len({each.plan.config.kv_dtype for each in profile.engines}) > 1:
        dtypes = ", ".join(f"{each.plan.config.kv_dtype} in {each.engine}" for each in profile.engines)
        notes.append(f"KV rows are not alike: {dtypes}; --kv-dtype sets one for all that have it.")
    return taken + notes + [f"{name} was not measured: {reason}" for name, reason in profile.missing.items()]


def context_table(profile: Profile) -> Section:
    """Answers' tokens per second, with the prompt's behind them."""
    contexts = sorted({point.context for each in profile.engines for point in each.curve})
    rows = []
    for context in contexts:
        cells = [f"{context:,}"]
        for engine in profile.engines:
            point = next((each for each in engine.curve if each.context == context), None)
            cells += [rate(1 / point.decode.p50), rate(1 / point.prefill)] if point else [NONE, NONE]
        rows.append(cells)
    headings = ["context", *(f"{each.engine} {what}" for each in profile.engines for what in ("answer", "prompt"))]
    notes = [
        "tok/s, measured: of an answer with so many rows in the cache, and of the part of a prompt that led there."
    ]
    remarks = [f"{each.engine}: {each.curve_end}" for each in profile.engines if each.curve_end]
    return Section("Speed against context", headings, rows, notes, remarks, left=0)


def operator_table(engine: EngineProfile, phase: PhaseOperators) -> Section:
    rows = [
        [
            each.name, each.phase, f"{each.share:.1%}", duration(each.seconds), f"{each.calls:,}",
            giga(each.bytes, each.seconds), giga(each.flops, each.seconds),
            NONE if each.waited is None else f"{each.waited:.0%}",
        ]
        for each in sorted(phase.operators, key=lambda each: -each.seconds)
    ]  # fmt: skip
    what = f"A pass of {phase.tokens} tokens" if phase.tokens > 1 else "A token"
    title = f"{engine.engine}: operators of the {PHASE_WORDS[phase.name]}"
    headings = ["operator", "part", "share", "time", "calls", "GB/s", "GFLOP/s", "waiting"]
    notes = [
        f"{what} with {phase.context:,} rows in the cache, in an instrumented engine, which is somewhat slower. Times "
        "are measured, bytes and operations counted. Waiting: share of all threads' time."
    ]
    return Section(title, headings, rows, notes, left=2)


def operator_remarks(profile: Profile) -> list[str]:
    """Why engines do not tell where their time goes; and under a stated --memory, what their instruments took."""
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


def roofline_table(profile: Profile) -> Section:
    roofs, rows = profile.roofs, []
    for engine in profile.engines:
        for phase in (engine.decode, engine.prefill):
            most = roofs.computing(engine.integers) if roofs else None
            rows.append([
                engine.engine, PHASE_WORDS[phase.name], per_s(phase.bytes_per_s, "GB/s"),
                percent(phase.bytes_per_s, roofs.read_bytes_per_s if roofs else None),
                per_s(phase.flops_per_s, "GFLOP/s"), percent(phase.flops_per_s, most),
                NONE if phase.intensity is None else rate(phase.intensity),
            ])  # fmt: skip
    headings = ["engine", "phase", "reads", "of ceiling", "computes", "of ceiling", "flops per byte"]
    notes = ["What a pass must read and compute is counted, its time measured."]
    if roofs:
        notes.append(
            f"Ceilings, measured here with {roofs.threads} threads: {roofs.read_bytes_per_s / 1e9:.3g} GB/s read from "
            f"memory, {roofs.f32_flops / 1e9:.3g} GFLOP/s of float32 products, {_int8(profile)}. More than 100 %: "
            "caches hold some of the bytes."
        )
    remarks = [] if roofs else ["The ceilings of this device could not be measured."]
    return Section("Against this device’s ceilings", headings, rows, notes, remarks, left=2)


def _int8(profile: Profile) -> str:
    """Of the roof of integers: what it is, and whose it is."""
    roofs = profile.roofs
    if roofs is None or roofs.int8_ops is None:
        return "int8 products unknown, so engines that multiply bytes may exceed float32's"
    below = [each.engine for each in profile.engines if roofs.computing(each.integers) == roofs.int8_ops]
    of = f", the ceiling of {' and '.join(below)}" if below else ""
    return f"{roofs.int8_ops / 1e9:.4g} Gop/s of int8 products{of}"


def memory_table(profile: Profile) -> Section:
    rows = []
    for engine in profile.engines:
        parts = peak_split(engine)
        cells = [NONE] * 4
        if parts:
            cells = [format_bytes(each) for each in (parts.interpreter, parts.weights, parts.kv, parts.scratch)]
        rows.append([
            engine.engine, format_bytes(engine.timeline.peak), format_bytes(engine.plan.predicted_peak), *cells,
            f"{engine.plan.config.capacity:,} in {engine.plan.config.kv_dtype}",
        ])  # fmt: skip
    headings = ["engine", "peak", "predicted", "interpreter", "weights", "KV cache", "scratch", "KV rows"]
    return Section("Memory", headings, rows, [
        "Peak of the process's resident set and the pages of mapped weights: measured. Interpreter: what was there "
        "before loading, with the libraries. KV cache: counted, by the rows in use, or all of it where memory grew by "
        "so much in the first passes; scratch: the rest."
    ], [limit_note(profile.engines[0])])  # fmt: skip


def limit_note(engine: EngineProfile) -> str:
    source = engine.plan.limit_source
    said = "stated with --memory" if source == "budget" else f"what the system grants ({source})"
    return f"Limit of {engine.engine}: {format_bytes(engine.plan.limit)}, {said}."


def peak_split(engine: EngineProfile) -> Split | None:
    """At the highest sample."""
    timeline = engine.timeline
    if timeline.base is None or not timeline.samples:
        return None
    return split(max(timeline.samples, key=lambda each: each.rss), timeline.base)


def energy_table(profile: Profile) -> Section:
    rows = []
    for engine in profile.engines:
        decode, prefill = engine.decode, engine.prefill
        rows.append([
            engine.engine, how(engine), joules(decode.joules_per_token), joules(prefill.joules_per_token),
            joules(prefill.joules_per_token and prefill.joules_per_token * prefill.tokens),
            joules(engine.energy.load), NONE if decode.watts is None else f"{decode.watts:.1f} W",
        ])  # fmt: skip
    headings = ["engine", "kind", "per token of answer", "per token of prompt", "whole prompt", "loading"]
    headings += ["while answering"]
    sources = dict.fromkeys(
        f"{how(each).capitalize()}: {each.energy.source}, the whole {each.energy.scope}." for each in profile.engines
    )
    notes = []
    if any(each.energy.kind == "estimate" for each in profile.engines):
        notes.append(
            "Nothing here measures joules: these follow from busy time and bytes by a profile's figures. Compare them "
            "with each other, not with a wattmeter."
        )
    return Section("Energy", headings, rows, notes, list(sources), left=2)


def how(engine: EngineProfile) -> str:
    """How joules are known."""
    return "estimated" if engine.energy.kind == "estimate" else "measured"


def facts(profile: Profile) -> list[tuple[str, str]]:
    """What was measured on, and how."""
    device, model, first = profile.device, profile.model, profile.engines[0]
    caches = ", ".join(f"{name} {format_bytes(size)}" for name, size in device.caches.items())
    weights = format_bytes(model.weight_bytes)
    return [
        ("device", device.name),
        ("system", f"{device.system} ({device.machine})"),
        ("cores", f"{device.physical_cores}, {first.threads} threads used"),
        ("instruction sets", " ".join(device.instruction_sets) or "none of note"),
        ("caches", caches or "unknown"),
        ("memory", format_bytes(device.memory)),
        ("model", f"{model.name}: {model.label}"),
        ("weights", f"{format_count(model.parameters)} in {weights}, mostly {model.weight_type}"),
        *((f"plan of {each.engine}", _plan(each)) for each in profile.engines),
        ("measured", f"{profile.date}, {profile.seconds:.0f} s{', --quick' if profile.quick else ''}"),
        ("versions", ", ".join(f"{name} {each}" for name, each in _versions(profile).items())),
    ]


def _plan(engine: EngineProfile) -> str:
    config = engine.plan.config
    return (
        f"{config.capacity:,} KV rows in {config.kv_dtype}, policy {engine.plan.kv_policy}, prompts in passes of "
        f"{config.chunk}, tuned: {engine.plan.tuned}"
    )


def _versions(profile: Profile) -> dict[str, str]:
    return {**profile.versions, **{name: each for engine in profile.engines for name, each in engine.versions.items()}}
