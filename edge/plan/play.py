"""Google Play's thresholds of an app's memory, and a plan's use of them.

Google Play counts pages that no file backs, in memory and in swap. Weights that are mapped from a file do not count.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from edge.devices.profiles.profile import DeviceProfile
from edge.plan.plan import Plan
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Tier:
    """Thresholds of phones of one size, in MiB."""

    memory: int  # GiB of RAM
    foreground: int
    service: int
    background: int


@dataclass(frozen=True)
class Thresholds:
    """play.toml."""

    source: str
    since: str
    tiers: list[Tier]


@dataclass(frozen=True)
class PlayUse:
    """The part of Google Play's thresholds that an app's model takes. Bytes."""

    counted: int  # estimated: RssAnon and VmSwap together, at most; the rest of the app comes on top
    mapped: int  # estimated: pages of files, which do not count
    memory: int  # of the phones to which the thresholds apply
    foreground: int
    service: int
    background: int
    since: str
    source: str


def play_use(plan: Plan, profile: DeviceProfile) -> PlayUse | None:
    """A plan's use of the thresholds; None for devices without Google Play or of unknown memory, and for GPUs, whose
    drivers have memory of other kinds."""
    if profile.system != "android" or not profile.memory or plan.bytes.gpu:
        return None
    known, memory = thresholds(), profile.memory
    tier = min(known.tiers, key=lambda each: abs((each.memory << 30) - memory))
    mapped = plan.bytes.weights if plan.maps_weights else 0
    return PlayUse(
        counted=plan.predicted_peak - mapped,
        mapped=mapped,
        memory=tier.memory << 30,
        foreground=tier.foreground << 20,
        service=tier.service << 20,
        background=tier.background << 20,
        since=known.since,
        source=known.source,
    )


@cache
def thresholds() -> Thresholds:
    text = files("edge.plan").joinpath("play.toml").read_text(encoding="utf-8")
    return parse(Thresholds, tomllib.loads(text), strict=True)
