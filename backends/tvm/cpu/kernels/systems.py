"""System calls of compiled passes, in LLVM IR: sleeping until a word changes, the time, and a thread's CPU time.

`edge_doze` returns, at the latest, when `edge_wake` is called for a word that differs from `found`; it may return
earlier. In apps, the C runtime has all these functions.

On Linux, `edge_enter` notes which thread a line belongs to. Who waits for it longer than a second asks whether that
thread is still there; if the system has ended it, its line arrives forever, so that the pass comes to its end, where
`threads.failed` sees it.
"""

from __future__ import annotations

import functools

from edge.backends.tvm.targets import Target

DECLARED = """
declare hidden i32 @edge_doze(ptr, i32)
declare hidden i32 @edge_wake(ptr)
declare hidden i64 @edge_now()
declare hidden i64 @edge_worked()
"""

_FUTEX = """
declare i64 @syscall(i64, ...)

define internal i32 @edge_doze(ptr %line, i32 %found) {
  %second = alloca [2 x i64], align 8
  store [2 x i64] [i64 1, i64 0], ptr %second
  %owner = getelementptr i8, ptr %line, i64 8
  %thread = load i32, ptr %owner, align 4
  %known = icmp ne i32 %thread, 0
  %most = select i1 %known, ptr %second, ptr null
  %status = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %line, i64 128, i32 %found, ptr %most)
  %now = load atomic i32, ptr %line seq_cst, align 4
  %same = icmp eq i32 %now, %found
  %doubtful = and i1 %known, %same
  br i1 %doubtful, label %ask, label %done
ask:
  %process = call i64 (i64, ...) @syscall(i64 PROCESS)
  %id = zext i32 %thread to i64
  %answer = call i64 asm sideeffect SIGNAL(i64 %process, i64 %id, i64 0)
  %absent = icmp eq i64 %answer, -3
  br i1 %absent, label %gone, label %done
gone:
  %forever = add i32 %found, 1073741824
  %swapped = cmpxchg ptr %line, i32 %found, i32 %forever seq_cst seq_cst
  %dead = getelementptr i8, ptr %line, i64 12
  store i32 1, ptr %dead, align 4
  br label %done
done:
  ret i32 0
}

define i32 @edge_enter(ptr %line) {
  %thread = call i64 (i64, ...) @syscall(i64 THREAD)
  %short = trunc i64 %thread to i32
  %owner = getelementptr i8, ptr %line, i64 8
  store i32 %short, ptr %owner, align 4
  ret i32 0
}

define internal i32 @edge_wake(ptr %line) {
  %status = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %line, i64 129, i64 2147483647)
  ret i32 0
}
"""  # FUTEX_WAIT_PRIVATE, found, forever or a second; FUTEX_WAKE_PRIVATE, all; tgkill with signal 0, -ESRCH
_TGKILL_X86 = '"movl $$234, %eax; syscall", "={rax},{rdi},{rsi},{rdx},~{rcx},~{r11},~{memory}"'
_TGKILL_ARM = '"mov x8, #131; svc #0", "={x0},{x0},{x1},{x2},~{x8},~{memory}"'
# Of the system calls. tgkill is called in place, since `syscall` hides the error in errno.
_NUMBERS = {
    "x86_64": {"FUTEX": "202", "PROCESS": "39", "THREAD": "186", "SIGNAL": _TGKILL_X86},
    "aarch64": {"FUTEX": "98", "PROCESS": "172", "THREAD": "178", "SIGNAL": _TGKILL_ARM},
}

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

# clock_gettime gives seconds and nanoseconds of 64 bits each; for CLOCK_MONOTONIC without a system call.
_CLOCK = """
define internal i64 @NAME() {
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
# The counter never jumps, as the time of day does. Whole seconds and the rest are scaled apart: the product with 10^9
# would not fit.
_COUNTER = """
declare i32 @QueryPerformanceCounter(ptr)
declare i32 @QueryPerformanceFrequency(ptr)

define internal i64 @edge_now() {
  %time = alloca i64, align 8
  %unit = alloca i64, align 8
  %read = call i32 @QueryPerformanceCounter(ptr %time)
  %asked = call i32 @QueryPerformanceFrequency(ptr %unit)
  %count = load i64, ptr %time
  %rate = load i64, ptr %unit
  %seconds = udiv i64 %count, %rate
  %rest = urem i64 %count, %rate
  %whole = mul i64 %seconds, 1000000000
  %scaled = mul i64 %rest, 1000000000
  %part = udiv i64 %scaled, %rate
  %now = add i64 %whole, %part
  ret i64 %now
}

define internal i64 @edge_worked() {
  %now = call i64 @edge_now()
  ret i64 %now
}
"""  # Windows counts a thread's CPU time in steps of 15 ms, so there threads never seem to lose any.
_CLOCKS = {"linux": (1, 3), "macos": (6, 16)}  # CLOCK_MONOTONIC and CLOCK_THREAD_CPUTIME_ID


def sleeping(target: Target) -> str:
    """`edge_doze` and `edge_wake`."""
    if found := _SLEEPING.get(target.system):
        return found
    numbers = _NUMBERS[target.machine].items()
    return functools.reduce(lambda text, number: text.replace(*number), numbers, _FUTEX)


def clocks(target: Target) -> str:
    """`edge_now`: nanoseconds since some event, int64. `edge_worked`: those of CPU time of the calling thread."""
    if target.system not in _CLOCKS:
        return _COUNTER
    names = zip(("edge_now", "edge_worked"), _CLOCKS[target.system], strict=True)
    text = (_CLOCK.replace("NAME", name).replace("NUMBER", str(number)) for name, number in names)
    return "declare i32 @clock_gettime(i32, ptr)\n" + "".join(text)


def notices(target: Target, *, exported: bool) -> bool:
    """Whether a pass notices that the system has ended one of its threads."""
    return target.system == "linux" and not exported
