"""A process that measures one engine: its peak memory, and its crash, are its own.

It is asked for a job, says every step (see edge.devices.child), and answers as run_job does.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from edge.backends import find_backend
from edge.backends.base import Backend
from edge.budget import Budget
from edge.devices.child import Say, serve
from edge.devices.load import others_from_now
from edge.devices.mappings import mapped_files
from edge.devices.memory import memory_use
from edge.devices.power import find_meter
from edge.errors import BudgetError
from edge.model.model import Model, open_model
from edge.plan import Plan, make_plan
from edge.prediction.efficiency import weight_shares
from edge.profiling.job import Job, Loaded, Operators
from edge.profiling.memory_timeline import memory_base
from edge.profiling.operators import measure_operators
from edge.profiling.profile import Energy, EngineProfile, Timeline
from edge.profiling.progress import OnStep, part_of
from edge.profiling.reader import build
from edge.profiling.sampler import Sampler
from edge.profiling.settings import Settings
from edge.profiling.speed import Runner, measure_curve, measure_speeds
from edge.profiling.sustained import measure_sustained
from edge.run.session import Session


def run_job(job: Job, on_step: OnStep) -> dict[str, Any]:
    """What the job asks for, as JSON has it. Raises EdgeError."""
    model = open_model(job.model)
    backend = find_backend(job.engine, model.file, model.spec, job.settings.kv_dtype)
    if job.stage == "load":
        return asdict(_load(job, model, backend))
    if job.stage == "operators":
        assert job.measured is not None
        phases = measure_operators(model, backend, job.measured, job.settings.operators_s, on_step)
        return asdict(Operators(phases, memory_use().peak))
    return asdict(_measure(job.settings, model, backend, on_step))


def _load(job: Job, model: Model, backend: Backend) -> Loaded:
    budget = Budget(memory=job.settings.memory)
    plan = make_plan(model.spec, backend, job.settings.request(), budget)
    started = time.perf_counter()
    with Session(model, backend, plan, Budget()):  # what compiling takes is no part of a run
        return Loaded(time.perf_counter() - started)


def _measure(settings: Settings, model: Model, backend: Backend, on_step: OnStep) -> EngineProfile:
    budget, meter, notes = Budget(memory=settings.memory), find_meter(), list[str]()
    with Sampler() as sampler:
        sampler.mark("start")
        plan = make_plan(model.spec, backend, settings.request(), budget)
        files, before, joules = mapped_files(), sampler.look(), meter.read().joules
        sampler.mark("load")
        on_step("loading", 0.0)
        started = time.perf_counter()
        with Session(model, backend, plan, budget, meter=meter) as session:
            load_s, load_joules = time.perf_counter() - started, meter.read().joules - joules
            runner = Runner(session, backend, meter, sampler)
            free = plan.config.capacity - settings.answer
            if free < 1:
                raise BudgetError(f"{plan.config.capacity} KV rows are too few for {settings.answer} tokens of answer")
            prompt = min(settings.prompt, free)
            if prompt < settings.prompt:
                notes.append(f"prompts of {prompt:,} instead of {settings.prompt:,} tokens, {_room(plan)}")
            stages = settings.stages_s
            others = others_from_now()
            on_part = part_of(on_step, stages, 0)
            speeds = measure_speeds(runner, prompt, settings.answer, settings.repetitions, settings.speed_s, on_part)
            taken = others()
            warm = sampler.look()
            contexts = [each for each in settings.contexts if each <= free]
            on_part = part_of(on_step, stages, 1)
            curve, end = measure_curve(runner, contexts, settings.answer, settings.curve_s, on_part)
            if end is None and len(contexts) < len(settings.contexts):
                end = _room(plan)
            sustained = None
            if settings.sustained_s:
                most, on_part = plan.config.capacity - prompt, part_of(on_step, stages, 2)
                sustained = measure_sustained(runner, prompt, most, settings.sustained_s, on_part)
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
            memory_use().peak, base, sampler.samples, sampler.marks, sampler.climate, sampler.sensor, sampler.trip
        ),
        energy=Energy(reading.source, reading.kind, reading.scope, load_joules),
        kv_dtypes=list(backend.CAPABILITIES.kv_dtypes),
        others=taken,
        sustained=sustained,
        notes=notes,
    )


def _room(plan: Plan) -> str:
    return f"the cache has {plan.config.capacity:,} rows"


def _answer(request: Any, say: Say) -> object:
    try:
        return run_job(build(Job, request), lambda what, share: say({"doing": what, "share": share}))
    except MemoryError:
        raise BudgetError("out of memory: state a smaller --memory") from None


if __name__ == "__main__":
    serve(_answer)
