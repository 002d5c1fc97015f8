"""Barriers between phases, without a library: counters in memory, a bounded spin, then sleep in the system
(`systems.py`).

Every thread counts its arrivals in a cache line of its own, so a barrier costs one transfer between caches each way. A
thread that waits longer than a fraction of a millisecond sleeps, and the thread that it waits for wakes it: if other
programs use the cores, spinning would waste the time in which the other thread could arrive, and yielding would give up
a whole time slice at every barrier. Such a wait is a stall, which the waiting thread counts (`team.py`). From the
`MANY_STALLS`-th in a pass on it sleeps at once: two threads may be on the same core. TIR has no atomic operations, so
these functions are LLVM IR.
"""

from __future__ import annotations

import functools

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import LINE, MANY_STALLS
from edge.backends.tvm.cpu.kernels.systems import DECLARED, clocks, sleeping
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, loop, when
from edge.backends.tvm.targets import Target

# The second word of a line counts sleeping threads; the next belong to the system's functions, and to targets whose
# threads return. Counters only grow; differences of 32 bits may wrap.
_FUNCTIONS = r"""
declare void @PAUSE

define i32 @edge_arrive(ptr %line) {
  %before = atomicrmw add ptr %line, i32 1 seq_cst
  %sleepers = getelementptr i8, ptr %line, i64 4
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %none = icmp eq i32 %asleep, 0
  br i1 %none, label %done, label %wake
wake:
  %woken = call i32 @edge_wake(ptr %line)
  br label %done
done:
  %mine = add i32 %before, 1
  ret i32 %mine
}

define i32 @edge_wait(ptr %line, i32 %value, ptr %stalls) {
entry:
  %sleepers = getelementptr i8, ptr %line, i64 4
  %stalled = load i32, ptr %stalls, align 4
  %many = icmp uge i32 %stalled, MANY
  %most = select i1 %many, i32 0, i32 SPINS
  br label %spin
spin:
  %turn = phi i32 [ 0, %entry ], [ %next, %pause ]
  %seen = load atomic i32, ptr %line acquire, align 4
  %ahead = sub i32 %seen, %value
  %there = icmp sge i32 %ahead, 0
  br i1 %there, label %done, label %pause
pause:
  call void @CALL
  %next = add i32 %turn, 1
  %patient = icmp ult i32 %next, %most
  br i1 %patient, label %spin, label %doze
doze:
  %more = add i32 %stalled, 1
  store i32 %more, ptr %stalls, align 4
  %entering = atomicrmw add ptr %sleepers, i32 1 seq_cst
  br label %look
look:
  %found = load atomic i32, ptr %line seq_cst, align 4
  %past = sub i32 %found, %value
  %arrived = icmp sge i32 %past, 0
  br i1 %arrived, label %rise, label %sleep
sleep:
  %slept = call i32 @edge_doze(ptr %line, i32 %found)
  br label %look
rise:
  %leaving = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %done
done:
  ret i32 0
}
"""

_PAUSES = {  # the declaration and the call of a pause
    "x86_64": ("llvm.x86.sse2.pause()", "llvm.x86.sse2.pause()"),
    "aarch64": ("llvm.aarch64.hint(i32)", "llvm.aarch64.hint(i32 1)"),
    "wasm32": ("llvm.donothing()", "llvm.donothing()"),  # has none
}


def imports(target: Target, *, exported: bool = False) -> str:
    """The functions above for a target. exported: sleep and wake by functions of the C runtime."""
    functions = DECLARED if exported else sleeping(target) + clocks(target)
    words = dict(zip(("PAUSE", "CALL"), _PAUSES[target.machine], strict=True))
    words |= {"SPINS": str(target.spins), "MANY": str(MANY_STALLS)}
    return functions + functools.reduce(lambda text, word: text.replace(word, words[word]), words, _FUNCTIONS)


def arrive(lines: Value, index: Value) -> Value:
    """Count an arrival at line `index` and wake threads that wait for it; returns the count so far, int32."""
    return T.call_extern("int32", "edge_arrive", _address(lines, index))


def wait(lines: Value, index: Value, count: Value, notes: Value) -> None:
    """Return once line `index` has counted at least `count` arrivals. notes: the line where a stall is counted."""
    T.evaluate(T.call_extern("int32", "edge_wait", _address(lines, index), count, _address(lines, notes)))


def meet(lines: Value, thread: Value, threads: Value, notes: Value) -> None:
    """A barrier: after it, every thread sees everything that any thread wrote before it."""
    with when(threads > 1):
        wait_for_others(lines, thread, threads, T.Bind(arrive(lines, thread)), notes)


def wait_for_others(lines: Value, thread: Value, threads: Value, count: Value, notes: Value) -> None:
    """Return once all other threads have counted `count` arrivals."""
    with loop(i64(0), threads) as other, when(other != thread):
        wait(lines, other, count, notes)


def _address(lines: Value, index: Value) -> Value:
    return T.address_of(lines[index * LINE])
