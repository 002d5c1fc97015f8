"""Forecast of a model under given options, here or on another device: its plan and predicted speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge.backends import engine_named
from edge.backends.tvm import ENGINE
from edge.devices.host import logical_cores
from edge.devices.load import neighbours
from edge.devices.memory import memory_limit
from edge.devices.power import find_meter, memory_root
from edge.devices.profiles import HOST, find_profile, host_power
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.lab.prediction.crowd import Crowd
from edge.lab.prediction.npu import is_on_cpu, is_on_npu
from edge.lab.prediction.predict import Prediction, Wanted, predict
from edge.lab.prediction.work import Streaming, streaming_cost
from edge.model.adapters.lora import open_lora
from edge.model.model import Model
from edge.model.names.catalog import find_local
from edge.model.structure.spec import ModelSpec
from edge.options import Options, takes_options
from edge.plan.device import TOKENIZER_BYTES, plan_for
from edge.plan.npu import NpuUse, npu_use
from edge.plan.plan import Plan
from edge.plan.play import PlayUse, play_use
from edge.run.history import Phase, Run, Setting, earlier_runs
from edge.run.starting.opening import find_tokenizer, open_model

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 has none

    from edge.keywords import Keywords

_MANY = 16  # nominal tokens of an answer of known speed: at least the number that predictions require
_PROMPT = 512  # prompt tokens for which prefill is predicted, by default
_CONTEXTS = (128, 1024, 4096)  # rows at which decoding is predicted, besides the full cache


@dataclass(frozen=True)
class Forecast:
    """A model's plan and prediction."""

    model: Model
    plan: Plan
    streaming: Streaming | None  # cost of weights that every pass reads again; None: all stay in memory
    prediction: Prediction
    npu: NpuUse | None = None  # the compiled form, for a plan on an NPU
    play: PlayUse | None = None  # Google Play's thresholds, for a phone with Android


@dataclass(frozen=True)
class Outlook:
    """A plan with its prediction; fields as in `Forecast`."""

    plan: Plan
    streaming: Streaming | None
    prediction: Prediction
    npu: NpuUse | None = None
    play: PlayUse | None = None


@takes_options
def forecast(
    model: str | Path | Model,
    options: Options | None = None,
    *,
    device: str = HOST,
    prompt: int | None = None,
    contexts: Sequence[int] | None = None,
    **keywords: Unpack[Keywords],
) -> Forecast:
    """Plan a run and predict its speed and joules, without loading weights.

    model: if it is on the Hub and not here, only its header is read. device: its name in `edge devices list`. prompt:
    tokens of the prompt (default: 512, or half of expected_tokens). contexts: rows in the cache at which decode is
    predicted. The keywords are options, as people write them, and take precedence over `options`:

    OPTIONS

    Raises BudgetError if nothing fits, InputError for contexts beyond the cache, and the errors of `open_model`.
    """
    options, profile = Options.of(options, **keywords), find_profile(device)
    began = time.process_time()
    if prompt is not None and options.expected_tokens is not None and prompt > options.expected_tokens:
        raise InputError(
            f"--prompt-tokens {prompt} is more than --tokens {options.expected_tokens}, which counts prompt and answer"
        )
    opened = model if isinstance(model, Model) else _open(model, options, device)
    found = look_ahead(opened.file, opened.spec, profile, options, prompt=prompt, contexts=contexts, began=began)
    return Forecast(opened, found.plan, found.streaming, found.prediction, found.npu, found.play)


def look_ahead(
    file: GGUFFile, spec: ModelSpec, profile: DeviceProfile, options: Options, *, prompt: int | None = None,
    contexts: Sequence[int] | None = None, began: float | None = None, outline: bool = False, history: bool = True,
) -> Outlook:  # fmt: skip
    """Like `forecast`, for an open file. began: process time at which preparations began. outline: `file` is a header
    without vocabulary and weights: the tokenizer's memory is estimated, and the cost of streaming unknown. history:
    whether earlier runs on this device, and its load now unless `outline`, count; without them, all settings are
    predicted in the same way."""
    open_lora(options.lora or (), file, spec)  # checks them
    if prompt is not None:
        options = replace(options, expected_prompt=prompt)
    plan = None
    if profile.name != HOST:
        from edge.apps.planning import plan_app  # here: a plan for this device counts what it has imported

        plan = plan_app(profile, file, spec, options)
    if plan is None:
        plan = plan_for(profile, file, spec, options, TOKENIZER_BYTES * spec.vocab if outline else 0)
    # Core-seconds that a run, too, spends before it starts.
    prepared = 0.0 if began is None else time.process_time() - began
    capacity, here = plan.config.capacity, profile.name == HOST
    use = npu_use(file, spec, profile) if is_on_npu(plan, profile) else None
    if contexts is None and use is not None:
        contexts = [capacity]  # a compiled pass reads all rows, however many are in use
    elif contexts is None:
        contexts = [*(each for each in _CONTEXTS if each < capacity), capacity]
    if max(contexts) > capacity:
        raise InputError(f"--at {max(contexts)} is more than the {capacity} rows of the cache: see --max-kv-size")
    prompt = prompt or min(_PROMPT, max(1, (options.expected_tokens or 2 * _PROMPT) // 2))
    wanted = Wanted(prompt, tuple(contexts), options.energy, options.power, options.time)
    room = memory_limit(memory_root()).bytes - plan.bytes.total if here else None
    experts = engine_named(plan.backend).expert_forecast(file, spec, plan.config) if plan.config.resident else None
    streaming = streaming_cost(
        experts.streamed if experts else plan.bytes.streamed, plan.config.threads, file.path.name, room=room,
        here=here and not outline,
    )  # fmt: skip
    streaming = streaming and replace(streaming, experts=experts)
    added = streaming.added_s if streaming else 0.0
    play = None if use is not None else play_use(plan, profile)  # an NPU's driver has memory of its own kinds
    prediction = _predict(spec, plan, profile, wanted, prepared, added, history=history, now=history and not outline)
    return Outlook(plan, streaming, prediction, use, play)


def _open(model: str | Path, options: Options, device: str) -> Model:
    """Open a model, or only the header of a model on the Hub that is not here."""
    if found := find_local(model):
        return open_model(found)
    from edge.pulling import offer  # here: local models need no client for HTTP

    return Model(offer(str(model), options, device=device).header, find_tokenizer)


def _predict(
    spec: ModelSpec, plan: Plan, profile: DeviceProfile, wanted: Wanted, prepared: float, streaming_s: float | None, *,
    history: bool, now: bool,
) -> Prediction:  # fmt: skip
    """Predict: on this device with earlier runs, the load `now` and the meter that a run would have, elsewhere from the
    profile."""
    if profile.name != HOST:
        return predict(spec, plan, profile, wanted, _measured_runs(spec, plan, profile), streaming_s=streaming_s)
    runs = earlier_runs(Setting.of(spec, plan.backend, plan.config)) if history else []
    asks = now and is_on_cpu(plan) and streaming_s is not None  # else `predict` has no use for it
    busy = neighbours() if asks else 0.0
    crowd = Crowd(busy, logical_cores()) if busy else None
    meter = find_meter().read()
    if meter.kind != "estimate":  # joules that a sensor counts follow from earlier ones alone
        profile = replace(profile, figures={k: v for k, v in profile.figures.items() if k != "core_watts"})
        return predict(spec, plan, profile, wanted, runs, None, streaming_s, meter.source, crowd=crowd)
    power = host_power()
    wanted = replace(wanted, spent=prepared * power.core_watts)
    return predict(spec, plan, profile, wanted, runs, power, streaming_s, meter.source, crowd=crowd)


def _measured_runs(spec: ModelSpec, plan: Plan, profile: DeviceProfile) -> list[Run]:
    """The measured speeds of this model on that device in the same setting, as runs of one phase each."""
    setting, runs = Setting.of(spec, plan.backend, plan.config), list[Run]()

    def add(prefill: Phase | None, decode: Phase | None) -> None:
        runs.append(Run(0, setting, spec.label, plan.kv_policy, plan.config.capacity, prefill, decode))

    for each in profile.speeds if plan.backend == ENGINE.NAME else ():
        if (each.model, each.kv_dtype, each.threads) != (setting.model, setting.kv_dtype, setting.threads):
            continue
        prompt = int(each.prompt)
        add(Phase(prompt, prompt * each.prompt_s, prompt / 2), None)
        for context, token_s in zip(each.contexts, each.token_s, strict=True):
            add(None, Phase(_MANY, _MANY * token_s, context))
    return runs
