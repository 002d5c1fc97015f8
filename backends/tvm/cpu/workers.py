"""The threads of an engine. They all run the same compiled function, and sleep between jobs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from edge.backends.tvm.cpu.arguments import LINE, Job
from edge.backends.tvm.cpu.elf import Call, Image
from edge.backends.tvm.memory import aligned_zeros, pointer
from edge.devices.platform import prefer_fast_cores


class Workers:
    """Thread 0 is the caller's; the first job starts the others."""

    def __init__(self, image: Image, threads: int, pointers: Sequence[ctypes.c_void_p]) -> None:
        self._job = aligned_zeros(len(Job.NAMES), "int64")
        self._lines = aligned_zeros((threads + 1) * LINE, "int32")
        self._job[Job.slot("threads")] = threads
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
            self._job[Job.slot(name)] = value
        self._call()

    def close(self) -> None:
        """End the threads; safe to call twice. The memory that they use can be freed afterwards."""
        if self._started:
            self.run(kind=Job.QUIT)
            for each in self._others:
                each.join()
        self._others, self._started = [], False


def _work(call: Call) -> None:
    prefer_fast_cores()
    call()
