"""How many threads take part in a pass: the only rule of it, in compiled code, so that apps follow it, too.

A thread whose core another program wants stops in mid-phase for milliseconds, and all others wait for it at the next
barrier: beside one busy loop on two cores, two threads decode at a sixth of the speed of one. So a team gives way.
After each pass thread 0 adds up the time that it lost: what the clock says beyond its CPU time (the system ran another
program, or it slept at a barrier), and its stalls, waits at barriers that it spun through in vain. Without loss, n - 1
threads would take up to n / (n - 1) of the time of n, and half as much more where memory is what they wait for; so a
thread may cost 1 / (2 n - 2) of the other time. What is lost beyond that adds up (a smaller loss reduces the sum), and
from `LIMIT` on passes have one thread less, or from twice the other time of a longer pass on. The loss of a pass
without `MANY_STALLS` counts up to `EVENT`, or three times its other time: a process that was stopped, or whose cgroup
used up its quota, has learned nothing of its neighbours.

A smaller team grows by one thread after `PATIENCE` in which it loses little, and again each time that this proves
right. If the larger team fails within `TRIAL`, the next attempt waits twice as long, up to `MOST_PATIENCE`: attempts
then cost 2 to 3 %.

Where there are more neighbours than cores, a small team is short of time, too. Steps, whose barriers are 10 to 100 µs
apart, lose less of it with few threads; chunks of `LONG` tokens or more gain by the whole team's share of the cores. So
they have it until passes of the small team have shown that it loses little.

Jobs that are no passes (`Job`) have the team of the pass before, whose rows each thread may have a copy of.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import LINE, MANY_STALLS, PASSES, STALLS, Job
from edge.backends.tvm.cpu.kernels.vectors import Buffer, Value, i64, let, quotient, when

_MS = 1_000_000  # of nanoseconds, as all times here
STALL, SPINS = _MS // 8, 10_000  # about the time of SPINS spins; a target may be tuned to fewer
LIMIT, EVENT = 4 * _MS, 3 * _MS  # one time slice of another program is no reason, two are
MOST_SCARCE, LONG = 32 * _MS, 64
PATIENCE, MOST_PATIENCE, TRIAL = 8 * _MS, 128 * _MS, 128 * _MS


def notes(job: Buffer, thread: Value) -> Value:
    """The number of a thread's line of notes."""
    return job[Job.slot("parts")] * 2 + thread


def given(job: Buffer, thread: Value) -> Value:
    """The number of the line that counts the jobs that a thread was given."""
    return job[Job.slot("parts")] + thread


def forget_stalls(job: Buffer, lines: Buffer, thread: Value) -> None:
    """In each thread, as a job begins."""
    T.buffer_store(lines, T.int32(0), [notes(job, thread) * LINE + STALLS])


def begin_job(job: Buffer, lines: Buffer) -> None:
    """In thread 0, before the others begin: choose the number of threads."""
    team = _Team(job)
    _put(job, "first", T.cast(lines[0], "int64"))
    forget_stalls(job, lines, i64(0))
    with when(team["kind"] == Job.QUIT):
        _put(job, "threads", team["parts"])
    with when(_is_judged(team)):
        now = let(T.call_extern("int64", "edge_now"))
        with when(T.And(team["team"] < team["parts"], now >= team["grow_at"])):
            _put(job, "team", team["team"] + 1)
            _put(job, "changed", now)
            _put(job, "lost", i64(0))
        long = T.And(team["kind"] == Job.CHUNK, team["count"] >= LONG)
        whole = T.And(long, team["scarce"] > LIMIT)
        _put(job, "threads", T.if_then_else(whole, team["parts"], team["team"]))
        _put(job, "began", now)
        _put(job, "worked", T.call_extern("int64", "edge_worked"))


def end_job(job: Buffer, lines: Buffer, spins: int) -> None:
    """In thread 0, at the end: judge the team. spins: of the target."""
    team = _Team(job)
    with when(_is_judged(team)):
        last = let(notes(job, team["threads"] - 1) * LINE + PASSES)
        T.buffer_store(lines, lines[last] + 1, [last])
        now = let(T.call_extern("int64", "edge_now"))
        worked = let(T.call_extern("int64", "edge_worked") - team["worked"])
        passed = let(now - team["began"])
        stall = STALL * min(spins, SPINS) // SPINS
        stalls = let(T.cast(lines[notes(job, i64(0)) * LINE + STALLS], "int64"))
        judge(job, now, passed, let(T.min(passed, T.max(passed - worked, i64(0)) + stalls * stall)), stalls)


def judge(job: Buffer, now: Value, passed: Value, lost: Value, stalls: Value) -> None:
    """Judge the team by a pass of `passed` nanoseconds, `lost` of which thread 0 lost."""
    team, useful = _Team(job), let(passed - lost)
    with when(team["threads"] > team["team"]):
        _put(job, "scarce", team["scarce"] - quotient(team["scarce"], 4))
    with when(lost > quotient(passed, 8)):
        _put(job, "grow_at", T.max(team["grow_at"], now + T.max(team["patience"], i64(PATIENCE))))
    with when(T.And(team["threads"] == team["team"], team["team"] < team["parts"])):
        scarce = team["scarce"] + lost - quotient(useful, 4)
        _put(job, "scarce", T.max(i64(0), T.min(i64(MOST_SCARCE), scarce)))
    with when(T.And(team["threads"] == team["team"], team["team"] > 1)):
        counted = T.if_then_else(stalls < MANY_STALLS, T.min(lost, T.max(i64(EVENT), useful * 3)), lost)
        _put(job, "lost", T.max(i64(0), team["lost"] + counted - quotient(useful, team["team"] * 2 - 2)))
        with when(team["lost"] > T.max(i64(LIMIT), T.min(useful * 2, i64(10 * LIMIT)))):
            failed = now - team["changed"] < TRIAL
            longer = T.max(i64(PATIENCE), T.min(team["patience"] * 2, i64(MOST_PATIENCE)))
            _put(job, "patience", T.if_then_else(failed, longer, i64(PATIENCE)))
            _put(job, "grow_at", now + team["patience"])
            _put(job, "team", team["team"] - 1)
            _put(job, "scarce", i64(MOST_SCARCE))
            _put(job, "lost", i64(0))


class _Team:
    """The numbers of a job by their names."""

    def __init__(self, job: Buffer) -> None:
        self._job = job

    def __getitem__(self, name: str) -> Value:
        return self._job[Job.slot(name)]


def _is_judged(team: _Team) -> Value:
    return T.And(team["fixed"] == 0, T.And(team["kind"] >= Job.STEP, team["kind"] != Job.APPLY))


def _put(job: Buffer, name: str, value: Value) -> None:
    T.buffer_store(job, value, [Job.slot(name)])
