"""The documentation and pyproject.toml hold: the reference of the commands is current, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edge.cli.commands import app
from edge.flags import flags_of
from edge.sampling import SamplingParams

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_reference_of_commands_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "cli.py"))
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == generator["page"](typer.main.get_command(app)), "run: python docs/cli.py"
    for module, text in generator["keywords"]().items():
        assert module.read_text(encoding="utf-8") == text, "run: python docs/cli.py"


def test_row_of_set_names_its_options() -> None:
    page = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `/set .*", page, re.MULTILINE)
    assert {f"`{flag.name[2:]}`" for name, flag in flags_of(SamplingParams).items() if name != "logit_bias"} <= {
        *re.findall(r"`[a-z-]+`", row)
    }


def project() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def test_wheel_has_every_package() -> None:
    listed = project()["tool"]["setuptools"]
    folders = {package: Path(name) for package, name in listed["package-dir"].items()} | {"edge": Path("edge")}
    found = {
        ".".join((package, *source.parent.relative_to(ROOT / folder).parts))
        for package, folder in folders.items()
        for source in (ROOT / folder).rglob("*.py")
    }
    assert found == set(listed["packages"])


def test_readme_names_every_extra() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    (listed,) = re.findall(r"Extras: (.*?)\.\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", listed)) == extras


def test_table_of_engines_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "engines.py"))
    written = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert written == generator["page"](), "run: python docs/engines.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_file_and_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not heading or heading in _anchors(linked), target


def test_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([a-z-]+\.md)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def _prose(page: Path) -> str:
    """Without blocks and spans of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
