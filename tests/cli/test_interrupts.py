"""Ctrl-C and SIGTERM where Python would lose them: in functions that C code calls."""

from __future__ import annotations

import abc
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import load_engine, open_golden

from edge.backends.interrupts import interrupts_wait
from edge.backends.llamacpp.library import is_installed, library
from edge.cli.terminal import signals
from edge.cli.terminal.signals import Terminated
from edge.devices.regular import open_regular
from edge.formats.arrays import read_array

needs_llamacpp = pytest.mark.skipif(not is_installed(), reason="needs the extra llamacpp")
BOTH = pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])


@pytest.fixture(autouse=True)
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


@needs_llamacpp
@BOTH
@pytest.mark.parametrize("callback", ["llama_progress_callback", "llama_log_callback"])
def test_interrupt_ends_loading_of_llamacpp(
    callback: str, number: signal.Signals, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    _send(callback, number, request)
    with pytest.raises(error):
        load_engine(open_golden("llama-gqa-tied").model, "llamacpp", "f32")


@BOTH
def test_interrupt_that_is_lost_all_same_comes_again(number: signal.Signals, error: type[BaseException]) -> None:
    with pytest.raises(error):  # noqa: PT012 - raised by whichever line runs when it comes
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()
        time.sleep(60)


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


@BOTH
def test_array_reads_run_no_handler(
    number: signal.Signals, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """np.fromfile runs Python's isinstance() and takes a handler's exception for a yes."""
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(5, dtype=np.int32).tobytes())
    instance = abc.ABCMeta.__instancecheck__

    def interrupted(cls: Any, each: object) -> bool:
        if cls is os.PathLike and each is file:
            signal.raise_signal(number)
        return instance(cls, each)

    with open_regular(path) as file:
        monkeypatch.setattr(abc.ABCMeta, "__instancecheck__", interrupted)
        assert read_array(file, np.int32, 3).tolist() == [0, 1, 2]
        assert read_array(file, np.int32, 3).tolist() == [3, 4]
        with pytest.raises(error):
            isinstance(file, os.PathLike)


BY_LLAMACPP = pytest.param("q4_k_m", marks=[needs_llamacpp, pytest.mark.exhaustive])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", BY_LLAMACPP])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_quantization_keeps_the_old_file(
    number: signal.Signals, code: int, kind: str, tmp_path: Path
) -> None:
    """Sent while it writes: no part of a file, no process, no traceback."""
    target = tmp_path / "out.gguf"
    target.write_bytes(b"GGUF before")
    command = [sys.executable, "-m", "edge", "quantize", "smollm2-135m", str(target), kind, "--force", "--quiet"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while child.poll() is None and len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.005)
        child.send_signal(number)
        out, error = child.communicate(timeout=120)
    assert (child.returncode, out, error) == (code, b"", b"")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"GGUF before"


def _send(callback: str, number: signal.Signals, request: pytest.FixtureRequest) -> None:
    """Let a signal arrive when llama.cpp calls back, before the first line of our function."""
    lib, sent = library(), list[int]()
    make = getattr(lib, callback)

    def sending(function: Any) -> Any:
        def receive(*arguments: Any) -> Any:
            if not sent:
                sent.append(number)
                signal.raise_signal(number)
            return function(*arguments)

        return make(receive)

    if callback == "llama_progress_callback":
        request.addfinalizer(lambda: setattr(lib, callback, make))
        setattr(lib, callback, sending)
    else:
        request.addfinalizer(lambda: lib.llama_log_set(lib.edge_log_callback, None))
        lib.edge_test_callback = sending(lambda *_: None)  # kept alive by the module
        lib.llama_log_set(lib.edge_test_callback, None)
