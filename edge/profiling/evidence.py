"""What a profile says of the limits of its device, as the rules of `limits.py` want it."""

from __future__ import annotations

from edge.profiling.limits import Evidence
from edge.profiling.profile import EngineProfile, Profile, Sustained


def evidence_of(profile: Profile, again: str = "") -> Evidence:
    """Of its first engine, the one that runs would use. again: the command that measures the same once more."""
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
        bandwidth=_share(decode.bytes_per_s, roofs.read_bytes_per_s if roofs else None),
        compute=_share(decode.flops_per_s, roofs.computing(engine.integers) if roofs else None),
        sustained=sustained.ratio if sustained else None,
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
        tuned=engine.engine != "tvm" or plan.tuned != "default",
        others=engine.others or 0.0,
        unsteady=decode.per_token.p50 / decode.per_token.p10,
        waited=_waited(engine),
        faster=_faster(profile),
    )


def _share(value: float | None, most: float | None) -> float | None:
    return value / most if value is not None and most else None


def _kv_share(engine: EngineProfile, context: int) -> float:
    """Of the bytes that a token of an answer reads at this context: what the rows in the cache take, counted."""
    decode, plan = engine.decode, engine.plan
    read = (decode.bytes_per_s or 0.0) * decode.per_token.p50
    row, middle = plan.bytes.kv / plan.config.capacity, decode.tokens / 2
    there = read + row * (context - decode.context)
    return min(1.0, row * (context + middle) / there) if read and there > 0 else 0.0


def _cooled(sustained: Sustained | None) -> float | None:
    """The clock in the last window / in the first."""
    if sustained is None:
        return None
    first, last = sustained.first.hertz, sustained.last.hertz
    return last / first if first and last else None


def _wanted(profile: Profile) -> int:
    """KV rows: all that were asked for, unless it was said how large the cache shall be."""
    settings = profile.settings
    if settings.kv_memory:
        return profile.engines[0].plan.config.capacity
    return settings.max_kv_size or settings.rows


def _needed(profile: Profile) -> int:
    """Bytes that the first engine would take with all rows that were wanted."""
    plan = profile.engines[0].plan
    count = plan.bytes
    weights = profile.model.weight_bytes if plan.config.resident else 0  # of which only a part was planned for
    more = max(0, weights - count.weights) + count.kv * max(0.0, _wanted(profile) / plan.config.capacity - 1)
    return int(count.total + count.reserve + more)


def _waited(engine: EngineProfile) -> float | None:
    """Of an answer's token; None where the engine does not tell."""
    for phase in engine.operators:
        told = [each for each in phase.operators if each.waited is not None]
        seconds = sum(each.seconds for each in told)
        if phase.name == "decode" and seconds:
            return sum(each.seconds * (each.waited or 0.0) for each in told) / seconds
    return None


def _faster(profile: Profile) -> tuple[str, float] | None:
    """The engine with the fastest answers, if it is another than the first."""
    first, best = profile.engines[0], max(profile.engines, key=lambda each: each.decode.tok_s)
    times = best.decode.tok_s / first.decode.tok_s
    return (best.engine, times) if best is not first else None
