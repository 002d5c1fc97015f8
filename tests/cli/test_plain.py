"""Arguments of `edge run` that are read without typer: typer is the oracle."""

from __future__ import annotations

import os
from typing import Any

import pytest
import typer.main
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import edge.cli.answering
import edge.cli.run
from edge.cli.application import application
from edge.cli.groups import AnswerOptions, Output, PromptOptions
from edge.cli.plain import read_plainly, run_plainly
from edge.errors import EdgeError
from edge.flags import flags_of
from edge.options import Options
from edge.sampling import SamplingParams

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


def by_typer(arguments: list[str]) -> Any:
    TYPER(["run", *arguments], standalone_mode=False)


def by_us(arguments: list[str]) -> Any:
    known = read_plainly(arguments)
    run_plainly(known)


def heard(work: Any, arguments: list[str]) -> Any:
    """What the work of the command was called with, or the error."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("EDGE_")]:
            patch.delenv(name)
        for home in (edge.cli.answering, edge.cli.run):
            patch.setattr(home, "answer_prompt", lambda *values: seen.append(values))
        try:
            work(arguments)
        except EdgeError as error:
            return str(error)
    return seen


def is_plain(arguments: list[str]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("EDGE_")]:
            patch.delenv(name)
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
