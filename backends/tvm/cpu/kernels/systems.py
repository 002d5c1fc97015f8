"""System calls of compiled passes, in LLVM IR: sleeping until a word changes, and the time.

`edge_doze` returns, at the latest, when `edge_wake` is called for a word that differs from `found`; it may return
earlier. In apps, the C runtime has both functions.
"""

from __future__ import annotations

from edge.backends.tvm.targets import Target

DECLARED = """
declare hidden i32 @edge_doze(ptr, i32)
declare hidden i32 @edge_wake(ptr)
"""

_FUTEX = """
declare i64 @syscall(i64, ...)

define internal i32 @edge_doze(ptr %line, i32 %found) {
  %status = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %line, i64 128, i32 %found, ptr null)
  ret i32 0
}

define internal i32 @edge_wake(ptr %line) {
  %status = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %line, i64 129, i64 2147483647)
  ret i32 0
}
"""  # FUTEX_WAIT_PRIVATE, found, forever; FUTEX_WAKE_PRIVATE, all
_FUTEXES = {"x86_64": "202", "aarch64": "98"}  # the number of the system call

_SLEEPING = {
    # UL_COMPARE_AND_WAIT | ULF_NO_ERRNO, found, forever; the same with ULF_WAKE_ALL. libc++ sleeps by them, too.
    "macos": """
declare i32 @__ulock_wait(i32, ptr, i64, i32)
declare i32 @__ulock_wake(i32, ptr, i64)

define internal i32 @edge_doze(ptr %line, i32 %found) {
  %value = zext i32 %found to i64
  %status = call i32 @__ulock_wait(i32 16777217, ptr %line, i64 %value, i32 0)
  ret i32 0
}

define internal i32 @edge_wake(ptr %line) {
  %status = call i32 @__ulock_wake(i32 16777473, ptr %line, i64 0)
  ret i32 0
}
""",
    "windows": """
declare i32 @WaitOnAddress(ptr, ptr, i64, i32)
declare void @WakeByAddressAll(ptr)

define internal i32 @edge_doze(ptr %line, i32 %found) {
  %value = alloca i32, align 4
  store i32 %found, ptr %value
  %status = call i32 @WaitOnAddress(ptr %line, ptr %value, i64 4, i32 -1)
  ret i32 0
}

define internal i32 @edge_wake(ptr %line) {
  call void @WakeByAddressAll(ptr %line)
  ret i32 0
}
""",
}

# clock_gettime(CLOCK_MONOTONIC) gives seconds and nanoseconds of 64 bits each; without a system call.
_CLOCK = """
declare i32 @clock_gettime(i32, ptr)

define internal i64 @edge_now() {
  %time = alloca [2 x i64], align 8
  %status = call i32 @clock_gettime(i32 NUMBER, ptr %time)
  %seconds = load i64, ptr %time
  %rest = getelementptr i8, ptr %time, i64 8
  %nanoseconds = load i64, ptr %rest
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %nanoseconds
  ret i64 %now
}
"""
# In units of 100 ns. The performance counter has a unit that programs have to ask for.
_FILE_TIME = """
declare void @GetSystemTimePreciseAsFileTime(ptr)

define internal i64 @edge_now() {
  %time = alloca i64, align 8
  call void @GetSystemTimePreciseAsFileTime(ptr %time)
  %count = load i64, ptr %time
  %now = mul i64 %count, 100
  ret i64 %now
}
"""
_NOW = {"linux": _CLOCK.replace("NUMBER", "1"), "macos": _CLOCK.replace("NUMBER", "6"), "windows": _FILE_TIME}


def sleeping(target: Target) -> str:
    """`edge_doze` and `edge_wake`."""
    return _SLEEPING.get(target.system) or _FUTEX.replace("FUTEX", _FUTEXES[target.machine])


def clock(target: Target) -> str:
    """`edge_now`: nanoseconds since some event, int64."""
    return _NOW[target.system]
