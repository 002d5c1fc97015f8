"""stdin, stdout and stderr that are closed, full, left by their reader, or in another encoding; arguments that are no
text; Ctrl-C and SIGTERM before there is anything to interrupt, and in functions that C code calls, where Python would
lose them."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import load_engine, open_golden
from fork_server import COMMAND, forking
from surroundings import SILENT_S
from test_cli import edge_here

from edge.backends.interrupts import interrupts_wait
from edge.backends.llamacpp.library import is_installed, library
from edge.backends.reference.engine import ReferenceEngine
from edge.cli.terminal import signals
from edge.cli.terminal.show import ProgressLine
from edge.cli.terminal.signals import Terminated, ended_by_signals
from edge.converters.gguf.ggml import quantize_file
from edge.model.model import open_model
from edge.run.budgets.meters import Watch
from edge.run.starting.loading import load

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


def test_pipe_that_does_not_block_gets_everything() -> None:
    code = "import os; from edge.cli.terminal.streams import open_streams; os.set_blocking(1, False); open_streams()"
    command = [sys.executable, "-c", f"{code}; print('x' * (1 << 20))"]
    done = subprocess.run(command, capture_output=True, timeout=240)
    assert (done.returncode, len(done.stdout)) == (0, (1 << 20) + 1)


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


@pytest.mark.parametrize("left", ["", "; threading.Thread(target=list, args=[stream], daemon=True).start()"])
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
    for now[0] in range(0, 55, 10):
        update(now[0], 50)
    assert capsys.readouterr().err == "planning models: 40%\nplanning models: 80%\nplanning models: 100%\n"


# Interrupts


BOTH = pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of the command; what was there before comes back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(signals, "_received", [])
    signals.leave_at_once()
    signals.raise_interrupts()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@BOTH
def test_interrupt_waits_for_c_code(number: signal.Signals, error: type[BaseException]) -> None:
    calls = []

    def called() -> int:
        signal.raise_signal(number)
        calls.append(list(arrived))
        return 7

    with pytest.raises(error), interrupts_wait() as arrived:
        assert ctypes.CFUNCTYPE(ctypes.c_int)(called)() == 7
    assert calls == [[number]]
    with pytest.raises(error):  # the handlers are back
        signal.raise_signal(number)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("early", [0, 2])
@BOTH
def test_interrupt_that_is_lost_all_same_comes_again(
    number: signal.Signals, error: type[BaseException], early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it comes too early, on a loaded machine: before the function has ended that has it sent again."""
    start, too_early = threading.Timer.start, iter(range(early))

    def started(self: threading.Timer) -> None:
        if next(too_early, None) is None:
            start(self)
        else:
            self.function(*self.args)

    monkeypatch.setattr(threading.Timer, "start", started)
    with pytest.raises(error):  # noqa: PT012 - raised by whichever line runs when it comes
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()
        time.sleep(60)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
@pytest.mark.parametrize("when", [ReferenceEngine.forward, Watch.__init__], ids=["pass", "begin"])
def test_interrupted_answer_has_its_report_in_json(
    when: Any, number: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first pass, or when it has just begun."""
    signals_to_come = iter([number])

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for each in signals_to_come:
            signal.raise_signal(each)
        return when(*arguments, **options)

    owner = ReferenceEngine if when.__name__ == "forward" else Watch
    monkeypatch.setattr(owner, when.__name__, interrupted)
    done = edge_here(*RUN.split(), "-p", "x", "--json")
    assert (done.returncode, json.loads(done.stdout)["stop_reason"]) == (128 + number, reason)


@pytest.mark.usefixtures("handlers")
def test_interrupt_before_an_answer_is_raised() -> None:
    """A session would forget it."""
    with load(GOLDEN, backend="reference") as session, pytest.raises(KeyboardInterrupt), ended_by_signals(session):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(not is_installed(), reason="needs the extra llamacpp")
@pytest.mark.usefixtures("handlers")
@BOTH
def test_interrupt_ends_loading_of_llamacpp(
    number: signal.Signals, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives when llama.cpp calls back, before the first line of our function."""
    make, sent = library().llama_progress_callback, list[int]()

    def sending(function: Any) -> Any:
        def receive(*arguments: Any) -> Any:
            if not sent:
                sent.append(number)
                signal.raise_signal(number)
            return function(*arguments)

        return make(receive)

    monkeypatch.setattr(library(), "llama_progress_callback", sending)
    with pytest.raises(error):
        load_engine(open_golden("llama-gqa-tied").model, "llamacpp", "f32")


LOST = """
import signal, sys
import edge.cli.application
from edge.cli import main

def command(**_):
    try:
        signal.raise_signal(signal.{number})
    except KeyboardInterrupt:
        pass  # as NumPy's isinstance() does
    raise {error}

edge.cli.application.application = lambda _: command
main()
"""


@pytest.mark.parametrize(("number", "code", "error"), [
    ("SIGINT", 130, "TypeError('no file')"), ("SIGTERM", 143, "OSError(5, 'no reading')"),
    ("SIGINT", 130, "KeyError('x')"),
])  # fmt: skip
def test_replaced_interrupt_still_interrupts_command(number: str, code: int, error: str) -> None:
    """C code may drop the handler's exception and fail with one of its own."""
    script = LOST.format(number=number, error=error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_quantization_keeps_the_old_file(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent while it writes: no part of a file, no traceback."""
    target, there = tmp_path / "out.gguf", list[int]()
    target.write_bytes(b"GGUF before")

    def interrupt(_: float) -> None:
        there.append(len(os.listdir(tmp_path)))
        signal.raise_signal(number)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        return quantize_file(*arguments, **options | {"progress": interrupt})

    monkeypatch.setattr("edge.converters.gguf.ggml.quantize_file", interrupted)
    done = edge_here("quantize", str(GOLDEN), str(target), "q4_0", "--force", "--quiet")
    assert (done.returncode, done.stdout, done.stderr, there) == (code, "", "", [2])
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"GGUF before"
