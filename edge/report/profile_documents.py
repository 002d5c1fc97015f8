"""Reports of profiles as files: which kinds there are, and who writes them."""

from __future__ import annotations

import json
from pathlib import Path

from edge.errors import InputError
from edge.profiling.profile import Profile
from edge.quality.lines import check_writable

KINDS = (".html", ".md", ".json")


def check_place(path: Path) -> None:
    """Raises InputError for names of other kinds, and where no such file can be written."""
    if path.suffix not in KINDS:
        raise InputError(f"{path}: what kind of report? Let its name end in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    check_writable(path)


def check_kind(path: Path) -> None:
    """As `check_place`; raises MissingExtraError where nothing draws the pictures."""
    check_place(path)
    if path.suffix == ".html":
        from edge.report.svg import check_plot

        check_plot()


def document(profile: Profile, kind: str) -> str:
    """The report as the text of a file of this kind, see `KINDS`."""
    if kind == ".json":
        return json.dumps(profile.to_dict(), ensure_ascii=False, allow_nan=False) + "\n"
    if kind == ".html":
        from edge.report.profile_page import html

        return html(profile)
    from edge.report.profile_text import markdown

    return markdown(profile)
