"""The base install and llama.cpp's engine as on Windows and macOS (`elsewhere.py`): without what these systems lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import GOLDEN
from elsewhere import COMPUTERS, MISSING, environment
from test_chat_terminal import PROMPT, chatting
from test_cli import json_here as edge_json

pytest.importorskip("llama_cpp")

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
LLAMACPP = ("-n", "6", "--temp", "0", "--ignore-eos", "--backend", "llamacpp", "--max-kv-size", "64")
# But for what is the model of a package that only an extra brings.
ALL = """
import importlib, pkgutil
import edge
for each in pkgutil.walk_packages(edge.__path__, "edge.", onerror=print):
    if not each.name.endswith(("__main__", "quality.harness")):
        importlib.import_module(each.name)
from edge.devices import host, load
assert not [name for name in {missing!r} if hasattr(host.os, name)]
print(load.read_load(), end="")
"""

systems = pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.exhaustive)])


def python(system: str, folder: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], input=stdin, capture_output=True, text=True, timeout=240, encoding="utf-8",
        env=environment(system, folder),
    )  # fmt: skip


def shown(system: str, folder: Path, *args: str, stdin: str = "") -> Any:
    done = python(system, folder, "-m", "edge", *args, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@systems
def test_every_module_is_imported(system: str, tmp_path: Path) -> None:
    """A module whose packages are missing names them when it is used, not when it is imported."""
    done = python(system, tmp_path, "-c", ALL.format(missing=MISSING[system]["os"].split()))
    assert (done.returncode, done.stdout) == (0, "None"), done.stderr  # nothing of /proc


@systems
def test_answers_match_those_of_linux(system: str, tmp_path: Path) -> None:
    """The prompt comes through a pipe, and the template runs in a child."""
    found = shown(system, tmp_path, "run", MODEL, *LLAMACPP, stdin="Hello")
    here = edge_json("run", MODEL, *LLAMACPP, "--json", stdin="Hello")
    assert found["text"] == here["text"]
    assert found["memory"]["peak_rss"] > 10 << 20
    assert found["memory"]["anonymous"] is None


@systems
def test_native_engine_is_refused_and_replaced(system: str, tmp_path: Path) -> None:
    done = python(system, tmp_path, "-m", "edge", "run", MODEL, "-p", "Hello", "-n", "2", "--backend", "cpu")
    computer = "{} ({})".format(*COMPUTERS[system])
    said = f"edge: the cpu engine does not run on {computer} yet: use --backend llamacpp\n"
    assert (done.returncode, done.stderr) == (2, said)
    found = shown(system, tmp_path, "plan", MODEL)
    assert found["backend"] == "llamacpp"
    models = {each["name"]: each for each in shown(system, tmp_path, "models")["models"]}
    assert "cpu" not in models["smollm2-135m"]["summary"]["engines"]


@systems
def test_server_answers_elsewhere(system: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "edge", "serve", MODEL, "--port", "0", "--json", "-q", "--backend", "llamacpp",
        "--max-kv-size", "128",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(system, tmp_path)) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
            assert 1 <= answer["usage"]["completion_tokens"] <= 2
        finally:
            process.kill()


def test_chat_works_without_readline() -> None:
    """Without readline and termios, which Windows lacks."""
    code = f"sys.path.append({str(Path(__file__).parent)!r}); import elsewhere; elsewhere.install('win32')"
    with chatting("-n", "4", "-q", code=code) as screen:
        screen.type("Hello\r")
        screen.expect(PROMPT)
        screen.type("\x04")
        assert screen.status() == os.EX_OK
