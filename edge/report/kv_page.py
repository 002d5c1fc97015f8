"""The quality of KV settings as a document: Markdown, or one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from edge.report.kv import Row, cells_of, notes_of, reasons_of
from edge.report.kv_plot import plot_svg
from edge.report.table import table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
tbody tr:first-child { background: #f4f4f4 }
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto }
p, li { max-width: 60rem }
"""


def markdown(rows: Sequence[Row], settings: dict[str, Any], *, complete: bool) -> str:
    """A table, why figures are missing, and what they mean."""
    headings, lines = cells_of(rows)
    parts = [f"# {_title(settings)}", table(headings, lines, left=2)]
    parts += ["" if complete else _INCOMPLETE]
    parts += ["\n".join(f"- {_marked(reason)}" for reason in reasons_of(rows))]
    parts += ["\n".join(f"- {note}" for note in [*notes_of(rows, settings), _circumstances(settings)])]
    return "\n\n".join(part for part in parts if part) + "\n"


def html(rows: Sequence[Row], settings: dict[str, Any], *, complete: bool) -> str:
    """The same with a plot; style and picture are inside. Raises MissingExtraError without matplotlib."""
    headings, lines = cells_of(rows)
    title = escape(_title(settings))
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in line) + "</tr>" for line in lines)
    reasons = _list(reasons_of(rows))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
{"" if complete else f"<p><strong>{_INCOMPLETE}</strong></p>"}
{plot_svg(rows)}
<div class="wide"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>
{"<h2>Not measured</h2>" + reasons if reasons else ""}
<h2>What the figures are</h2>
{_list([*notes_of(rows, settings), _circumstances(settings)])}
</body>
</html>
"""


_INCOMPLETE = "This run was interrupted: some cells are missing."


def _title(settings: dict[str, Any]) -> str:
    return f"KV cache quality: {settings['model']}"


def _circumstances(settings: dict[str, Any]) -> str:
    """What one has to know to measure the same again."""
    documents = ", ".join(f"{each['name']} ({each['tokens']:,} tokens)" for each in settings["documents"])
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return f"texts: {documents}; seed {settings['seed']}; engine {settings['backend']}; {versions}"


def _list(lines: Sequence[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>" if lines else ""


def _marked(text: str) -> str:
    return " ".join(text.split())
