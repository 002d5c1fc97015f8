"""stdin, stdout and stderr that are closed, full, left by their reader, or in another encoding; arguments that are no
text; interrupts before there is anything to interrupt."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import load_engine
from fork_server import COMMAND, forking
from surroundings import SILENT_S

from edge.cli.terminal.prompts import read_prompt
from edge.cli.terminal.show import ProgressLine
from edge.converters.onnx.writer import write_onnx
from edge.devices.output import write_whole
from edge.errors import InputError
from edge.model.model import open_model

GOLDEN = Path(__file__).parents[1] / "golden" / "llama-gqa-tied.gguf"
RUN = f"run {GOLDEN} --backend reference -n 4 --ignore-eos"


def shell(line: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """What a shell makes of a line, in which `edge` stands for the command, and `start` for it in a new Python."""
    commands = {"edge": forking(COMMAND, "edge"), "start": [sys.executable, "-m", "edge"]}
    functions = [f'{name}() {{ {shlex.join(command)} "$@"; }}' for name, command in commands.items()]
    line = "\n".join([*functions, line])
    return subprocess.run(
        ["bash", "-c", line], input=stdin, capture_output=True, timeout=240, env=os.environ | environment
    )


def one_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """What stderr says, which is no more than that."""
    (line,) = done.stderr.decode().splitlines()
    return line


@pytest.fixture(scope="module")
def answer() -> bytes:
    done = shell(f"edge {RUN} -q -p x")
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.parametrize(
    "command", ["start --version", "edge --help", f"edge inspect {GOLDEN} --json", f"edge {RUN} -p x"]
)
def test_unwritable_output_is_an_error(command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert (done.returncode, one_line(done)) == (74, "edge: stdout cannot be written (No space left on device)")


def test_closed_stdout_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    done = shell(f"start convert {GOLDEN} {target} --type q8_0 >&- 2>&-")
    assert done.returncode == 74
    assert b"cannot be written" not in target.read_bytes()
    assert open_model(target).spec.weight_type == "Q8_0"
    assert one_line(shell("start --version >&-")) == "edge: stdout cannot be written (Bad file descriptor)"


def test_broken_pipe_sets_exit_code_alone() -> None:
    more = "-n 1000000 --max-kv-size 64 --kv-policy streaming"  # than a pipe takes, though its reader may leave late
    done = shell(f"edge {RUN} -q -p x {more} | head -c 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, len(done.stdout), done.stderr) == (141, 1, b"")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-m", "edge", "--help"], stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_nonblocking_pipe_gets_everything() -> None:
    code = (
        "import os, sys; os.set_blocking(1, False); from edge.cli.terminal.streams import open_streams; open_streams()"
    )
    command = [sys.executable, "-c", f"{code}; print('x' * (1 << 20))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout
        first, rest = child.stdout.read(1), child.stdout.read()
        assert child.wait(timeout=240) == 0
    assert first + rest == b"x" * (1 << 20) + b"\n"


def test_characters_that_cannot_be_shown_are_replaced(answer: bytes) -> None:
    assert "�" in answer.decode()  # a random model's
    done = shell(f"start {RUN} -p x", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, answer.decode().encode("ascii", "replace"))
    assert b"Traceback" not in done.stderr
    assert b"tok/s \\xb7 first" in done.stderr


@pytest.mark.parametrize(("command", "environment", "kind", "code"), [
    ("run nope.gguf -p x --json", {}, "InputError", 2), ("run --json", {}, "UsageError", 2),
    ("cache nope", {"EDGE_JSON": "1"}, "UsageError", 2), (f"plan {GOLDEN} --memory 20MiB --json", {}, "BudgetError", 3),
])  # fmt: skip
def test_errors_are_json_where_answers_are(command: str, environment: dict[str, str], kind: str, code: int) -> None:
    done = shell(f"edge {command}", **environment)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"], error["type"]) == (code, code, kind)
    assert one_line(done) == f"edge: {error['message']}"
    assert (kind == "BudgetError") == (error.get("smallest", 0) > 20 << 20)


def test_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    model = os.fsencode(tmp_path) + b"/\xff.gguf"
    os.symlink(GOLDEN, model)
    line = f"printf '%b' 'a\\0377b' | edge {RUN} -q && edge {RUN} -q -p $'a\\xffb' --stop $'zz\\xff'"
    done = shell(line.replace(str(GOLDEN), f"{tmp_path}/$'\\xff'.gguf"))
    assert (done.returncode, done.stderr) == (0, b"")
    by_stdin, by_argument = done.stdout.splitlines()
    assert by_stdin == by_argument
    assert "no such model file: �.gguf" in one_line(shell("edge run -p x $'\\xff.gguf'"))


def test_file_names_never_break_an_error_line() -> None:
    done = shell("edge inspect $'a\\nb\\e[31m.gguf' --json")
    assert "a�b�[31m.gguf" in one_line(done)
    assert "a�b�[31m.gguf" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.skipif(find_spec("onnxruntime") is None or find_spec("onnx") is None, reason="needs the extra onnx")
def test_names_that_are_no_text_are_read_or_refused(tmp_path: Path) -> None:
    report = tmp_path / "\udcff.md"
    write_whole(report, f"of {report.name}")
    assert report.read_text(encoding="utf-8") == "of ?.md"
    model = open_model(GOLDEN)
    write_onnx(model.file, model.spec, tmp_path / "model")
    with pytest.raises(InputError, match="rename"):
        write_onnx(model.file, model.spec, tmp_path / "\udcff")
    os.rename(tmp_path / "model", tmp_path / "\udcff")
    moved = open_model(tmp_path / "\udcff")
    with pytest.raises(InputError, match="rename"):
        load_engine(moved, "onnx", "f32")


def test_prompt_that_is_never_read_holds_no_file(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("Some text.")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read_prompt(["Why?"], text)  # a run that is refused
        assert found == []
    assert "".join(read_prompt(["Why?"], text)) == "Some text.\n\nWhy?"


def test_closed_stdin_is_empty_one() -> None:
    assert "no prompt" in one_line(shell(f"start {RUN} <&-"))
    assert shell(f"start chat {GOLDEN} --backend reference <&-").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("module", "prompt"), [("typer", ["-px"]), ("numpy", ["-p", "x"])])  # -px is typer's to read
def test_interrupt_of_start_is_quiet(module: str, prompt: list[str], number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(f"import os, time\nos.kill(os.getpid(), {number})\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, "-m", "edge", *RUN.split(), *prompt],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not ignored, as in a script's background
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"")


@pytest.mark.parametrize("left", [
    "", pytest.param("; del session", marks=pytest.mark.exhaustive),
    "; threading.Thread(target=list, args=[stream], daemon=True).start()",
])  # fmt: skip
def test_open_stream_closes_quietly_at_exit(left: str) -> None:
    code = f"""
import threading, edge
session = edge.load({str(GOLDEN)!r}, backend="reference")
stream = session.stream("x", max_tokens=None, ignore_eos=True)
print(next(stream)){left}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


def test_long_steps_leave_lines_in_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0]
    monkeypatch.setattr("edge.cli.terminal.show.monotonic", lambda: now[0])
    monkeypatch.setattr("edge.cli.terminal.show.SILENT_S", SILENT_S)
    update = ProgressLine(enabled=True).step("planning models")
    for now[0] in range(0, 60, 10):
        update(now[0], 60)
    assert capsys.readouterr().err == "planning models: 33%\nplanning models: 67%\n"
