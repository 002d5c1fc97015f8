"""Report on the quality of KV settings, with a recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge.lab.quality.choice import Choice, choices, figure_words, title
from edge.lab.quality.material import LONGEST_CHUNK
from edge.lab.quality.perplexity import BLOCK
from edge.lab.quality.summary import Figure, Row
from edge.lab.report.chart import INK, Axis, Chart, colour
from edge.lab.report.document import NONE, Report, Section, Table

_MIB = 1 << 20
_HEADINGS = {
    "perplexity": "perplexity",
    "ratio": "× full",
    "known": "digits, question known",
    "later": "question later",
    "streamed": "streamed",
    "repeat": "repeated segment",
    "repeat_ratio": "× full",
    "kl": "KL from full",
}
_PANELS = {
    "ratio": "Perplexity × full",
    "known": "Digits found, question known",
    "streamed": "Digits found, streamed",
    "repeat": "Perplexity of a repeated segment",
}
_SHAPES = ("circle", "square", "diamond", "triangle")
_HIGHEST = 1.4  # larger ratios are stated rather than drawn: they would compress the others
_INCOMPLETE = "This run was interrupted: some cells are missing."


def kv_report(rows: Sequence[Row], settings: dict[str, Any], model: str, *, complete: bool) -> Report:
    """The report of a quality matrix. model: the user's name for the model."""
    found, shown = choices(rows), [_panel(name, rows) for name in _PANELS]
    texts = ", ".join(each["name"] for each in settings["documents"])
    names = list(dict.fromkeys(title(each.row) for each in found))
    picks = names if len(names) == 1 else [f"{title(each.row)} at {each.size}" for each in found]
    said = [each.sentence for each in found] or ["Nothing was measured that says what to choose."]
    beyond = [
        f"{title(row)} at {row.cell.size}: {row.figures['ratio'].value:.2f}"
        for row in rows if "ratio" in row.figures and row.figures["ratio"].value > _HIGHEST
    ]  # fmt: skip
    captions = ["The line across a mark: its standard error. The upright line: the full cache."]
    captions += [f"Perplexity beyond the picture: {', '.join(beyond)}."] if beyond else []
    return Report(
        kind="KV cache quality",
        name=model,
        title=f"KV cache quality: {settings['model']}",
        about=f"{settings['model']}, {settings['backend']} engine, {texts}",
        limit=f"Choose: {', '.join(picks)}" if picks else "No choice",
        sentences=said if complete else [_INCOMPLETE, *said],
        figures=_headline(rows, found),
        advice=[(f"{title(each.row)} at {each.size}", _command(each, model)) for each in found],
        sections=[
            Section("Quality", charts=shown, captions=captions),
            Section("All figures", [kv_table(rows, settings)]),
            Section("Not measured", remarks=reasons_of(rows)),
        ],
    )


def kv_text(report: Report) -> Report:
    """The report for Markdown and the terminal: figures without a recommendation."""
    return replace(
        report, sentences=report.sentences[:1] if report.sentences[0] == _INCOMPLETE else (), figures=(), advice=()
    )


def kv_table(rows: Sequence[Row], settings: dict[str, Any]) -> Table:
    """All figures, with notes on their columns and how to reproduce them. Tasks without figures are left out."""
    shown = [name for name in _HEADINGS if any(name in row.figures for row in rows)]
    read = any(row.reads for row in rows)
    headings = ["policy", "KV", "rows", *["read"] * read, "allocated", *(_HEADINGS[name] for name in shown), "tok/s"]
    cells = [
        [
            row.policy, row.kv_dtype or NONE, _count(row.rows), *[_read(row)] * read,
            _bytes(row.nbytes),
            *(_figure(row.figures.get(name), name) for name in shown), _count(row.tok_s),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(headings, cells, _notes(rows, settings), left=2)


def reasons_of(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why figures are missing, with the cells concerned."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        label = " ".join(part for part in (row.policy, row.kv_dtype, row.cell.size) if part)
        for task, reason in row.reasons.items():
            everything = len(set(row.reasons.values())) == 1 and not row.figures
            cells.setdefault((reason, "" if everything else f" ({task})"), []).append(label)
    return [f"{', '.join(dict.fromkeys(labels))}{task}: {reason}" for (reason, task), labels in cells.items()]


def _notes(rows: Sequence[Row], settings: dict[str, Any]) -> list[str]:
    """Notes on columns, sample counts, and how to reproduce the figures."""
    first, texts = rows[0].figures if rows else {}, settings["documents"]
    notes = ["All figures are measured; allocated: the bytes of all arrays of the cache; ±: standard error."]
    if any(row.reads for row in rows):
        notes.append("read: the most rows that a head reads for a token of an answer, and here for every scored token.")
    if "ratio" in first:
        chunk = settings["chunk"] or f"{LONGEST_CHUNK}, or fewer in a small cache"
        notes.append(
            f"perplexity: {first['perplexity'].over:,} tokens of {len(texts)} document(s), streamed through the "
            f"cache in chunks of {chunk}. × full: against the first row, token by token; its error from "
            f"the differences of {BLOCK}-token means. tok/s: of this run, with the loss of every token; measured once."
        )
    if "known" in first:
        notes.append(
            f"digits: share of digits told right, greedy, given those before, in {first['known'].over} texts of "
            f"{settings['length']:,} tokens with a 5-digit key at evenly spread depths. question known: all is read, "
            "question too, then the cache is compressed once. question later: compressed before the question. In both "
            "the cache holds everything until then. streamed: never more rows than there are; the text begins with "
            "what will be asked."
        )
    if "repeat" in first:
        notes.append(
            f"repeated segment: perplexity of {first['repeat'].over:,} tokens that come again 1,500 tokens later; when "
            f"they came first it was {first['first'].value:.3g} (full cache)."
        )
    if "kl" in first:
        notes.append(
            f"KL from full: of the predictions of {first['kl'].over:,} tokens from the first row's, in nats, each text "
            f"read from an empty cache. That of full caches is remembered for --kv-policy auto."
        )
    documents = ", ".join(f"{each['name']} ({each['tokens']:,} tokens)" for each in texts)
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return [*notes, f"texts: {documents}; seed {settings['seed']}; engine {settings['backend']}; {versions}"]


def _bytes(count: int | None) -> str:
    """Bytes with more digits than elsewhere, to compare cells of one size."""
    if count is None:
        return NONE
    return f"{count / _MIB:.2f} MiB" if count >= _MIB else f"{count / 1024:.1f} KiB"


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _read(row: Row) -> str:
    return NONE if row.rows is None else _count(min(row.reads or row.rows, row.rows))


def _figure(figure: Figure | None, name: str) -> str:
    if figure is None:
        return NONE
    places = 4 if name in ("ratio", "kl") else 2
    error = "" if figure.stderr is None or name == "perplexity" else f" ± {figure.stderr:.{places}f}"
    return f"{figure.value:.{places}f}{error}"


def _headline(rows: Sequence[Row], found: Sequence[Choice]) -> list[tuple[str, str, str]]:
    full, shown = rows[0], []
    if full.nbytes and "perplexity" in full.figures:
        perplexity = full.figures["perplexity"].value
        shown.append(("full cache", f"{full.nbytes / _MIB:.3g} MiB", f"{full.kv_dtype}, perplexity {perplexity:.4g}"))
    for each in found:
        if "ratio" in each.row.figures:
            first, _, error = figure_words(each.row, "ratio").partition(" ")
            known = f"of perplexity, {error}" if error else "of perplexity"
            shown.append((f"{title(each.row)}, {each.size}", first, known))
    return shown


def _command(choice: Choice, model: str) -> str:
    cell, size = choice.row.cell, ["--max-kv-size", str(choice.row.cell.max_kv_size)]
    if cell.kv_memory:
        whole = f"{cell.kv_memory / _MIB}MiB".replace(".0MiB", "MiB")
        size = ["--kv-memory", whole if cell.kv_memory % 1024 == 0 else str(cell.kv_memory)]
    dtype = ["--kv-dtype", cell.kv_dtype] if cell.kv_dtype else []
    return shlex.join(["edge", "run", model, "--kv-policy", cell.policy, *dtype, *size])


def _panel(name: str, rows: Sequence[Row]) -> Chart | None:
    """A chart with a line for each policy and dtype, best first, and a mark for each size."""
    points = [(row, row.figures[name]) for row in rows if row.cell.size and name in row.figures]
    points = [(row, figure) for row, figure in points if name != "ratio" or figure.value <= _HIGHEST]
    if not points:
        return None
    sizes, lines = list(dict.fromkeys(row.cell.size for row, _ in points)), _ranked(rows)
    full = (rows[0].figures.get(name) or points[0][1]).value
    spans = [(figure.value - (figure.stderr or 0), figure.value + (figure.stderr or 0)) for _, figure in points]
    low, high = min(full, *(each for each, _ in spans)), max(full, *(each for _, each in spans))
    if name == "repeat":
        x = Axis(0.9 * max(low, 1.0), 1.1 * min(high, 1e300), "← better", log=True)
    else:
        room = 0.04 * (high - low) or 0.01
        x = Axis(low - room, high + room, "← better") if name == "ratio" else Axis(0, 1, "better →")
    height = 24 + 7 * len(sizes)  # pixels of a line: its name, and the marks below
    chart = Chart(_PANELS[name], _PANELS[name], x, Axis(len(lines), 0, ticks=()), height * len(lines))
    for top, line in enumerate(lines):
        chart.across(top, "var(--line)")
        chart.word(x.low, top, line, dx=2, dy=15)
        chart.line([(full, top + 17 / height), (full, top + 1)], INK, width=1.2)
    for (row, figure), (least, most) in zip(points, spans, strict=True):
        size = sizes.index(row.cell.size)
        y = lines.index(title(row)) + (23 + 7 * size) / height
        chart.line([(max(least, x.low), y), (min(most, x.high), y)], colour(size), width=1.6)
        said = f"{title(row)}, {row.cell.size}: {figure.value:.4g}"
        chart.mark(figure.value, y, colour(size), _SHAPES[size % 4], said)
    for number, each in enumerate(sizes):
        chart.key(each, colour(number), _SHAPES[number % 4])
    return chart


def _ranked(rows: Sequence[Row]) -> list[str]:
    """The drawn policies and dtypes, least loss first."""
    shown = [row for row in rows if row.cell.size and row.figures]
    shown.sort(key=lambda row: row.figures["ratio"].value if "ratio" in row.figures else 0.0)
    return list(dict.fromkeys(map(title, shown)))
