"""What the commands say of themselves: groups of options, variables of the environment, options named in messages."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from small_models import Small, write_small
from test_cli import edge_here as edge

from edge.cli.commands import app
from edge.cli.terminal.help import environment_page, fitting, options_of

ROOT = Path(__file__).parents[2]
COMMAND: Any = typer.main.get_command(app)
OPTIONS = list(options_of(COMMAND))


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


def test_groups_of_commands_show_something_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in (("cache", "of at most"), ("eval", "perplexity"), ("devices", "instruction sets")):
        assert said in edge_help(path, capsys=capsys)


@pytest.mark.parametrize(("arguments", "kept"), [
    (["run", "m.gguf", "-p", "x"], True), (["eval", "kl", "m.gguf"], True), (["profile", "m.gguf"], True),
    (["compile", "m.gguf", "-o", "run"], False), (["convert", "m.gguf", "m", "--to", "onnx"], False),
    (["tune", "m.gguf"], False),
])  # fmt: skip
def test_commands_advise_options_they_have(arguments: list[str], kept: bool) -> None:
    said = "the cpu engine has no kernels for IQ1_S (blk.0.attn_q) yet"
    assert fitting(f"{said}: use --backend llamacpp", arguments, COMMAND) == said + ": use --backend llamacpp" * kept


def test_errors_of_commands_have_no_advice_on_help(tmp_path: Path) -> None:
    model = write_small(tmp_path / "m.gguf", Small(architecture="xverse"))
    done = edge("compile", str(model), "--device", "raspberry-pi-5", "-o", str(tmp_path / "pi"))
    assert (done.returncode, done.stderr) == (2, "edge: xverse models run on llama.cpp only\n")


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
