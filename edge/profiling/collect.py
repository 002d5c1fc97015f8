"""Measures a model on this device, engine after engine, and puts a profile together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from edge.backends import backend_names, find_backend
from edge.devices.host import Host, probe_host
from edge.devices.probe import measure_ceilings
from edge.errors import EdgeError, InputError
from edge.opened import Model
from edge.profiling.evidence import evidence_of
from edge.profiling.job import Job, Loaded, Operators
from edge.profiling.launch import run_in_child
from edge.profiling.limits import judge
from edge.profiling.profile import (
    DeviceFacts,
    EngineProfile,
    ModelFacts,
    Profile,
    Roofs,
    Sustained,
    Verdict,
)
from edge.profiling.reader import build
from edge.profiling.settings import Settings
from edge.versions import own_versions

ORACLE = "reference"  # correct and slow: measured only if it is asked for by name

OnProgress = Callable[[str, float], None]  # what is measured, and the part of everything that is done

# Of the time that an engine takes.
_LOADED, _MEASURED, _CEILINGS = 0.15, 0.7, 0.08


@dataclass(frozen=True)
class Engines:
    """names: those to measure, what `auto` takes first. missing: why the others are not."""

    names: list[str]
    missing: dict[str, str]


def choose_engines(model: Model, wanted: Sequence[str], kv_dtype: str | None) -> Engines:
    """All that can run this model, or those of `wanted`. Raises the error of a wanted one that cannot, and of the
    last one if none can."""
    names = [each for each in backend_names() if each != ORACLE] if not wanted else list(dict.fromkeys(wanted))
    able, missing, last = [], dict[str, str](), None
    for name in names:
        try:
            found = find_backend(name, model.file, model.spec, kv_dtype)
            if kv_dtype not in (None, *found.CAPABILITIES.kv_dtypes):
                raise InputError(f"has no KV dtype {kv_dtype!r}: {', '.join(found.CAPABILITIES.kv_dtypes)}")
            able.append(found.NAME)
        except EdgeError as error:
            if wanted:
                raise
            missing[name], last = str(error), error
    if not able and last is not None:
        raise last
    return Engines(able, missing)


def collect(
    model: Model, called: str, engines: Engines, settings: Settings, *, quick: bool, on_progress: OnProgress
) -> Profile:
    """called: what the user says for the model. Engines that fail are left out, with the reason; the error of the last
    one is raised if none is left."""
    started, host = time.perf_counter(), probe_host()
    missing, found, failure = dict(engines.missing), list[EngineProfile](), None
    sustained: Sustained | None = None
    total = len(engines.names)
    for number, name in enumerate(engines.names):
        at = (1 - _CEILINGS) * number / total

        def step(what: str, share: float, name: str = name, at: float = at) -> None:
            on_progress(f"{name}: {what}", at + (1 - _CEILINGS) * share / total)

        try:
            measured, long_run = _measure(model, name, settings, step, sustained=not found)
            found.append(measured)
            sustained = sustained or long_run
        except EdgeError as error:
            missing[name], failure = str(error), error
    if not found:
        raise failure or InputError("no engine to measure")
    on_progress("what this device can do at most", 1 - _CEILINGS)
    roofs = _roofs(found[0].threads, quick=quick, on_progress=on_progress)
    profile = Profile(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        quick=quick,
        settings=settings,
        device=_device(host),
        model=_model(model, called),
        roofs=roofs,
        engines=found,
        missing=missing,
        sustained=sustained,
        verdict=Verdict("unknown", "", []),
        versions=own_versions(),
    )
    return replace(profile, verdict=judge(evidence_of(profile)))


def _measure(
    model: Model, name: str, settings: Settings, step: OnProgress, *, sustained: bool
) -> tuple[EngineProfile, Sustained | None]:
    """One engine: loaded once for what has to be compiled or converted, measured, and taken apart."""

    def ask(stage: str, first: float, last: float, **more: Any) -> dict[str, Any]:
        job = Job(stage, str(model.path.absolute()), name, settings, **more)  # type: ignore[arg-type]
        return run_in_child(job, lambda what, share: step(what, first + (last - first) * share))

    step("loading for the first time", 0.0)
    first_load = build(Loaded, ask("load", 0.0, _LOADED)).seconds
    said = ask("measure", _LOADED, _MEASURED, sustained=sustained)
    profile = replace(build(EngineProfile, said["profile"]), first_load_s=first_load)
    long_run = build(Sustained, said["sustained"]) if said["sustained"] else None
    try:
        told = build(Operators, ask("operators", _MEASURED, 1.0, measured=profile))
        return replace(profile, operators=told.phases), long_run
    except EdgeError as error:
        return replace(profile, operators_reason=str(error)), long_run


def _roofs(threads: int, *, quick: bool, on_progress: OnProgress) -> Roofs | None:
    """None where they cannot be measured: the rest of the profile is worth having."""
    try:
        measured = measure_ceilings(
            threads,
            1.0 if quick else 4.0,
            lambda share: on_progress("what this device can do at most", 1 - _CEILINGS + _CEILINGS * min(share, 1.0)),
        )
    except EdgeError:
        return None
    return Roofs(measured.read_bytes_per_s, measured.f32_flops, measured.int8_ops, measured.threads)


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


def _model(model: Model, called: str) -> ModelFacts:
    spec = model.spec
    return ModelFacts(
        called, spec.label, spec.parameters, spec.weight_bytes, spec.weight_type, spec.context
    )  # fmt: skip
