"""How a model would run within options, here or on another device: its plan, and what that plan leads one to expect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge.backends import backend_elsewhere, find_backend
from edge.devices.memory import MemoryLimit, memory_limit
from edge.devices.power import find_meter, memory_root
from edge.devices.profile import DeviceProfile
from edge.devices.profiles import HOST, find_profile, host_power
from edge.errors import InputError
from edge.model.model import Model, open_model
from edge.options import Options, takes_options
from edge.plan.plan import Plan, make_plan
from edge.prediction.predict import Prediction, Wanted, predict
from edge.prediction.work import Streaming, streaming_cost
from edge.run.history import Setting, earlier_runs

_PROMPT = 512  # tokens of which prefill is predicted, unless a caller says
_CONTEXTS = (128, 1024, 4096)  # at which decoding is predicted, and at the full cache
_CORES = 4  # of a device whose profile does not say


@dataclass(frozen=True)
class Forecast:
    """streaming: what weights that are read anew by every pass cost; None where all stay in memory."""

    model: Model
    plan: Plan
    streaming: Streaming | None
    prediction: Prediction


@takes_options
def forecast(
    model: str | Path | Model,
    options: Options | None = None,
    *,
    device: str = HOST,
    prompt: int | None = None,
    contexts: Sequence[int] | None = None,
    **keywords: Any,
) -> Forecast:
    """Plan a run and predict its speed and joules, without loading weights.

    device: its name in `edge devices list`. prompt: tokens of the prompt to predict by (default: 512, or half of
    expected_tokens). contexts: rows in the cache to predict decoding at. The keywords are options, as people write
    them, and go before those of `options`:

    OPTIONS

    Raises BudgetError if nothing fits, InputError for contexts beyond the cache, and the errors of `open_model`.
    """
    options, profile = (options or Options()).updated(**keywords), find_profile(device)
    began = time.process_time()
    opened = model if isinstance(model, Model) else open_model(model)
    plan = _plan(opened, profile, options)
    prepared = time.process_time() - began  # core-seconds that a run takes, too, before it starts
    capacity, here = plan.config.capacity, profile.name == HOST
    if contexts is None:
        contexts = [*(each for each in _CONTEXTS if each < capacity), capacity]
    if max(contexts) > capacity:
        raise InputError(f"--at {max(contexts)} is more than the {capacity} rows of the cache: see --max-kv-size")
    prompt = prompt or min(_PROMPT, max(1, (options.expected_tokens or 2 * _PROMPT) // 2))
    wanted = Wanted(prompt, tuple(contexts), options.energy, options.power, options.time)
    room = memory_limit(memory_root()).bytes - plan.bytes.total if here else None
    name = opened.file.path.name
    streaming = streaming_cost(plan.bytes.streamed, plan.config.threads, name, room=room, here=here)
    added = streaming.added_s if streaming else 0.0
    return Forecast(opened, plan, streaming, _predict(opened, plan, profile, wanted, prepared, added))


def _plan(model: Model, profile: DeviceProfile, options: Options) -> Plan:
    if profile.name == HOST:
        return make_plan(model.spec, find_backend(options.backend, model.file, model.spec, options.kv_dtype), options)
    engine = backend_elsewhere(options.backend, model.file, model.spec, profile.system)
    if profile.memory is None and options.memory is None:
        raise InputError(
            f"the profile of {profile.name} does not say how much memory it has: say --memory, such as --memory 4GiB"
        )
    if options.threads and profile.cores and options.threads > profile.cores:
        raise InputError(f"--threads {options.threads} is more than the {profile.cores} cores of {profile.name}")
    most = min(profile.memory or options.memory or 0, options.memory or profile.memory or 0)
    limit = MemoryLimit(most, "budget" if most == options.memory else profile.name)
    threads = options.threads or profile.cores or _CORES
    return make_plan(model.spec, engine, replace(options, threads=threads, memory=None), elsewhere=limit)


def _predict(
    model: Model, plan: Plan, profile: DeviceProfile, wanted: Wanted, prepared: float, streaming_s: float | None
) -> Prediction:
    """On this device by earlier runs and by the meter that runs would have; elsewhere by the profile alone."""
    if profile.name != HOST:
        return predict(model.spec, plan, profile, wanted, streaming_s=streaming_s)
    runs, meter = earlier_runs(Setting.of(model.spec, plan.backend, plan.config)), find_meter().read()
    if meter.kind != "estimate":  # joules that a sensor counts follow from earlier ones alone
        profile = replace(profile, figures={k: v for k, v in profile.figures.items() if k != "core_watts"})
        return predict(model.spec, plan, profile, wanted, runs, None, streaming_s, meter.source)
    power = host_power()
    wanted = replace(wanted, spent=prepared * power.core_watts)
    return predict(model.spec, plan, profile, wanted, runs, power, streaming_s, meter.source)
