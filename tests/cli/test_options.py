"""Options are defined once: each reaches the flags, the variables of the environment, the keywords and the docs."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer.main

import edge
from edge.cli import options as o
from edge.cli.commands import app
from edge.cli.terminal.help import options_of
from edge.errors import InputError
from edge.flags import GROUPS, flags_of, option
from edge.lab.prediction.forecast import forecast
from edge.options import Options
from edge.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
COMMAND: Any = typer.main.get_command(app)
FLAGS = {(path, name): param for path, param in options_of(COMMAND) for name in param.opts}
DEFINED = {**flags_of(Options), **flags_of(SamplingParams), **flags_of(o.AnswerOptions)}
OF_PYTHON = {"expected_tokens", "expected_prompt", "logits_rows", "loras"}  # which only programs know


def test_every_field_is_option() -> None:
    for kind in (Options, SamplingParams, o.AnswerOptions):
        assert [each.name for each in fields(kind)] == list(flags_of(kind))
    assert {name for name, flag in DEFINED.items() if not flag.names} == OF_PYTHON


@pytest.mark.parametrize("name", sorted(set(DEFINED) - OF_PYTHON))
def test_option_reaches_command_line_and_environment(name: str) -> None:
    defined = DEFINED[name]
    assert defined.group in GROUPS
    shown = FLAGS["edge plan" if name == "sequences" else "edge run", defined.name]  # a run has one
    assert (shown.help, shown.envvar, shown.default) == (defined.help, defined.variable, defined.default)
    assert set(shown.opts) == set(defined.names)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {defined.variable} +\| {defined.name} +\|$", page, re.MULTILINE)
    assert (row is not None) == defined.twin


@pytest.mark.parametrize("function", [edge.load, forecast])
@pytest.mark.parametrize("name", list(flags_of(Options)))
def test_option_is_keyword_with_its_documentation(function: Any, name: str) -> None:
    defined, keyword = flags_of(Options)[name], inspect.signature(function).parameters[name]
    assert (keyword.kind, keyword.default) == (inspect.Parameter.KEYWORD_ONLY, defined.default)
    assert f"{name}: {defined.help}" in " ".join(function.__doc__.split())


def test_options_mean_the_same_in_every_command() -> None:
    for (path, name), param in FLAGS.items():
        twins = [each for each in DEFINED.values() if name in each.names and each.variable == param.envvar is not None]
        for defined in twins:
            assert param.help == defined.help, (path, name)


@dataclass(frozen=True)
class Paint:
    """A group with one more option than `Options` had when this was written."""

    colour: str = option("red", "--colour", group="Engine", help="Of the front door.")
    coats: int | None = option(None, "-c", "--coats", group="Engine", typed=str, parse=int, help="Of paint.")

    @classmethod
    def parse(cls, **values: Any) -> Paint:
        return cls(**{name: int(value) if name == "coats" and value else value for name, value in values.items()})


def test_new_field_is_flag_with_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def paint(house: str, paint: Annotated[Paint, o.without(colour="blue")], *, json: o.Json = False) -> None:
        made.append((house, paint, json))

    house = typer.Typer()
    house.command()(o.command(paint))
    command: Any = typer.main.get_command(house)
    command.main(["mine", "-c", "2", "--json"], standalone_mode=False)
    monkeypatch.setenv("EDGE_COLOUR", "green")
    command.main(["mine"], standalone_mode=False)
    assert made == [("mine", Paint("blue", 2), True), ("mine", Paint("green", None), False)]


def test_command_may_have_some_of_group() -> None:
    assert list(o.only("threads", "memory").parameters(Options)) == ["memory", "threads"]
    assert "keep" not in o.without("keep").parameters(Options)
    assert o.only("kv_policy", kv_policy="full").parameters(Options)["kv_policy"].default == "full"


def test_options_are_parsed_once() -> None:
    options = Options.parse(memory="256MiB", time="1.5m", energy="0.5Wh", power="800mW", max_temp="7C", kv_memory="1kB")
    assert (options.memory, options.time, options.energy) == (256 << 20, 90.0, 1800.0)
    assert (options.power, options.max_temp, options.kv_memory) == (0.8, 7.0, 1000)
    assert options.prompt_cache_size == Options().prompt_cache_size == 1 << 30
    assert Options(memory="256MiB") == Options(memory=256 << 20)  # type: ignore[arg-type]
    assert options.updated(memory=None, threads=2) == replace(options, memory=None, threads=2)
    with pytest.raises(InputError, match=r"unknown option 'kv_polity': did you mean kv_policy\?"):
        Options.parse(kv_polity="full")
    with pytest.raises(InputError, match="--kv-memory 'lots' is not understood"):
        Options.parse(kv_memory="lots")
    assert Options.of(None, threads=2) == Options(threads=2)
    assert Options.of(Options(threads=2), memory="1kB") == Options(threads=2, memory=1000)
    for wrong in (3, "256MiB", {"memory": 1}):
        with pytest.raises(InputError, match=r"options must be edge\.Options, not "):
            Options.of(wrong)  # type: ignore[arg-type]
