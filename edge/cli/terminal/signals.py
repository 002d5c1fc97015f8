"""Ctrl-C and SIGTERM: during an answer they end it before its next token, with a report, like a spent budget; at any
other time they end the process at once."""

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

_AGAIN_S = 0.01  # uninterruptible code has most likely ended by then; if not, the signal is sent again


class Terminated(KeyboardInterrupt):
    """SIGTERM: an interrupt, so that handlers of KeyboardInterrupt also handle it."""


_received: list[int] = []  # typer does not pass on which signal interrupted


def _raise(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def leave_at_once() -> None:
    """From here on, both signals end the process silently: during startup, and after the output is complete."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in the background of a script
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def raise_interrupts() -> None:
    """From here on, both signals raise exceptions."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)
    sys.unraisablehook = _come_again


def _come_again(lost: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again if it was lost: Python drops exceptions in finalizers and in callbacks from C."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = signal.SIGTERM if isinstance(lost.exc_value, Terminated) else signal.SIGINT
    pause = _AGAIN_S
    while True:
        try:
            from threading import Timer

            Timer(pause, _send, (number,)).start()
            return
        except KeyboardInterrupt:  # it has come before this function's end, as on a loaded machine, and would be lost
            pause *= 4


def _send(number: int) -> None:
    """Send a signal to the main thread, which runs handlers and may be blocked in a system call."""
    import _thread
    import threading

    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def was_interrupted() -> bool:
    """Whether a signal has come that the command did not get over (`get_over_it`)."""
    return bool(_received)


def get_over_it() -> None:
    """Forget a Ctrl-C after which the command goes on."""
    _received.clear()


def interrupted() -> int:
    """The customary exit code of an interrupted process: 143 for SIGTERM, 130 for Ctrl-C."""
    return 128 + (signal.SIGTERM if signal.SIGTERM in _received else signal.SIGINT)


@contextmanager
def ended_by_signals(session: Session) -> Iterator[None]:
    """While the session generates an answer, a first Ctrl-C or SIGTERM ends the answer, and a second one is handled as
    before; so is a Ctrl-C before or after it. The caller then leaves if `session.terminated`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        if number == signal.SIGTERM:
            _received.append(number)
            session.terminate()
        elif session.steps.busy:
            session.interrupt()
        else:
            _raise(number, frame)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # ignored in the background of a script
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
