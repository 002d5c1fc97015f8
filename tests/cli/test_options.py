"""Options are defined once: each reaches the flags, the variables of the environment, the keywords and the docs. What
commands say of themselves, and arguments of `edge run` that are read without typer, which is the oracle."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import edge
import edge.cli.answering
import edge.cli.run
from edge.cli import options as o
from edge.cli.application import application
from edge.cli.commands import app
from edge.cli.groups import AnswerOptions, Output, PromptOptions
from edge.cli.plain import read_plainly, run_plainly
from edge.cli.terminal.help import environment_page, fitting, options_of
from edge.errors import EdgeError, InputError
from edge.flags import GROUPS, flags_of
from edge.lab.prediction.forecast import forecast
from edge.options import Options
from edge.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
COMMAND: Any = typer.main.get_command(app)
OPTIONS = list(options_of(COMMAND))
FLAGS = {(path, name): param for path, param in OPTIONS for name in param.opts}
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


# What the commands say of themselves


def edge_help(*topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    COMMAND.main([*topic], prog_name="edge", standalone_mode=False)
    return capsys.readouterr().out


def test_variable_means_same_in_every_command() -> None:
    meanings = defaultdict(set)
    for _, option in OPTIONS:
        if option.envvar:
            meanings[option.envvar].add((tuple(option.opts), _type(option), option.help, option.multiple))
    assert {"EDGE_MEMORY", "EDGE_KV_POLICY", "EDGE_JSON", "EDGE_VERBOSE"} <= set(meanings)
    for name, found in meanings.items():
        assert len(found) == 1, name
        ((flags, *_),) = found
        assert f"--{name.removeprefix('EDGE_').lower().replace('_', '-')}" in flags


def test_variable_of_one_command_does_not_reach_another() -> None:
    """One that shares its name, and not its meaning, has none."""
    twins = {(path, option.opts[-1]) for path, option in OPTIONS if option.envvar}
    assert ("edge run", "--energy") in twins
    for other in (("edge bench", "--energy"), ("edge tune", "--time"), ("edge convert", "--force"),
                  ("edge eval kv", "--kv-memory"), ("edge profile of", "--backend")):  # fmt: skip
        assert other not in twins


def test_page_of_variables_is_whole_and_documented() -> None:
    page = environment_page(COMMAND)
    assert page in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    ours = [path for folder in ("edge", "backends", "converters", "devices") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in ours for name in re.findall(r"\bEDGE_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    headers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "edge" / "apps" / "runtime").rglob("*.h"))
    assert read - set(re.findall(r"\bEDGE_[A-Z_]+", page + headers)) == set()  # names of C are no variables


def test_help_has_groups_and_examples_and_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    said = edge_help("run", "--help", capsys=capsys)
    titles = re.findall(r"^(\w[\w ]*):$", said, re.MULTILINE)
    assert titles == ["Arguments", "Prompt", "Budgets", "KV cache", "Sampling", "Engine", "Output"]
    assert len(re.findall(r"^ +(?:git diff \| )?edge run \S+ ", said, re.MULTILINE)) == 4
    assert "EDGE_" not in said
    assert edge_help("help", "run", capsys=capsys) == said
    assert "EDGE_MEMORY" in edge_help("help", "environment", capsys=capsys)
    assert "perplexity" in edge_help("help", "eval", capsys=capsys)
    assert "\n    edge pull qwen3:0.6b\n" in edge_help("pull", "--help", capsys=capsys)


def test_commands_advise_options_they_have() -> None:
    said, advice = "the cpu engine has no kernels for IQ1_S yet", ": use --backend llamacpp"
    for line, kept in (("run m.gguf", True), ("eval kl m.gguf", True), ("compile m.gguf", False), ("tune m", False)):
        assert fitting(said + advice, line.split(), COMMAND) == said + advice * kept


def test_options_that_messages_name_exist() -> None:
    known = {name for _, option in OPTIONS for name in option.opts} | {"--help", "--no-deps", "--local-dir"}
    named = set()
    for folder in ("edge", "backends", "converters", "devices"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            for text in _messages(ast.parse(source)) if "--" in source else ():
                named |= {(option, path.name) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}
    assert len(named) > 40
    assert {each for each in named if each[0] not in known} == set()


def _messages(tree: ast.AST) -> Iterator[str]:
    """Texts of errors, and of what is noted or printed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"Error$|^(note|print|warning)$", _called(node)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def _type(option: Any) -> str:
    """The type of an option, as this version of typer keeps it."""
    described = getattr(option, "type_descriptor", None)
    return str(option.type if described is None else described.annotation)


# Arguments that are read without typer


NAMES = [
    name
    for group in (PromptOptions, AnswerOptions, Options, SamplingParams, Output)
    for flag in flags_of(group).values()
    for name in flag.names
]
VALUES = [
    "", "-", "--", "-5", "5", "007", "0.7", ".5", "5.", ".", "1e3", "1_000", "²", "9" * 15, "9" * 16, "true", "256MiB",
    "20s", "off", "auto", "a.gguf", "a=b", "=", " ", "[", "2,3", "~", "*", "é",
]  # fmt: skip
words = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.sampled_from(VALUES)),
    st.sampled_from(["-n1", "-qv", "--no-json", "--no-raw", "-h", "--help", "--kv", "--sequences", "--nothing"]),
)
pairs = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=3)


TYPER: Any = typer.main.get_command(application(["run"]))


@contextmanager
def without_variables() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("EDGE_")]:
            patch.delenv(name)
        yield patch


def heard(work: Callable[[list[str]], object], arguments: list[str]) -> Any:
    """What the work of the command was called with, or the error."""
    seen: list[Any] = []
    with without_variables() as patch:
        for home in (edge.cli.answering, edge.cli.run):
            patch.setattr(home, "answer_prompt", lambda *values: seen.append(values))
        try:
            work(arguments)
        except EdgeError as error:
            return str(error)
    return seen


def by_us(arguments: list[str]) -> None:
    run_plainly(read_plainly(arguments))


def by_typer(arguments: list[str]) -> None:
    TYPER(["run", *arguments], standalone_mode=False)


def is_plain(arguments: list[str]) -> bool:
    with without_variables():
        return read_plainly(arguments) is not None


@pytest.mark.skipif(os.name == "nt", reason="there typer reads all arguments")
@given(st.lists(words, max_size=5), pairs, st.lists(words, max_size=2))
@settings(max_examples=examples(60), deadline=None)
def test_plain_arguments_are_read_as_typer_reads_them(
    before: list[str], pairs: list[tuple[str, str]], rest: list[str]
) -> None:
    stated = [word for pair in pairs for word in pair]
    for arguments in (["model", *before], [*stated, "model", *rest], ["model", *stated]):
        if is_plain(arguments):
            assert heard(by_us, arguments) == heard(by_typer, arguments), arguments


COMMON: list[list[str]] = [
    ["smollm2-135m", "Why is the sky blue?", "--memory", "256MiB"],
    ["m", "-p", "Describe this change.", "-n", "100", "-q"],
    ["m", "-f", "letter.txt", "--energy=30J", "--time", "1m", "--json"],
    ["m", "Hi", "--temp", "0.7", "--top-k", "5", "--stop", "a", "--stop", "b", "--json-schema", "person.json"],
    ["m", "Hi", "--prompt-cache", "cache", "--threads", "2", "-v", "--raw"],
]


@pytest.mark.skipif(os.name == "nt", reason="there typer reads all arguments")
@pytest.mark.parametrize("arguments", COMMON)
def test_common_arguments_are_plain(arguments: list[str]) -> None:
    assert is_plain(arguments)
    found = heard(by_us, arguments)
    assert found == heard(by_typer, arguments)
    assert len(found) == 1


def test_variable_of_environment_leaves_all_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_MEMORY", "256MiB")
    assert read_plainly(["m", "Hi"]) is None
