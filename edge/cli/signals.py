"""Ctrl-C and SIGTERM. They end an answer before its next token, with its report, as a budget would end it; anything
else, at once."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

TYPE_CHECKING = False  # typing is not imported here: until `leave_at_once` runs, a Ctrl-C is a traceback
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from edge.run.session import Session

_AGAIN_S = 0.01  # by then whatever could not be interrupted has most likely ended; if not, it comes once more


class Terminated(KeyboardInterrupt):
    """By SIGTERM; whatever knows how to be interrupted knows this, too."""


_received: list[int] = []  # typer does not pass on what it was that interrupted


def terminate(number: int, _frame: FrameType | None) -> None:
    """Handler of SIGTERM."""
    _received.append(number)
    raise Terminated


def leave_at_once() -> None:
    """From here on both end the process without a word: while it starts, and when all is said."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a script's background
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def raise_interrupts() -> None:
    """From here on both are exceptions."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = _come_again


def _come_again(lost: sys.UnraisableHookArgs) -> None:
    """Nothing can be raised in a finalizer, nor in a function that C code calls: an interrupt that Python handles there
    is sent a second time."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    from threading import Timer

    number = signal.SIGTERM if isinstance(lost.exc_value, Terminated) else signal.SIGINT
    Timer(_AGAIN_S, _send, (number,)).start()


def _send(number: int) -> None:
    """To the main thread, which runs handlers, and whose waiting it ends."""
    import _thread
    import threading

    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def interrupted() -> int:
    """The exit code of a process that was: customary are 143 for SIGTERM, and 130 for Ctrl-C."""
    return 143 if _received else 130


@contextmanager
def ended_by_signals(session: Session) -> Iterator[None]:
    """While it generates an answer, a first Ctrl-C or SIGTERM ends that, and a second one whatever the session does.
    Leave then, if `session.terminated`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        if number == signal.SIGINT:
            session.interrupt()
        else:
            _received.append(number)
            session.terminate()

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as in a script's background
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
