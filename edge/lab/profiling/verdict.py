"""The verdict: the limit of this device in one sentence, and commands to try, concluded by the rules below.

The first rule that applies decides: weights that do not stay in memory, heat, a cache smaller than requested, an engine
that is not built for speed; then CPU time of other processes, which disturb ceilings, too; then memory bandwidth or
arithmetic, if decode comes near a measured ceiling; then threads that wait for each other. The rest counts as overhead.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from edge.backends import engine_named
from edge.budget import format_bytes
from edge.devices.profiles.profile import SLOWER
from edge.lab.profiling.profile import EngineProfile, Limit, Profile, Verdict
from edge.lab.profiling.sustained import TAKEN, Sustained

_NEAR = 0.6  # share of a ceiling that counts as limited by it: no engine reaches all of it
_CACHED = 1.1  # share of the memory's bandwidth beyond which bytes come from caches
_HOT_MARGIN = 3.0  # °C below the trip point: hotter counts as hot
_COOL_MARGIN = 20.0  # °C below the trip point: cooler excludes heat as a reason
_HELD_BACK = 0.95  # share of the clock below which it counts as held back
_WAITING = 0.25  # share of all threads' time
_MANY_BITS = 5.0  # per weight: with more, smaller weights are worth a try
_MUCH_KV = 0.2  # share of the bytes that a token reads
_MOST = 0.5
_UNSTEADY = 2.0
_FASTER = 1.1  # another engine


@dataclass(frozen=True)
class Evidence:
    """Figures of the engine that a run would choose. Shares are fractions, which may exceed 1; None: not measured."""

    model: str  # as the user calls it
    engine: str
    threads: int
    tok_s: float  # of answers
    again: str = ""  # the command that repeats the measurement
    bytes_per_token: float = 0.0  # read for a token of the answer
    kv_share: float = 0.0  # share of KV rows in these bytes
    longest: int = 0  # context of the curve
    longest_kv_share: float = 0.0  # share of KV rows in the bytes that a token reads there
    cores: int = 0  # that engines could use
    bytes_per_s: float | None = None
    bandwidth: float | None = None  # bytes_per_s as a share of the measured ceiling
    compute: float | None = None  # operations of an answer, likewise
    sustained: float | None = None  # speed of the last window / of the first
    window_s: float = 60.0  # of a long run
    sustained_others: float = 0.0  # largest share of all cores' time of other processes in one of its windows
    cooled: float | None = None  # clock of the last window / of the first
    celsius: float | None = None  # highest
    trip: float | None = None  # °C at which the kernel slows the device down
    allowed: float | None = None  # least clock limit / top clock
    watts: float | None = None  # while answering
    others: float = 0.0  # share of all cores' time of other processes while answers were timed
    unsteady: float = 1.0  # median time of a token / time of the fastest tenth (p10)
    waited: float | None = None  # share of the threads' time spent waiting for each other
    rows: int = 0  # of the KV cache
    wanted_rows: int = 0
    needed: int = 0  # bytes of a run with the wanted rows, in all
    limit: int = 0  # bytes of memory
    limit_source: str = ""
    streamed: bool = False  # weights are read from storage again and again
    bits: float = 0.0  # per weight
    kv_dtype: str = "f16"
    kv_dtypes: tuple[str, ...] = ()  # that the engine has
    tuned: bool = True  # True, too, for engines that cannot be tuned
    faster: tuple[str, float] | None = None  # a faster engine, and its speed-up


def judge(found: Evidence) -> Verdict:
    limit, sentence, advice = _first(found)
    return Verdict(limit, sentence, [*advice, *_general(found, limit)])


_Found = tuple[Limit, str, list[tuple[str, str]]]


def _first(found: Evidence) -> _Found:
    for rule in (_streaming, _heat, _memory, _oracle, _neighbours, _ceilings, _waiting):
        if answer := rule(found):
            return answer
    return _nothing(found)


def _streaming(found: Evidence) -> _Found | None:
    if not found.streamed:
        return None
    return (
        "streaming",
        f"The memory limit of {format_bytes(found.limit)} limits this run: the weights do not stay in it and are read "
        f"from their file for every token, at {_speed(found)}.",
        [_more_memory(found, "with room for all weights nothing is read twice"), *_fewer_bits(found)],
    )


def _heat(found: Evidence) -> _Found | None:
    slower = found.sustained is not None and found.sustained < SLOWER
    hot = found.celsius is not None and found.trip is not None and found.celsius >= found.trip - _HOT_MARGIN
    held = found.allowed is not None and found.allowed < _HELD_BACK
    clocked_down = found.cooled is not None and found.cooled < _HELD_BACK
    if not slower and not (hot and held):
        return None
    signs = [
        f"{found.celsius:.0f} °C" if hot and found.celsius is not None else "",
        f"the clock held to {found.allowed:.0%} of its top" if held and found.allowed is not None else "",
        f"the clock down to {found.cooled:.0%}" if clocked_down and found.cooled is not None else "",
    ]
    shown = " and ".join(filter(None, signs))
    cool = found.celsius is not None and found.trip is not None and found.celsius < found.trip - _COOL_MARGIN
    if not shown and (cool or found.sustained_others >= TAKEN):
        return None  # CPU time of other processes explains it
    shown = shown or "no sensor here says why"
    window = "minute" if found.window_s >= 60 else f"{found.window_s:g} s"
    kept = f"{found.sustained:.0%} of the speed of its first {window} is left at the end" if slower else "it runs hot"
    return (
        "heat",
        f"Heat, or what holds the clock back, limits long answers on this device: {kept} ({shown}).",
        list(_cooler(found)),
    )


def _memory(found: Evidence) -> _Found | None:
    if found.rows >= found.wanted_rows:
        return None
    source = "the stated --memory" if found.limit_source == "budget" else found.limit_source
    advice = [_more_memory(found, f"room for {found.wanted_rows:,} rows")] if found.needed else []
    return (
        "memory budget",
        f"The memory limit limits this run: {format_bytes(found.limit)} ({source}) have room for {found.rows:,} of the "
        f"{found.wanted_rows:,} KV rows that were asked for.",
        [*advice, *_smaller_rows(found)],
    )


def _oracle(found: Evidence) -> _Found | None:
    if found.engine != "reference":
        return None
    sentence = (
        f"The reference engine limits these answers, at {_speed(found)}: it is made to be right, not to be fast, and "
        "says nothing of this device."
    )
    return "overhead", sentence, [("engines that are made to be fast", f"edge profile {_name(found)}")]


def _ceilings(found: Evidence) -> _Found | None:
    bandwidth, compute = found.bandwidth or 0.0, found.compute or 0.0
    if found.bytes_per_s is None or max(bandwidth, compute) < _NEAR:
        return None
    if bandwidth > max(_CACHED, compute) and (found.waited or 0.0) >= _WAITING:
        return None  # memory bandwidth does not limit reads from caches
    some = found.threads < found.cores
    given = f" to {_threads(found.threads)}" if some else ""
    each = (
        f"each token reads {format_bytes(found.bytes_per_token)}, {found.bytes_per_s / 1e9:.3g} GB/s at {_speed(found)}"
    )
    if compute > bandwidth:
        sentence = (
            f"Arithmetic limits answers on this device: they compute at {compute:.0%} of the rate that was measured as "
            f"its best{f' of {_threads(found.threads)}' if some else ''}, while memory is at {bandwidth:.0%}."
        )
        return "compute", sentence, list(_other_threads(found))
    if bandwidth > _CACHED:
        sentence = (
            f"Reading limits answers on this device: {each}, which is {bandwidth:.1f} × what its memory was measured "
            f"to deliver{given}, so caches hold much of this model."
        )
    else:
        sentence = (
            f"Memory bandwidth limits answers on this device: {each}, which is {bandwidth:.0%} of what it was measured "
            f"to deliver{given}."
        )
    more = list(_other_threads(found)) if some else []
    return "memory bandwidth", sentence, [*_fewer_bytes(found), *more]


def _neighbours(found: Evidence) -> _Found | None:
    if found.others >= TAKEN:
        sign = f"they took {found.others:.0%} of the cores' time while answers came at {_speed(found)}"
    elif found.unsteady >= _UNSTEADY:
        sign = f"half of the tokens took at least {found.unsteady:.1f} × as long as the fastest tenth"
    else:
        return None
    sentence = f"Other programs limit answers at this moment: {sign}, which says little about this device."
    again = found.again or f"edge profile {_name(found)}"
    return "other programs", sentence, [("measure when nothing else runs", again)]


def _waiting(found: Evidence) -> _Found | None:
    if found.waited is None or found.waited < _WAITING:
        return None
    sentence = (
        f"Threads that wait for each other limit answers on this device: {found.waited:.0%} of the time of "
        f"{_threads(found.threads)} goes by that way."
    )
    fewer = [("fewer threads wait less", _bench(found, found.threads - 1))] if found.threads > 1 else []
    return "overhead", sentence, fewer


def _nothing(found: Evidence) -> _Found:
    if found.bandwidth is None or found.compute is None:
        sentence = (
            f"What limits this device is unknown: answers come at {_speed(found)}, but its ceilings were not measured."
        )
        return "unknown", sentence, [("measure the ceilings alone, or see why not", "edge devices probe")]
    sentence = (
        f"Neither memory ({_percent(found.bandwidth)} of its measured bandwidth) nor arithmetic "
        f"({_percent(found.compute)}) limits answers at {_speed(found)}: what is left is the engine's own overhead, or "
        "other programs on these cores."
    )
    return "overhead", sentence, list(_other_threads(found))


def _general(found: Evidence, limit: Limit) -> Iterator[tuple[str, str]]:
    """Advice that holds for any limit; none that rests on figures disturbed by other processes."""
    if limit == "other programs":
        return
    if found.faster and found.faster[1] >= _FASTER:
        name, times = found.faster
        yield f"{name} was {times:.1f} × as fast here", f"edge run {_name(found)} --backend {name}"
    if not found.tuned and limit not in ("streaming", "memory budget"):
        yield "settings for this very processor, measured", f"edge tune {_name(found)}"
    if found.sustained is None and found.engine != "reference" and limit not in ("heat", "streaming", "memory budget"):
        command = f"edge profile {_name(found)} --backend {found.engine} --sustained 5m"
        yield "whether it stays this fast when it gets warm", command


def _fewer_bytes(found: Evidence) -> Iterator[tuple[str, str]]:
    rows = list(_smaller_rows(found)) if max(found.kv_share, found.longest_kv_share) >= _MUCH_KV else []
    bits = list(_fewer_bits(found))
    yield from [*rows, *bits] if found.kv_share > _MOST else [*bits, *rows]


def _fewer_bits(found: Evidence) -> Iterator[tuple[str, str]]:
    if found.bits > _MANY_BITS:
        why = f"fewer bytes per token: weights have {found.bits:.1f} bits"
        yield why, f"edge quantize {_name(found)} small.gguf q4_0"


def _smaller_rows(found: Evidence) -> Iterator[tuple[str, str]]:
    if found.kv_dtype == "f16" and "int8" in found.kv_dtypes:
        share = ""
        if found.kv_share >= _MUCH_KV:
            share = f", {found.kv_share:.0%} of what a token reads"
        elif found.longest_kv_share >= _MUCH_KV:
            share = f", {found.longest_kv_share:.0%} of what a token reads at context {found.longest:,}"
        yield f"KV rows of half the size{share}", f"edge run {_name(found)} --kv-dtype int8"


def _cooler(found: Evidence) -> Iterator[tuple[str, str]]:
    if found.watts:
        yield "hold less power, evenly", f"edge run {_name(found)} --power {found.watts * 0.8:.2g}W"
    if found.celsius is not None:
        below = (found.trip or found.celsius) - 5
        yield "stay below where the device slows itself down", f"edge run {_name(found)} --max-temp {below:.0f}C"
    if found.threads > 1:
        yield "fewer threads heat less", f"edge run {_name(found)} --threads {found.threads - 1}"


def _more_memory(found: Evidence, why: str) -> tuple[str, str]:
    return why, f"edge run {_name(found)} --memory {-(-found.needed // (1 << 20))}MiB"


def _other_threads(found: Evidence) -> Iterator[tuple[str, str]]:
    """Advice for more threads if cores are idle, else fewer; none for a single thread."""
    if found.threads < found.cores:
        yield f"this device has {found.cores} cores", _bench(found, found.cores)
    elif found.threads > 1:
        yield "the fastest number of threads may be another", _bench(found, found.threads - 1)


def _bench(found: Evidence, threads: int) -> str:
    return f"edge bench {_name(found)} --backend {found.engine} --threads {threads}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _speed(found: Evidence) -> str:
    return f"{found.tok_s:,.0f} tok/s" if found.tok_s >= 100 else f"{found.tok_s:.3g} tok/s"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _name(found: Evidence) -> str:
    return shlex.quote(found.model)


def evidence_of(profile: Profile, again: str = "") -> Evidence:
    """The evidence about the first engine, which a run would choose. again: the command that repeats the
    measurement."""
    engine, roofs = profile.engines[0], profile.roofs
    decode, plan = engine.decode, engine.plan
    climate, sustained = engine.timeline.climate, engine.sustained
    longest = max((each.context for each in engine.curve), default=0)
    return Evidence(
        model=profile.model.name,
        again=again,
        engine=engine.engine,
        threads=engine.threads,
        tok_s=decode.tok_s,
        bytes_per_token=(decode.bytes_per_s or 0.0) * decode.per_token.p50,
        kv_share=_kv_share(engine, engine.decode.context),
        longest=longest,
        longest_kv_share=_kv_share(engine, longest),
        cores=profile.device.usable_cores,
        bytes_per_s=decode.bytes_per_s,
        bandwidth=_share(decode.bytes_per_s, roofs.reading(engine) if roofs else None),
        compute=_share(decode.flops_per_s, roofs.computing(engine) if roofs else None),
        sustained=sustained.unpaused_ratio if sustained else None,
        window_s=sustained.length if sustained else 60.0,
        sustained_others=sustained.others if sustained else 0.0,
        cooled=_cooled(sustained),
        celsius=max((each.celsius for each in climate if each.celsius is not None), default=None),
        trip=engine.timeline.trip,
        allowed=min((each.allowed for each in climate if each.allowed is not None), default=None),
        watts=decode.watts,
        rows=plan.config.capacity,
        wanted_rows=_wanted(profile),
        needed=_needed(profile),
        limit=plan.limit,
        limit_source=plan.limit_source,
        streamed=bool(plan.config.resident),
        bits=8 * profile.model.weight_bytes / profile.model.parameters,
        kv_dtype=plan.config.kv_dtype,
        kv_dtypes=tuple(engine.kv_dtypes),
        tuned=not engine_named(engine.engine).CAPABILITIES.tunable or plan.tuned != "default",
        others=engine.others or 0.0,
        unsteady=decode.per_token.p50 / decode.per_token.p10,
        waited=_waited(engine),
        faster=_faster(profile),
    )


def _share(value: float | None, most: float | None) -> float | None:
    return value / most if value is not None and most else None


def _kv_share(engine: EngineProfile, context: int) -> float:
    """The share of KV rows in the bytes that a decoded token reads at this context, counted."""
    decode, plan = engine.decode, engine.plan
    read = (decode.bytes_per_s or 0.0) * decode.per_token.p50
    fixed = plan.bytes.fixed_kv
    row, middle = (plan.bytes.kv - fixed) / plan.config.capacity, decode.tokens / 2
    there = read + row * (context - decode.context)
    return min(1.0, (fixed + row * (context + middle)) / there) if read and there > 0 else 0.0


def _cooled(sustained: Sustained | None) -> float | None:
    """The clock in the last window / in the first."""
    if sustained is None:
        return None
    first, last = sustained.first.hertz, sustained.last.hertz
    return last / first if first and last else None


def _wanted(profile: Profile) -> int:
    """KV rows that the settings ask for; with --kv-memory, those that fit."""
    settings = profile.settings
    if settings.kv_memory:
        return profile.engines[0].plan.config.capacity
    return settings.max_kv_size or settings.rows


def _needed(profile: Profile) -> int:
    """Bytes that the first engine would take with all wanted rows."""
    plan = profile.engines[0].plan
    count = plan.bytes
    weights = profile.model.weight_bytes if plan.config.resident else 0  # only a part of them is planned as resident
    more = max(0, weights - count.weights) + count.kv * max(0.0, _wanted(profile) / plan.config.capacity - 1)
    return int(count.total + count.reserve + more)


def _waited(engine: EngineProfile) -> float | None:
    """The share of threads' time spent waiting while a token is decoded; None where the engine does not tell."""
    for phase in engine.operators:
        told = [each for each in phase.operators if each.waited is not None]
        seconds = sum(each.seconds for each in told)
        if phase.name == "decode" and seconds:
            return sum(each.seconds * (each.waited or 0.0) for each in told) / seconds
    return None


def _faster(profile: Profile) -> tuple[str, float] | None:
    """The engine with the fastest decode and its speed-up over the first; None if that is the first. At the end of the
    long run if the device throttles."""
    first, best = profile.engines[0], max(profile.engines, key=lambda each: each.ranking_tok_s)
    times = best.ranking_tok_s / first.ranking_tok_s
    return (best.engine, times) if best is not first else None
