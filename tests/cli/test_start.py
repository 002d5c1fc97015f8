"""The start of a command: the modules that it does without, and values that it takes without validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edge.cli.application import application
from edge.cli.terminal.values import spared

MODEL = Path(__file__).parents[1] / "golden" / "llama-one-layer.gguf"

# Each takes 10 to 100 ms to import, or some MiB of every budget.
HEAVY = (
    "pydantic", "rich", "gguf", "onnx", "onnxruntime", "tvm", "tvm_ffi", "llama_cpp", "llguidance", "starlette",
    "uvicorn", "psutil", "asyncio", "http.client", "edge.server", "edge.converters", "edge.exporting", "edge.quality",
    "edge.tuning", "edge.profiling", "edge.cli.chat", "edge.cli.making", "edge.cli.measuring", "edge.cli.serve",
)  # fmt: skip

RUN = f"""
import sys
sys.argv[:] = ["edge", "run", sys.argv[1], "Hi", "-n", "1", "--raw", "-q"]
from edge.cli import run_command

code = run_command()
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def test_a_run_imports_nothing_that_it_does_not_need() -> None:
    command = [sys.executable, "-c", RUN, str(MODEL)]
    subprocess.run(command, capture_output=True, check=True)  # a first run compiles
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("value", [None, "", "text", "12", "007", "-1", "1.5", "²", "9" * 30, True, 3, 2.5, ["a"], []])
@pytest.mark.parametrize("command", ["run", "bench", "embed", "inspect", "export"])
def test_spared_values_are_as_typer_validates_them(command: str, value: Any) -> None:
    """typer's own validation of the same value is the oracle."""
    root: Any = typer.main.get_command(application([command]))
    built: Any = root.commands[command]
    context = typer.Context(built)

    def taken(process: Any) -> Any:
        try:
            found = process(context, value)
        except Exception as error:
            return type(error), str(error)
        return type(found), found

    for param in built.params:
        assert taken(spared(param).process_value) == taken(type(param).process_value.__get__(param)), param.name
