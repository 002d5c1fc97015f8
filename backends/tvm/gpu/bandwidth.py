"""Benchmark of a GPU's memory bandwidth, by a kernel that adds up words."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge.backends.tvm.gpu.hosts import Adapter, open_device
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.devices.memory import memory_limit
from edge.errors import MissingExtraError

_THREADS = 256
_STEPS = 32  # loads of 16 bytes by a thread
_GROUP = _THREADS * _STEPS * 16  # bytes that a workgroup reads, one after the other
_BUFFER = 128 << 20  # bytes, which every driver can bind
_BUFFERS = 4  # read in turn: together larger than the caches of cards
_LEAST = 8  # workgroups, where memory is short
_RUNS = 8  # of which the best counts: other processes disturb the rest


def measure_bandwidth(
    adapter: Adapter, seconds: float = 1.0, on_progress: Callable[[float], None] | None = None
) -> float:
    """Measure bytes per second, for about `seconds`. Raises EngineError if the driver fails, MissingExtraError without
    TVM, which generates the kernel."""
    kernel = sum_kernel(adapter.language)
    room = memory_limit().bytes // 4 if adapter.unified or adapter.memory is None else adapter.memory // 4
    groups = max(_LEAST, min(_BUFFER, adapter.limits.binding, room // _BUFFERS) // _GROUP)
    device = open_device(adapter)
    try:
        device.prepare({kernel.name: kernel})
        buffers = {f"words.{each}": device.create(groups * _GROUP) for each in range(_BUFFERS)}
        buffers["sums"] = sums = device.create(groups * _THREADS * 4)
        dispatches = [sum_words(f"words.{each}", groups) for each in range(_BUFFERS)]
        recording = device.record(dispatches, buffers)

        def once(times: int) -> float:
            began = time.perf_counter()
            device.run(recording, times=times)
            device.read(sums, 0, 4)
            return time.perf_counter() - began

        once(1)  # warm up
        times = max(1, round(seconds / _RUNS / max(once(1), 1e-6)))
        best = float("inf")
        for run in range(_RUNS):
            best = min(best, once(times) / times)
            if on_progress:
                on_progress((run + 1) / _RUNS)
        return _BUFFERS * groups * (_GROUP + 4 * _THREADS) / best
    finally:
        device.close()


def sum_kernel(language: str) -> Kernel:
    """Build edge_sum, in which each thread adds up the words that it reads, 16 bytes at a time."""
    try:
        from edge.backends.tvm.gpu.kernels import threads as t
        from edge.backends.tvm.gpu.lowering import lower
    except ImportError:
        raise MissingExtraError("TVM", "tvm") from None

    def body(scope: t.Scope) -> None:
        total = t.Register(t.u32(0), "uint32")
        first = t.let(scope.group * (_THREADS * _STEPS) + scope.thread)
        with t.loop(0, _STEPS // 4) as step:
            at = t.let(first + step * (4 * _THREADS))
            words = [t.let(scope.words[at + each * _THREADS]) for each in range(4)]
            for each in words:
                total.value = total.value + t.lane(each, 0) + t.lane(each, 1) + t.lane(each, 2) + t.lane(each, 3)
        t.store(scope.sums, scope.group * _THREADS + scope.thread, total.value)

    return lower(t.build("edge_sum", _THREADS, {"words": "uint32x4"}, {"sums": "uint32"}, [], body), language)


def sum_words(buffer: str, groups: int) -> Dispatch:
    """Sum the first `groups` · 128 KiB of the buffer into `sums`, uint32 [groups · 256]."""
    return Dispatch("edge_sum", (Slice("sums"), Slice(buffer)), (), (groups, 1), "other")
