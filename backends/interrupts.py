"""Deferral of Ctrl-C and SIGTERM around C code that calls back into Python.

Python runs a signal's handler on the next line of Python. In a callback, ctypes would print and drop the handler's
exception and return 0 to the C code, which would continue with that.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[list[int]]:
    """Defer signal handlers to the end of this block. Yields the numbers of signals as they arrive."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # they never arrive in others
        yield arrived
        return

    def remember(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}  # not the system's own
    for number in ours:
        signal.signal(number, remember)
    try:
        yield arrived
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for each in dict.fromkeys(arrived):
            ours[signal.Signals(each)](each, None)
