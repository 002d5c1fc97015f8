"""Measures this device's ceilings: memory bandwidth in bytes/s, float32 and int8 operations/s.

It runs in a child process, since its arrays would count as this process's memory, and since the linear algebra library
of NumPy reads its number of threads from the environment once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from edge.devices.child import Say, run_child, serve
from edge.devices.host import usable_cores
from edge.devices.integer_products import fastest_product
from edge.devices.memory import memory_limit
from edge.devices.profiles import HOST, describe_host, find_profile
from edge.devices.profiles.profile import DeviceProfile, Figure
from edge.errors import InputError, UnsupportedError
from edge.types import Progress

_ARRAYS = 256 << 20  # bytes read in turn, over all threads: far beyond the last-level caches of such devices
_LEAST_ARRAYS = 16 << 20  # where memory is short
_PIECE = 2 << 20  # bytes read between two readings of the clock
_MATRIX = 512  # rows and columns: three (almost) fit a second-level cache
_SLICES = 8  # intervals, of which the best counts: other processes disturb the rest
_ONE_THREAD = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of this device with `threads` threads, measured."""

    read_bytes_per_s: float
    f32_flops: float
    int8_ops: float | None  # None: not measurable here, see integer_products.missing
    threads: int


def measure_ceilings(
    threads: int | None = None, seconds: float = 4.0, on_progress: Progress | None = None, cpus: Sequence[int] = ()
) -> Ceilings:
    """Measure for about `seconds`. threads: their number (default: as many as engines use). on_progress: called with
    the fraction done. cpus: run on these CPUs alone (Linux).

    Raises InputError for impossible times and numbers of threads, UnsupportedError if `cpus` cannot be used,
    EngineError if the process fails.
    """
    threads = threads or usable_cores()
    if not 1 <= threads <= 1024 or not 0 < seconds <= 600:
        raise InputError(f"cannot measure {seconds} s with {threads} threads: 1 to 1024 threads, up to 600 s")
    said = on_progress or (lambda part: None)
    result = run_child(
        "edge.devices.probe",
        {"threads": threads, "seconds": seconds, "cpus": list(cpus)},
        lambda message: said(message["part"]),
        failure="this device's ceilings could not be measured",
        environment=dict.fromkeys(_ONE_THREAD, "1"),
    )
    return Ceilings(**result)


def probe_profile(seconds: float = 8.0, on_progress: Progress | None = None) -> DeviceProfile:
    """This device's profile with measured ceilings, of one core and of all that engines use.

    Other figures of the user's profile, such as watts, are kept. Raises the errors of measure_ceilings.
    """
    threads, said = usable_cores(), on_progress or (lambda part: None)
    times = 2 if threads > 1 else 1
    together = measure_ceilings(threads, seconds / times, lambda part: said(part / times))
    alone = measure_ceilings(1, seconds / 2, lambda part: said((1 + part) / 2)) if threads > 1 else together
    source = f"edge devices probe, {date.today().isoformat()}"
    figures = {
        "read_bandwidth": Figure(round(together.read_bytes_per_s), "measured", source, threads=threads),
        "read_bandwidth_one_core": Figure(round(alone.read_bytes_per_s), "measured", source, threads=1),
        "f32_flops": Figure(round(together.f32_flops), "measured", source, "NumPy's matmul", threads),
    }
    if together.int8_ops is not None:
        note = "ONNX Runtime's MatMulInteger"
        figures["int8_ops"] = Figure(round(together.int8_ops), "measured", source, note, threads)
    host, before = describe_host(), find_profile(HOST)
    return replace(host, sensors=_sensors(), figures=before.figures | host.figures | figures)


def _sensors() -> tuple[str, ...]:
    from edge.devices.power import sensors

    return tuple(each.name for each in sensors() if each.available and each.name != "estimate")


def _measure(threads: int, seconds: float, on_progress: Progress) -> Ceilings:
    """Measure in this process."""
    products = fastest_product()
    works = [_reader(threads), _multiplier(), *([products] if products else [])]
    rates = list[float]()

    def said(part: float) -> None:
        on_progress((len(rates) + part) / len(works))

    for work in works:
        rates.append(best_rate(threads, seconds / len(works), work, said))
    return Ceilings(rates[0], rates[1], rates[2] if products else None, threads)


Work = Callable[[], Callable[[], float]]
"""Returns the function that a thread repeats, which returns the amount of its work."""


def _reader(threads: int) -> Work:
    """Work that reads pieces of an array in turn by bitwise or, NumPy's fastest reduction."""
    size = max(_LEAST_ARRAYS, min(_ARRAYS, memory_limit().bytes // 4)) // threads
    size = max(_PIECE, size // _PIECE * _PIECE)

    def make() -> Callable[[], float]:
        array = np.ones(size // 8, np.int64).reshape(-1, _PIECE // 8)
        row = 0

        def read() -> float:
            nonlocal row
            np.bitwise_or.reduce(array[row])
            row = (row + 1) % len(array)
            return _PIECE

        return read

    return make


def _multiplier() -> Work:
    def make() -> Callable[[], float]:
        left, right, out = (np.ones((_MATRIX, _MATRIX), np.float32) for _ in range(3))

        def multiply() -> float:
            np.matmul(left, right, out=out)
            return 2.0 * _MATRIX**3

        return multiply

    return make


def best_rate(threads: int, seconds: float, work: Work, on_progress: Progress) -> float:
    """The best rate, in amounts per second, of several intervals in which all threads repeat their work."""
    done, began, ended = ([0.0] * threads for _ in range(3))
    gate = threading.Barrier(threads + 1)

    def repeat(thread: int) -> None:
        once = work()
        once()  # warm up
        for _ in range(_SLICES):
            gate.wait()
            began[thread] = time.perf_counter()
            count, end = 0.0, began[thread] + seconds / _SLICES
            while (now := time.perf_counter()) < end:
                count += once()
            done[thread], ended[thread] = count, now
            gate.wait()

    workers = [threading.Thread(target=repeat, args=(each,), daemon=True) for each in range(threads)]
    for worker in workers:
        worker.start()
    best = 0.0
    for each in range(_SLICES):
        gate.wait()
        gate.wait()
        best = max(best, sum(done) / (max(ended) - min(began)))  # by the threads' clocks: this one may wake late
        on_progress((each + 1) / _SLICES)
    for worker in workers:
        worker.join()
    return best


def _answer(request: Any, say: Say) -> object:
    if request["cpus"]:
        try:
            os.sched_setaffinity(0, request["cpus"])
        except OSError as error:  # the system has withdrawn these CPUs
            raise UnsupportedError(f"cores {request['cpus']} cannot be used alone: {error.strerror}") from None
    return asdict(_measure(request["threads"], request["seconds"], lambda part: say({"part": part})))


if __name__ == "__main__":
    serve(_answer)
