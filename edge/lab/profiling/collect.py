"""Measures a model on this device, one engine after the other, and assembles a profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from edge.backends import backend_names, find_backend
from edge.devices.cores import core_kinds
from edge.devices.host import Host, probe_host
from edge.devices.power import sensors_root
from edge.devices.probe import measure_ceilings
from edge.errors import EdgeError, InputError
from edge.lab.profiling.ceilings import measure_gpu
from edge.lab.profiling.child import Job, Loaded, Operators, run_in_child
from edge.lab.profiling.measure import OnStep, part_of
from edge.lab.profiling.profile import (
    LOAD_S,
    DeviceFacts,
    EngineProfile,
    KindCeilings,
    Profile,
    Roofs,
    Settings,
    Verdict,
    model_facts,
)
from edge.lab.profiling.verdict import evidence_of, judge
from edge.model.model import Model
from edge.storage.versions import own_versions
from edge.values import parse

ORACLE = "reference"  # correct and slow: measured only if the user names it

_CEILINGS_S, _QUICK_CEILINGS_S = 4.0, 1.0


@dataclass(frozen=True)
class Engines:
    """The engines to measure."""

    names: list[str]  # the choice of `auto` first
    missing: dict[str, str]  # why the others are not measured, by name


def choose_engines(model: Model, wanted: Sequence[str], kv_dtype: str | None) -> Engines:
    """All engines that can run this model, or those of `wanted`.

    Raises the error of a wanted engine that cannot run it, and the last engine's error if none can.
    """
    names = [each for each in backend_names() if each != ORACLE] if not wanted else list(dict.fromkeys(wanted))
    able, missing, last = [], dict[str, str](), None
    for name in names:
        try:
            found = find_backend(name, model.file, model.spec, kv_dtype)
            if kv_dtype not in (None, *found.CAPABILITIES.kv_dtypes):
                raise InputError(f"{name} has no KV dtype {kv_dtype!r}: {', '.join(found.CAPABILITIES.kv_dtypes)}")
            able += [found.NAME] if found.NAME not in able else []
        except EdgeError as error:
            if wanted:
                raise
            missing[name], last = str(error), error
    if not able and last is not None:
        raise last
    return Engines(able, missing)


def collect(
    model: Model, called: str, engines: Engines, settings: Settings, *, quick: bool, again: str, on_step: OnStep
) -> Profile:
    """Measure the engines. called: the user's name for the model. again: the user's command for the same measurement.

    Leaves out engines that fail, with the reason; raises the last one's error if none is left.
    """
    started, host = time.perf_counter(), probe_host()
    missing, found, failure = dict(engines.missing), list[EngineProfile](), None
    ceilings_s = _QUICK_CEILINGS_S if quick else _CEILINGS_S
    parts = [*(settings.engine_s for _ in engines.names), ceilings_s]
    for number, name in enumerate(engines.names):
        try:
            found.append(_measure(model, name, settings, part_of(on_step, parts, number)))
        except EdgeError as error:
            missing[name], failure = str(error), error
    if not found:
        raise failure or InputError("no engine to measure")
    on_gpu = any(each.on_gpu for each in found)
    roofs = measure_roofs(found[0].threads, ceilings_s, part_of(on_step, parts, len(engines.names)), on_gpu=on_gpu)
    profile = Profile(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        quick=quick,
        settings=settings,
        device=_device(host),
        model=model_facts(model, called),
        roofs=roofs,
        engines=found,
        missing=missing,
        verdict=Verdict("unknown", "", []),
        versions=own_versions(),
    )
    return replace(profile, verdict=judge(evidence_of(profile, again)))


def _measure(model: Model, name: str, settings: Settings, on_step: OnStep) -> EngineProfile:
    """Measure one engine: load it once to compile or convert, then measure it, then its operators."""
    stages, parts = ("load", "measure", "operators"), (LOAD_S, sum(settings.stages_s), settings.operators_s)

    def ask(stage: Literal["load", "measure", "operators"], measured: EngineProfile | None = None) -> dict[str, Any]:
        step = part_of(lambda what, share: on_step(f"{name}: {what}", share), parts, stages.index(stage))
        step("loading for the first time" if stage == "load" else "loading", 0.0)
        return run_in_child(Job(stage, str(model.path.absolute()), name, settings, measured), step)

    first_load = parse(Loaded, ask("load")).seconds
    profile = replace(parse(EngineProfile, ask("measure")), first_load_s=first_load)
    try:
        told = parse(Operators, ask("operators", profile))
        return replace(profile, operators=told.phases, operators_peak=told.peak)
    except EdgeError as error:
        return replace(profile, operators_reason=str(error))


def measure_roofs(threads: int, seconds: float, on_step: OnStep, *, on_gpu: bool) -> Roofs | None:
    """The ceilings; None if they cannot be measured: the rest of the profile is useful without them."""
    what = "what this device can do at most"
    on_step(what, 0.0)
    try:
        measured = measure_ceilings(threads, seconds, lambda share: on_step(what, share))
    except EdgeError:
        return None
    gpu = None
    if on_gpu:
        with suppress(EdgeError):
            gpu = measure_gpu(seconds / 4)
    kinds = _kinds(seconds, on_step)
    return Roofs(measured.read_bytes_per_s, measured.f32_flops, measured.int8_ops, measured.threads, gpu, kinds)


def _kinds(seconds: float, on_step: OnStep) -> list[KindCeilings]:
    """The ceilings of each kind of cores; empty if there is only one kind."""
    kinds, found = core_kinds(sensors_root()), list[KindCeilings]()
    for each in kinds if len(kinds) > 1 else ():
        on_step(f"what {each.name} can do at most", 1.0)
        with suppress(EdgeError):
            most = measure_ceilings(each.cores, seconds / 2, cpus=each.cpus)
            found.append(
                KindCeilings(each.name, each.cores, each.mhz, most.read_bytes_per_s, most.f32_flops, most.int8_ops)
            )
    return found


def _device(host: Host) -> DeviceFacts:
    return DeviceFacts(
        name=host.processor,
        system=host.system,
        machine=host.machine,
        physical_cores=host.physical_cores,
        usable_cores=host.usable_cores,
        instruction_sets=list(host.instruction_sets),
        caches=host.caches,
        memory=host.memory,
    )
