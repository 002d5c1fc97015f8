"""A device profile in words: Markdown for a file, and the most of it for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edge.budget import format_bytes
from edge.profiling.profile import EngineProfile, Profile
from edge.report import profile_heat as heat
from edge.report import profile_tables as tables
from edge.report.figures import duration, joules, rate
from edge.report.table import Section, table


def title(profile: Profile) -> str:
    return f"{profile.model.name} on {profile.device.name}"


def headline(profile: Profile) -> list[tuple[str, str, str]]:
    """The figures that come first: what, figure, how it is known. Of the first engine."""
    engine = profile.engines[0]
    spent = engine.decode.joules_per_token
    figures = [
        ("answers", f"{rate(engine.decode.tok_s)} tok/s", "measured"),
        ("prompts", f"{rate(engine.prefill.tok_s)} tok/s", "measured"),
        ("first token", duration(engine.ttft.p50), f"measured, {engine.prefill.tokens} tokens of prompt"),
        ("peak memory", format_bytes(engine.timeline.peak), "measured, the whole process"),
    ]  # fmt: skip
    if spent is not None:
        figures.append(("energy per token", joules(spent), f"{tables.how(engine)}, of the answer"))
    return figures


def sections(profile: Profile) -> Iterator[Section]:
    """All tables, in their order."""
    yield tables.speed_table(profile)
    yield tables.token_table(profile)
    yield tables.context_table(profile)
    yield tables.roofline_table(profile)
    for engine in profile.engines:
        for phase in engine.operators:
            yield tables.operator_table(engine, phase)
    yield tables.memory_table(profile)
    yield tables.energy_table(profile)
    yield heat.climate_table(profile)
    if long_run := heat.sustained_table(profile):
        yield long_run
        yield from (heat.windows_table(each, each.sustained) for each in profile.engines if each.sustained)


def markdown(profile: Profile) -> str:
    parts = [f"# {marked(title(profile))}", f"**{marked(profile.verdict.sentence)}**"]
    parts.append("\n".join(f"- {what}: {figure} ({known})" for what, figure, known in headline(profile)))
    if profile.verdict.advice:
        parts.append("## What to try")
        parts.append("\n".join(f"- {marked(why)}: {_code(command)}" for why, command in profile.verdict.advice))
    for each in sections(profile):
        rows = [[marked(cell) for cell in row] for row in each.rows]
        parts += [f"## {each.title}", table([marked(cell) for cell in each.headings], rows, each.left)]
        parts.append("\n".join(marked(note) for note in [*each.remarks, *each.notes]))
    if remarks := tables.operator_remarks(profile):
        parts += ["## How operators were measured", "\n".join(f"- {marked(each)}" for each in remarks)]
    parts += ["## Device, model, plan", "\n".join(f"- {what}: {marked(said)}" for what, said in tables.facts(profile))]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(profile: Profile, width: int | None = None) -> str:
    """For a terminal of `width` characters: the sentence, the figures, speed, contexts and memory, and what to try."""
    engine = profile.engines[0]
    parts = [f"{title(profile)}, {engine.engine}, {engine.threads} threads", profile.verdict.sentence]
    rows = [_row(each) for each in profile.engines]
    kinds = dict.fromkeys(tables.how(each) for each in profile.engines)
    headings = [
        "engine", "answer tok/s", "ms p10 p50 p90", "prompt tok/s", "first token", "load", "peak",
        f"per token ({'/'.join(kinds)})",
    ]  # fmt: skip
    parts.append(table(headings, rows, width=width))
    contexts = tables.context_table(profile)
    parts.append(_plain(contexts, width))
    if remarks := [*contexts.remarks, *tables.engine_remarks(profile)]:
        parts.append("\n".join(remarks))
    if long_run := heat.sustained_table(profile):
        parts += [_plain(long_run, width), "\n".join(long_run.notes)]
    if profile.verdict.advice:
        longest = max(len(command) for _, command in profile.verdict.advice)
        lines = [f"  {command:{longest}}  {why}" for why, command in profile.verdict.advice]
        parts.append("\n".join(["to try:", *lines]))
    return "\n\n".join(parts)


def _row(engine: EngineProfile) -> list[str]:
    spread = engine.decode.per_token
    spent = engine.decode.joules_per_token
    return [
        engine.engine,
        rate(engine.decode.tok_s),
        " ".join(f"{each * 1e3:.3g}" for each in (spread.p10, spread.p50, spread.p90)),
        rate(engine.prefill.tok_s),
        duration(engine.ttft.p50),
        duration(engine.load_s),
        format_bytes(engine.timeline.peak),
        joules(spent),
    ]


def _plain(section: Section, width: int | None) -> str:
    return table(section.headings, section.rows, section.left, width)


def marked(text: str) -> str:
    """One line that no Markdown reader takes for anything else: names of models and devices are not ours."""
    return "".join(f"\\{each}" if each in "|`*[<\\" else each for each in " ".join(text.split()))


def _code(text: str) -> str:
    """One line, literally: its fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"
