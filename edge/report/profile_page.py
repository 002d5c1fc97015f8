"""A device profile as one HTML file that needs nothing else: readable on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from edge.profiling.profile import Profile
from edge.report import profile_heat as heat
from edge.report import profile_plots as plots
from edge.report import profile_tables as tables
from edge.report.profile_style import STYLE
from edge.report.profile_tables import Section
from edge.report.profile_text import headline, title


def html(profile: Profile) -> str:
    """Raises MissingExtraError without matplotlib."""
    parts = [_head(profile), _figures(profile), _advice(profile)]
    parts += [_speed(profile), _time(profile), _roofline(profile), _memory(profile), _energy(profile), _heat(profile)]
    return page(title(profile), "\n".join(part for part in [*parts, _facts(profile)] if part))


def page(name: str, body: str) -> str:
    """A whole document. name: as text; body: HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(name)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def table_html(section: Section) -> str:
    """The table and its notes; on a phone every row is a card, and a figure's heading stands before it."""
    words = [" class=word" if index < section.left else "" for index in range(len(section.headings))]
    head = "".join(f"<th{word}>{escape(each)}</th>" for word, each in zip(words, section.headings, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td{word} data-label="{escape(heading)}">{escape(cell if word else _unbroken(cell))}</td>'
            for word, heading, cell in zip(words, section.headings, row, strict=True)
        )
        + "</tr>"
        for row in section.rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n{notes_html(section.remarks)}{_folded(section.notes)}"
    )


def _unbroken(figure: str) -> str:
    """With its unit in one line, `1 mJ → 2 mJ` in two at most."""
    return figure.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}", " → ")


def _folded(notes: Sequence[str]) -> str:
    """What the figures are: there for whoever asks."""
    return f"<details><summary>What this shows</summary>\n{notes_html(notes)}</details>" if notes else ""


def notes_html(notes: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def _head(profile: Profile) -> str:
    kind = "quick device profile" if profile.quick else "device profile"
    engine = profile.engines[0]
    on = f"{profile.model.label} on {profile.device.name}, {engine.engine} engine, {engine.threads} threads"
    return f"""<header>
<p class="eyebrow">edge · {kind} · {escape(profile.date[:10])}</p>
<h1>{escape(profile.model.name)}</h1>
<p class="on">{escape(on)}</p>
<section class="verdict"><p class="chip">Limit: {escape(profile.verdict.limit)}</p>
<p class="sentence">{escape(profile.verdict.sentence)}</p></section>
</header>"""


def _figures(profile: Profile) -> str:
    cards = "\n".join(
        f'<div class="card"><p class="what">{escape(what)}</p><p class="figure">{escape(figure)}</p>'
        f'<p class="known">{escape(known)}</p></div>'
        for what, figure, known in headline(profile)
    )
    said = '<p class="note">All figures were measured on this device, unless it says otherwise.</p>'
    return f'<section class="cards">\n{cards}\n</section>\n{said}'


def _advice(profile: Profile) -> str:
    if not profile.verdict.advice:
        return ""
    items = "\n".join(
        f"<li>{escape(why)}<code>{escape(command)}</code></li>" for why, command in profile.verdict.advice
    )
    return f'<section><h2>What to try</h2>\n<ul class="advice">\n{items}\n</ul></section>'


def _speed(profile: Profile) -> str:
    pictures = _pictures(plots.context_plot(profile, "decode"), plots.context_plot(profile, "prefill"))
    caption = '<p class="note">The band around an answer’s line: from p10 to p90 of its tokens.</p>' if pictures else ""
    contexts = tables.context_table(profile)
    caption += notes_html(contexts.remarks)
    return (
        f"<section><h2>Speed</h2>\n{table_html(tables.speed_table(profile))}\n"
        f"<h3>Milliseconds per token</h3>\n{table_html(tables.token_table(profile))}</section>\n"
        f"<section><h2>Speed against context</h2>\n{pictures}{caption}"
        f"{_more('All figures', replace(contexts, remarks=()))}</section>"
    )


def _time(profile: Profile) -> str:
    told = [each for each in profile.engines if each.operators]
    pictures = _pictures(
        *(f"<h3>{escape(each.engine)}</h3>{plots.operator_plot(each)}" for each in told)
    )  # fmt: skip
    details = "".join(
        _more(section.title, section)
        for engine in told
        for section in (tables.operator_table(engine, phase) for phase in engine.operators)
    )
    remarks = notes_html(tables.operator_remarks(profile))
    if not pictures and not remarks:
        return ""
    return f"<section><h2>Where the time goes</h2>\n{pictures}{remarks}{details}</section>"


def _roofline(profile: Profile) -> str:
    section = tables.roofline_table(profile)
    picture = _pictures(plots.roofline_plot(profile))
    return f"<section><h2>{escape(section.title)}</h2>\n{picture}{table_html(section)}</section>"


def _memory(profile: Profile) -> str:
    drawn = [(each, plots.memory_plot(each)) for each in profile.engines]
    pictures = _pictures(*(f"<h3>{escape(each.engine)}</h3>{svg}" for each, svg in drawn if svg))
    return f"<section><h2>Memory over time</h2>\n{pictures}{table_html(tables.memory_table(profile))}</section>"


def _energy(profile: Profile) -> str:
    known = " and ".join(dict.fromkeys(tables.how(each) for each in profile.engines))
    return f"<section><h2>Energy ({known})</h2>\n{table_html(tables.energy_table(profile))}</section>"


def _heat(profile: Profile) -> str:
    pictures = _pictures(plots.climate_plot(profile, "celsius"), plots.climate_plot(profile, "hertz"))
    parts = [f"<section><h2>Heat and clock</h2>\n{pictures}{table_html(heat.climate_table(profile))}</section>"]
    if section := heat.sustained_table(profile):
        picture = _pictures(plots.sustained_plot(profile))
        windows = [heat.windows_table(each, each.sustained) for each in profile.engines if each.sustained]
        details = "".join(_more(each.title, each) for each in windows)
        parts.append(f"<section><h2>{section.title}</h2>\n{picture}{table_html(section)}{details}</section>")
    return "\n".join(parts)


def _facts(profile: Profile) -> str:
    rows = "\n".join(f"<dt>{escape(what)}</dt><dd>{escape(said)}</dd>" for what, said in tables.facts(profile))
    return f"<section><h2>Device, model, plan</h2>\n<dl>\n{rows}\n</dl></section>"


def _pictures(*drawn: str) -> str:
    shown = [f"<figure>{each}</figure>" for each in drawn if each]
    return f'<div class="pictures">{"".join(shown)}</div>\n' if shown else ""


def _more(name: str, section: Section) -> str:
    return f"<details><summary>{escape(name)}</summary>\n{table_html(section)}</details>"
