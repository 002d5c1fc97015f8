"""What the commands say of themselves: groups of options, variables of the environment, options named in messages."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edge.cli.commands import app
from edge.cli.help import environment_page, options_of

ROOT = Path(__file__).parent.parent
COMMAND: Any = typer.main.get_command(app)
OPTIONS = list(options_of(COMMAND))


def edge_help(*topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    COMMAND.main([*topic], prog_name="edge", standalone_mode=False)
    return capsys.readouterr().out


def test_a_variable_means_the_same_in_every_command() -> None:
    meanings = defaultdict(set)
    for _, option in OPTIONS:
        if option.envvar:
            meanings[option.envvar].add((tuple(option.opts), _type(option), option.help, option.multiple))
    assert {"EDGE_MEMORY", "EDGE_KV_POLICY", "EDGE_JSON", "EDGE_VERBOSE"} <= set(meanings)
    for name, found in meanings.items():
        assert len(found) == 1, name
        ((flags, *_),) = found
        assert f"--{name.removeprefix('EDGE_').lower().replace('_', '-')}" in flags


def test_a_variable_of_one_command_does_not_reach_another() -> None:
    """One that shares its name, and not its meaning, has none."""
    twins = {(path, option.opts[-1]) for path, option in OPTIONS if option.envvar}
    assert ("edge run", "--energy") in twins
    for other in (("edge bench", "--energy"), ("edge tune", "--time"), ("edge convert", "--force"),
                  ("edge eval kv", "--kv-memory"), ("edge profile of", "--backend")):  # fmt: skip
        assert other not in twins


def test_the_page_of_variables_is_whole_and_documented() -> None:
    page = environment_page(COMMAND)
    assert page in (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    ours = [path for folder in ("edge", "backends", "converters", "devices") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in ours for name in re.findall(r"\bEDGE_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    assert {name for name in read if name not in page} == set()


def test_help_has_groups_and_examples_and_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    said = edge_help("run", "--help", capsys=capsys)
    titles = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert titles == ["Arguments", "Prompt", "Budgets", "KV cache", "Sampling", "Engine", "Output"]
    assert len(re.findall(r"^ +(?:git diff \| )?edge run \S+ ", said, re.MULTILINE)) == 3
    assert "EDGE_" not in said
    assert edge_help("help", "run", capsys=capsys) == said
    assert "EDGE_MEMORY" in edge_help("help", "environment", capsys=capsys)
    assert "perplexity" in edge_help("help", "eval", capsys=capsys)


def _type(option: Any) -> str:
    """As this version of typer keeps it."""
    described = getattr(option, "type_descriptor", None)
    return str(option.type if described is None else described.annotation)
