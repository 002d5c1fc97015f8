"""A device profile as a document: JSON, Markdown, or a page."""

from __future__ import annotations

import json
from dataclasses import replace

from edge.profiling.profile import Profile
from edge.report import profile_heat as heat
from edge.report import profile_plots as plots
from edge.report import profile_tables as tables
from edge.report.chart import pictures
from edge.report.page import advice, cards, facts_html, folded, notes_html, page, section, table_html, verdict
from edge.report.profile_text import headline, markdown
from edge.report.table import Section


def document(profile: Profile, kind: str) -> str:
    """The report as the text of a file of this kind: .html, .md or .json."""
    if kind == ".json":
        return json.dumps(profile.to_dict(), ensure_ascii=False, allow_nan=False) + "\n"
    return html(profile) if kind == ".html" else markdown(profile)


def html(profile: Profile) -> str:
    kind = "quick device profile" if profile.quick else "device profile"
    engine, said = profile.engines[0], profile.verdict
    on = f"{profile.model.label} on {profile.device.name}, {engine.engine} engine, {engine.threads} threads"
    return page(
        f"{kind} · {profile.date[:10]}", profile.model.name, on,
        verdict(f"Limit: {said.limit}", [said.sentence]), cards(headline(profile)),
        notes_html(["All figures were measured on this device, unless it says otherwise."]), advice(said.advice),
        *_speed(profile), _time(profile), _roofline(profile), _memory(profile), _energy(profile), *_heat(profile),
        section("Device, model, plan", facts_html(tables.facts(profile))),
    )  # fmt: skip


def _speed(profile: Profile) -> list[str]:
    drawn = pictures(plots.context_plot(profile, phase) for phase in ("decode", "prefill"))
    band = ["The band around an answer’s line: from p10 to p90 of its tokens."] if drawn else []
    contexts = tables.context_table(profile)
    figures = _more("All figures", replace(contexts, remarks=()))
    tokens = f"<h3>Milliseconds per token</h3>\n{table_html(tables.token_table(profile))}"
    return [
        section("Speed", table_html(tables.speed_table(profile)), tokens),
        section(contexts.title, drawn, notes_html([*band, *contexts.remarks]), figures),
    ]


def _time(profile: Profile) -> str:
    told = [tables.operator_table(engine, phase) for engine in profile.engines for phase in engine.operators]
    return section(
        "Where the time goes", pictures(map(plots.operator_plot, profile.engines)),
        notes_html(tables.operator_remarks(profile)), *(_more(each.title, each) for each in told),
    )  # fmt: skip


def _roofline(profile: Profile) -> str:
    shown = tables.roofline_table(profile)
    return section(shown.title, pictures([plots.roofline_plot(profile)]), table_html(shown))


def _memory(profile: Profile) -> str:
    drawn = pictures(map(plots.memory_plot, profile.engines))
    return section("Memory over time", drawn, table_html(tables.memory_table(profile)))


def _energy(profile: Profile) -> str:
    known = " and ".join(dict.fromkeys(tables.how(each) for each in profile.engines))
    return section(f"Energy ({known})", table_html(tables.energy_table(profile)))


def _heat(profile: Profile) -> list[str]:
    drawn = pictures(plots.climate_plot(profile, what) for what in ("celsius", "hertz"))
    parts = [section("Heat and clock", drawn, table_html(heat.climate_table(profile)))]
    if shown := heat.sustained_table(profile):
        windows = [heat.windows_table(each, each.sustained) for each in profile.engines if each.sustained]
        details = "".join(_more(each.title, each) for each in windows)
        parts.append(section(shown.title, pictures([plots.sustained_plot(profile)]), table_html(shown), details))
    return parts


def _more(name: str, shown: Section) -> str:
    return folded(name, table_html(shown))
