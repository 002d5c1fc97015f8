"""The threads of an engine. They all run the same compiled function, and sleep between jobs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from edge.backends.tvm.cpu.arguments import LINE, LINES, PASSES, Job
from edge.backends.tvm.cpu.elf import Call, Image
from edge.backends.tvm.memory import aligned_zeros, pointer
from edge.devices.platform import prefer_fast_cores
from edge.errors import EngineError

_SLOTS = {name: number for number, name in enumerate(Job.NAMES)}
_FAILED = _SLOTS["failed"]


class Workers:
    """Thread 0 is the caller's; the first job starts the others."""

    def __init__(self, image: Image, threads: int, pointers: Sequence[ctypes.c_void_p], *, fixed: bool = False) -> None:
        """fixed: all threads take part in all jobs."""
        self._job = aligned_zeros(len(Job.NAMES), "int64")
        self._lines = aligned_zeros(LINES * threads * LINE, "int32")
        for name, value in (("parts", threads), ("threads", threads), ("team", threads), ("fixed", fixed)):
            self._job[_SLOTS[name]] = value
        shared = (pointer(self._job), pointer(self._lines), *pointers)
        self._call, *others = (Call(image, "run", (*shared, number)) for number in range(threads))
        self._others = [threading.Thread(target=_work, args=[each], daemon=True, name="edge-worker") for each in others]
        self._started = False

    def run(self, **numbers: int) -> None:
        """Run one job, whose numbers `Job` names."""
        if not self._started:
            self._started = True
            for each in self._others:
                each.start()
        for name, value in numbers.items():
            self._job[_SLOTS[name]] = value
        self._call()
        if self._job[_FAILED]:
            raise EngineError("the system has ended a thread of the engine: load the model again")

    @property
    def passes(self) -> list[int]:
        """Passes that 1, 2, … threads have run."""
        lines = self._lines.reshape(LINES, -1, LINE)
        return [int(each) for each in lines[2, :, PASSES]]

    def close(self) -> None:
        """End the threads; safe to call twice. The memory that they use can be freed afterwards."""
        if self._started and not self._job[_FAILED]:
            self.run(kind=Job.QUIT)
            for each in self._others:
                each.join()
        self._others, self._started = [], False


def _work(call: Call) -> None:
    prefer_fast_cores()
    call()
