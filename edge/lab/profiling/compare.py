"""Comparison of two profiles: every figure of both, and their ratio."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from edge.budget import format_bytes
from edge.devices.load import DISTURBED
from edge.lab.profiling.profile import EngineProfile, Profile
from edge.lab.profiling.sustained import Spread

_LEAST = 3  # values that a meaningful spread needs

Unit = Literal["s", "tok/s", "B", "J", "B/s", "flop/s", ""]


@dataclass(frozen=True)
class Compared:
    """A figure of both profiles."""

    what: str
    first: float | None
    second: float | None
    ratio: float | None  # second / first; None: a figure is missing or they do not match
    better: Literal["more", "less"]  # direction of improvement
    sure: bool | None  # whether the ranges p10 to p90 are disjoint; None: no spread to judge by
    unit: Unit


@dataclass(frozen=True)
class Comparison:
    """The comparison of two profiles."""

    first: str
    second: str
    rows: list[Compared]
    differences: list[str]  # other differences between the profiles, which affect ratios, too
    notes: list[str]  # disturbances of the figures, and the figures that rank on devices that throttle


def compare_profiles(first: Profile, second: Profile, first_name: str, second_name: str) -> Comparison:
    """Compare the engines that both profiles have, and the devices' ceilings."""
    rows = list(_ceilings(first, second))
    others = {each.engine: each for each in second.engines}
    for engine in first.engines:
        if engine.engine in others:
            rows += _engine(engine, others[engine.engine])
    differences = list(_differences(first, second, first_name, second_name))
    notes = [*_notes(first, first_name, others), *_notes(second, second_name, {each.engine for each in first.engines})]
    return Comparison(first_name, second_name, rows, differences, notes)


def _notes(profile: Profile, name: str, compared: Container[str]) -> Iterator[str]:
    """Notes on CPU time of other processes, and on the figures that rank where a device throttles."""
    for engine in profile.engines:
        if engine.engine not in compared:
            continue
        if (engine.others or 0.0) >= DISTURBED:
            yield f"{name}: other programs took {engine.others:.0%} of the cores while {engine.engine} was measured"
        if engine.sustained and (most := engine.sustained.others) >= DISTURBED:
            yield f"{name}: other programs took up to {most:.0%} of the cores in the long run of {engine.engine}"
        if engine.throttled:
            yield f"{name} throttles: of {engine.engine}, the end of the long run ranks, not the speed at first"


def _engine(one: EngineProfile, other: EngineProfile) -> Iterator[Compared]:
    name = one.engine
    yield _speed(f"{name}: answer", one.decode.per_token, other.decode.per_token)
    yield _speed(f"{name}: prompt", one.prefill.per_token, other.prefill.per_token)
    first_token = _row(f"{name}: first token", one.ttft.p50, other.ttft.p50, "less", "s")
    yield replace(first_token, sure=_apart(one.ttft, other.ttft))
    yield _row(f"{name}: load", one.load_s, other.load_s, "less", "s")
    points = {each.context: each for each in other.curve}
    for point in one.curve:
        if point.context in points:
            yield _speed(f"{name}: answer at context {point.context:,}", point.decode, points[point.context].decode)
    yield _row(f"{name}: peak memory", one.timeline.peak, other.timeline.peak, "less", "B")
    how = " / ".join(dict.fromkeys(each.energy.certainty for each in (one, other)))
    spent = _row(
        f"{name}: energy per token, {how}", one.decode.joules_per_token, other.decode.joules_per_token, "less", "J"
    )
    alike = (one.energy.source, one.energy.kind) == (other.energy.source, other.energy.kind)
    yield spent if alike else replace(spent, ratio=None)
    if one.sustained and other.sustained:
        mine, yours = one.sustained.last, other.sustained.last
        last = _row(f"{name}: answer at the end of a long run", mine.tok_s, yours.tok_s, "more", "tok/s")
        paused = one.sustained.paused or other.sustained.paused  # times of single tokens exclude pauses
        yield last if paused else replace(last, sure=_apart(mine.per_token, yours.per_token))
        then = _row(
            f"{name}: energy per token there, {how}", mine.joules_per_token, yours.joules_per_token, "less", "J"
        )
        yield then if alike else replace(then, ratio=None)
        yield _row(f"{name}: end of it / its beginning", one.sustained.ratio, other.sustained.ratio, "more", "")


def _ceilings(first: Profile, second: Profile) -> Iterator[Compared]:
    one, other = first.roofs, second.roofs
    if one and other:
        yield _row("memory read", one.read_bytes_per_s, other.read_bytes_per_s, "more", "B/s")
        if one.gpu and other.gpu:
            yield _row("GPU memory read", one.gpu.read_bytes_per_s, other.gpu.read_bytes_per_s, "more", "B/s")
        yield _row("float32 products", one.f32_flops, other.f32_flops, "more", "flop/s")


def _row(
    what: str, first: float | None, second: float | None, better: Literal["more", "less"], unit: Unit
) -> Compared:  # fmt: skip
    """Compare single values."""
    ratio = second / first if first and second is not None else None
    if ratio is not None and not math.isfinite(ratio):
        ratio = None
    return Compared(what, first, second, ratio, better, None, unit)


def _speed(what: str, first: Spread, second: Spread) -> Compared:
    """Compare seconds per token."""
    return replace(_row(what, 1 / first.p50, 1 / second.p50, "more", "tok/s"), sure=_apart(first, second))


def _apart(first: Spread, second: Spread) -> bool | None:
    """Whether p10 to p90 are disjoint; None: too few values."""
    if min(first.count, second.count) < _LEAST:
        return None
    return first.p90 < second.p10 or second.p90 < first.p10


def _differences(first: Profile, second: Profile, one: str, other: str) -> Iterator[str]:
    pairs = [
        ("device", first.device.name, second.device.name),
        ("model", f"{first.model.name} ({first.model.label})", f"{second.model.name} ({second.model.label})"),
        ("quick", str(first.quick).lower(), str(second.quick).lower()),
        *(
            (name, _said(name, value), _said(name, getattr(second.settings, name)))
            for name, value in vars(first.settings).items()
        ),
        *((name, value, second.versions.get(name, "none")) for name, value in first.versions.items()),
    ]
    for engine in first.engines:
        match = next((each for each in second.engines if each.engine == engine.engine), None)
        if match is None:
            yield f"{engine.engine} was measured for {one} only"
            continue
        for what, mine, yours in _engine_pairs(engine, match):
            pairs.append((f"{engine.engine}: {what}", mine, yours))
    for engine in second.engines:
        if engine.engine not in {each.engine for each in first.engines}:
            yield f"{engine.engine} was measured for {other} only"
    for what, mine, yours in pairs:
        if mine != yours:
            yield f"{what}: {mine} / {yours}"


def _said(name: str, value: object) -> str:
    """A setting in words."""
    if value is None:
        return "not stated"
    if name == "memory" and isinstance(value, int):
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _engine_pairs(one: EngineProfile, other: EngineProfile) -> Iterator[tuple[str, str, str]]:
    yield "threads", str(one.threads), str(other.threads)
    for name in ("capacity", "kv_dtype", "chunk"):
        yield name, str(getattr(one.plan.config, name)), str(getattr(other.plan.config, name))
    yield "tuned", one.plan.tuned, other.plan.tuned
    mine, yours = (f"{each.energy.certainty}: {each.energy.source}" for each in (one, other))
    yield "joules", mine, yours
