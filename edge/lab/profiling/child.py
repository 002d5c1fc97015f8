"""Measures one engine in a child process, which isolates its peak memory and crashes.

The child receives a job, reports every step (see edge.devices.child), and answers as `run_job` does.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge.backends import find_backend
from edge.backends.base import Backend
from edge.devices.child import Say, run_child, serve
from edge.devices.load import others_from_now
from edge.devices.memory import memory_use
from edge.devices.memory.mappings import mapped_files
from edge.devices.power import find_meter
from edge.errors import BudgetError
from edge.lab.prediction.efficiency import weight_shares
from edge.lab.profiling.measure import (
    OnStep,
    Runner,
    measure_curve,
    measure_operators,
    measure_speeds,
    measure_sustained,
    part_of,
)
from edge.lab.profiling.memory import Sampler, memory_base
from edge.lab.profiling.profile import Energy, EngineProfile, PhaseOperators, Settings, Timeline, beyond_power
from edge.model.model import Model
from edge.options import Options
from edge.plan.kv_losses import find_losses
from edge.plan.plan import Plan, make_plan
from edge.run.session import Session
from edge.run.starting.opening import open_model
from edge.values import parse


@dataclass(frozen=True)
class Job:
    """A job for the child process. Stage "load" loads and closes the engine, which compiles or converts missing
    files."""

    stage: Literal["load", "measure", "operators"]  # operators: instrumented
    model: str
    engine: str
    settings: Settings
    measured: EngineProfile | None = None  # result of stage "measure", for stage "operators"


@dataclass(frozen=True)
class Loaded:
    """The answer of stage "load"."""

    seconds: float


@dataclass(frozen=True)
class Operators:
    """The answer of stage "operators"."""

    phases: list[PhaseOperators]
    peak: int  # of the process's resident set, bytes


def run_in_child(job: Job, on_step: OnStep) -> dict[str, Any]:
    """Run a job in a child and return its answer. Raises the child's EdgeError, or EngineError if it died."""
    result: dict[str, Any] = run_child(
        "edge.lab.profiling.child",
        asdict(job),
        lambda said: on_step(said["doing"], said["share"]),
        failure=f"the {job.engine} engine could not be measured",
    )
    return result


def run_job(job: Job, on_step: OnStep) -> dict[str, Any]:
    """Run a job. Returns a Loaded, EngineProfile or Operators, as JSON data. Raises EdgeError."""
    settings, model, options = job.settings, open_model(job.model), job.settings.options()
    backend = find_backend(job.engine, model.file, model.spec, settings.kv_dtype)
    if job.stage == "operators":
        assert job.measured is not None
        phases = measure_operators(model, backend, job.measured, settings.operators_s, on_step)
        return asdict(Operators(phases, memory_use().peak))
    if job.stage == "measure":
        return asdict(_measure(settings, model, backend, on_step))
    plan = make_plan(model.spec, backend, options, losses=find_losses(model.file, backend, options))
    started = time.perf_counter()
    with Session(model, backend, plan, Options()):  # without a limit: compiling is not part of a run
        return asdict(Loaded(time.perf_counter() - started))


def _measure(settings: Settings, model: Model, backend: Backend, on_step: OnStep) -> EngineProfile:
    options, meter, notes = settings.options(), find_meter(), list[str]()
    with Sampler() as sampler:
        sampler.mark("start")
        plan = make_plan(model.spec, backend, options, losses=find_losses(model.file, backend, options))
        files, before, joules = mapped_files(), sampler.sample_memory(), meter.read().joules
        sampler.mark("load")
        on_step("loading", 0.0)
        started = time.perf_counter()
        with Session(model, backend, plan, options, meter=meter) as session:
            load_s, load_joules = time.perf_counter() - started, meter.read().joules - joules
            runner = Runner(session, backend, meter, sampler)
            free = plan.config.capacity - settings.answer
            if free < 1:
                raise BudgetError(f"{plan.config.capacity} KV rows are too few for {settings.answer} tokens of answer")
            prompt = min(settings.prompt, free)
            if prompt < settings.prompt:
                notes.append(f"prompts of {prompt:,} instead of {settings.prompt:,} tokens, {_room(plan)}")
            on_part = [part_of(on_step, settings.stages_s, stage) for stage in range(3)]
            others = others_from_now()
            speeds = measure_speeds(runner, prompt, settings, on_part[0])
            taken = others()
            warm = sampler.sample_memory()
            contexts = [each for each in settings.contexts if each <= free]
            curve, end = measure_curve(runner, contexts, settings, on_part[1])
            if end is None and len(contexts) < len(settings.contexts):
                end = _room(plan)
            sustained = None
            if settings.sustained_s:
                most = plan.config.capacity - prompt
                sustained, hopeless = measure_sustained(runner, prompt, most, settings, on_part[2])
                if hopeless:
                    notes.append(beyond_power(settings))
            base = memory_base(plan, before, warm, files, mapped_files())
        reading = meter.read()
    return EngineProfile(
        engine=plan.backend,
        versions=backend.versions(),
        plan=plan,
        integers=weight_shares(model.spec, plan.backend, plan.config).get("integers", 0.0),
        first_load_s=load_s,
        load_s=load_s,
        ttft=speeds.ttft,
        prefill=speeds.prefill,
        decode=speeds.decode,
        curve=curve,
        curve_end=end,
        timeline=Timeline(
            memory_use().peak,
            base,
            sampler.samples,
            sampler.marks,
            sampler.climate,
            sampler.sensor,
            sampler.trip,
            sampler.peak_anonymous,
            sampler.peak_swap,
        ),
        energy=Energy(reading.source, reading.kind, reading.scope, load_joules),
        kv_dtypes=list(backend.CAPABILITIES.kv_dtypes),
        others=taken,
        sustained=sustained,
        notes=notes,
        on_gpu=backend.CAPABILITIES.gpu,
    )


def _room(plan: Plan) -> str:
    return f"the cache has {plan.config.capacity:,} rows"


def _answer(request: Any, say: Say) -> object:
    try:
        return run_job(parse(Job, request), lambda what, share: say({"doing": what, "share": share}))
    except MemoryError:
        raise BudgetError("out of memory: state a smaller --memory") from None


if __name__ == "__main__":
    serve(_answer)
