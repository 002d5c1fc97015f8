"""A time limit for asynchronous code."""

from __future__ import annotations

import asyncio


class Deadline:
    """`asyncio.timeout`, which Python 3.10 lacks. (`asyncio.wait_for` of Python 3.11 may lose a cancellation.)"""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._late = seconds, False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            self._late = True
            task.cancel()

        self._timer = asyncio.get_running_loop().call_later(self._seconds, end)

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._timer.cancel()
        if self._late and isinstance(error, asyncio.CancelledError):
            raise asyncio.TimeoutError
