"""Marks of a timed pass in compiled code: `cpu/timing.py` defines the counters and reads them.

They read the system's clock (`systems.py`), without a system call. Not all CPUs let programs read their counters
(ARM64), whose units differ as well.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import Buffer, Value

FUNCTIONS = """
define i32 @edge_mark(ptr %last, ptr %counters) {
  %now = call i64 @edge_now()
  %before = load i64, ptr %last
  store i64 %now, ptr %last
  %passed = sub i64 %now, %before
  %sum = load i64, ptr %counters
  %more = add i64 %sum, %passed
  store i64 %more, ptr %counters
  %place = getelementptr i8, ptr %counters, i64 8
  %calls = load i64, ptr %place
  %another = add i64 %calls, 1
  store i64 %another, ptr %place
  ret i32 0
}
"""


def add_time(times: Buffer, thread: Value, counters: Value) -> None:
    """Add the time since the thread's last timestamp, at word `thread`, to the counters at word `counters`."""
    T.evaluate(T.call_extern("int32", "edge_mark", T.address_of(times[thread]), T.address_of(times[counters])))
