"""`edge plan`: what would fit, how fast it would be and what it would spend, before anything is loaded."""

from __future__ import annotations

import time as clock
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from edge.budget import format_bytes, format_joules
from edge.cli import options as o
from edge.cli.numbers import parse_numbers
from edge.cli.show import print_json, table

if TYPE_CHECKING:
    from edge.budget import Budget
    from edge.devices.profile import DeviceProfile, Figure
    from edge.model.model import Model
    from edge.plan import Plan, PlanRequest
    from edge.prediction.predict import Guess, Prediction, Wanted
    from edge.prediction.work import Streaming

_PROMPT = 512  # tokens of which prefill is predicted, unless --prompt-tokens says
_MOST = 1 << 40  # tokens: more than any run will ever have
_CONTEXTS = (128, 1024, 4096)  # at which decoding is predicted, and at the full cache


def plan(
    model: o.ModelArgument,
    device: Annotated[
        str, o.flag("--device", help="The device to plan for, by its name in edge devices list (default: this one).")
    ] = "host",
    memory: o.Memory = None,
    energy: o.Energy = None,
    power: o.Power = None,
    time: o.Time = None,
    kv_policy: o.KVPolicy = "streaming",
    max_kv_size: o.MaxKVSize = None,
    kv_memory: o.KVMemory = None,
    sinks: o.Sinks = 4,
    kv_dtype: o.KVDtype = None,
    prefill_step_size: o.PrefillStepSize = None,
    tokens: Annotated[
        int | None,
        o.flag("--tokens", min=1, max=_MOST, help="Prompt and answer together, if you know (default: no end)."),
    ] = None,
    prompt: Annotated[
        int | None,
        o.flag(
            "--prompt-tokens",
            min=1,
            max=_MOST,
            help="Those of the prompt, to predict by (default: 512, or half of --tokens).",
        ),
    ] = None,
    at: Annotated[
        str | None, o.flag("--at", help="Rows in the cache to predict decoding at, such as 128,4096.")
    ] = None,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
) -> None:
    """Show how a model would run within a budget, here or on another device: bytes, settings, speed and joules."""
    from edge.budget import Budget
    from edge.devices.memory import memory_limit
    from edge.devices.power import memory_root
    from edge.devices.profiles import HOST, find_profile
    from edge.errors import InputError
    from edge.model.model import open_model
    from edge.plan import PlanRequest
    from edge.prediction.predict import Wanted
    from edge.prediction.work import streaming_cost

    budget, profile = Budget.parse(memory, time, energy, power), find_profile(device)
    began = clock.process_time()
    opened = open_model(model)
    request = PlanRequest(
        kv_policy=kv_policy,
        sinks=sinks,
        max_kv_size=max_kv_size,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        prefill_step_size=prefill_step_size,
        threads=threads,
        expected_tokens=tokens,
    )
    made = _make(opened, profile, backend, request, budget)
    prepared = clock.process_time() - began  # core-seconds that a run takes, too, before it starts
    capacity = made.config.capacity
    usual = [*(each for each in _CONTEXTS if each < capacity), capacity]
    contexts = tuple(usual if at is None else parse_numbers("--at", at))
    if max(contexts) > capacity:
        raise InputError(f"--at {max(contexts)} is more than the {capacity} rows of the cache: see --max-kv-size")
    prompt = prompt or min(_PROMPT, max(1, (tokens or 2 * _PROMPT) // 2))
    wanted = Wanted(prompt, contexts, budget.energy, budget.power, budget.time)
    here = profile.name == HOST
    room = memory_limit(memory_root()).bytes - made.bytes.total if here else None
    streaming = streaming_cost(made.bytes.streamed, made.config.threads, opened.file.path.name, room=room, here=here)
    prediction = _predict(opened, made, profile, wanted, prepared, streaming.added_s if streaming else 0.0)
    if json:
        predicted = {"model": opened.spec.label, "path": str(opened.path), **made.to_dict()}
        streamed = streaming and asdict(streaming)
        print_json(predicted | {"streaming": streamed, "prediction": asdict(prediction)})
        return
    print(_bytes(made))
    print(
        f"\n{opened.spec.label} on {made.backend}, {made.config.threads} threads, KV policy {made.kv_policy}"
        + (f" with {made.sinks} sinks" if made.sinks else "")
        + f"\ntuned: {made.tuned}\n"
    )
    if streaming:
        print(_slower(streaming, made.bytes.weights, opened.spec.weight_bytes) + "\n")
    if rows := _rows(prediction, budget):
        print(table([f"predicted for {prediction.device}", "", "by"], rows, left=3))
    for line in (*prediction.basis, *prediction.unknown):
        print(line)


def _make(opened: Model, profile: DeviceProfile, backend: str, request: PlanRequest, budget: Budget) -> Plan:
    from edge.backends import backend_elsewhere, find_backend
    from edge.devices.memory import MemoryLimit
    from edge.devices.profiles import HOST
    from edge.errors import InputError
    from edge.plan import make_plan

    if profile.name == HOST:
        return make_plan(
            opened.spec, find_backend(backend, opened.file, opened.spec, request.kv_dtype), request, budget
        )
    engine = backend_elsewhere(backend, opened.file, opened.spec, profile.system)
    if profile.memory is None and budget.memory is None:
        raise InputError(
            f"the profile of {profile.name} does not say how much memory it has: say --memory, such as --memory 4GiB"
        )
    if request.threads and profile.cores and request.threads > profile.cores:
        raise InputError(f"--threads {request.threads} is more than the {profile.cores} cores of {profile.name}")
    most = min(profile.memory or budget.memory or 0, budget.memory or profile.memory or 0)
    limit = MemoryLimit(most, "budget" if most == budget.memory else profile.name)
    request = replace(request, threads=request.threads or profile.cores or 4)
    return make_plan(opened.spec, engine, request, replace(budget, memory=None), elsewhere=limit)


def _predict(
    opened: Model, made: Plan, profile: DeviceProfile, wanted: Wanted, prepared: float, streaming_s: float | None
) -> Prediction:
    """On this device by earlier runs and by the meter that runs would have; elsewhere by the profile alone."""
    from edge.devices.power import find_meter
    from edge.devices.profiles import HOST, host_power
    from edge.prediction.history import Setting, earlier_runs
    from edge.prediction.predict import predict

    if profile.name != HOST:
        return predict(opened.spec, made, profile, wanted, streaming_s=streaming_s)
    runs, meter = earlier_runs(Setting.of(opened.spec, made.backend, made.config)), find_meter().read()
    if meter.kind != "estimate":  # joules that a sensor counts follow from earlier ones alone
        profile = replace(profile, figures=_without_watts(profile))
        return predict(opened.spec, made, profile, wanted, runs, None, streaming_s, meter.source)
    power = host_power()
    wanted = replace(wanted, spent=prepared * power.core_watts)
    return predict(opened.spec, made, profile, wanted, runs, power, streaming_s, meter.source)


def _without_watts(profile: DeviceProfile) -> dict[str, Figure]:
    return {name: figure for name, figure in profile.figures.items() if name != "core_watts"}


def _bytes(made: Plan) -> str:
    count, config = made.bytes, made.config
    rows: list[tuple[str, str, int]] = [
        ("interpreter", "this process and the engine's libraries", count.interpreter),
        ("weights", _weights(made), count.weights),
        ("KV cache", f"{config.capacity} rows, {config.kv_dtype}", count.kv),
        ("scratch", f"prefill chunk of {config.chunk} tokens", count.scratch),
        ("predicted peak", "estimated", made.predicted_peak),
        ("limit", made.limit_source, made.limit),
    ]
    return table(["what", "how", "bytes", "size"], [[a, b, str(n), format_bytes(n)] for a, b, n in rows], left=2)


def _rows(prediction: Prediction, budget: Budget) -> list[list[str]]:
    rows = []

    def say(what: str, guess: Guess | None, text: str) -> None:
        if guess is not None:
            rows.append([what, text.format(guess.value), guess.source])

    say(f"a prompt of {prediction.prompt} tokens", prediction.prefill_tok_s, "{:.4g} tok/s")
    say("its first token", prediction.ttft_s, "after {:.3g} s")
    for each in prediction.decode:
        say(f"a token at {each.context} rows", each.tok_s, "{:.4g} tok/s")
        if each.joules is not None:
            say("", each.joules, f"{format_joules(each.joules.value)} per token")
    say("it draws", prediction.watts, "{:.3g} W")
    if budget.power is not None:
        slow = prediction.limited_tok_s is not None and not prediction.limited_tok_s.value
        said = "cannot be: it draws more while it waits" if slow else "{:.4g} tok/s"
        say(f"paced to {budget.power:g} W", prediction.limited_tok_s, said)
    if budget.energy is not None:
        say(f"{format_joules(budget.energy)} buy", prediction.energy_tokens, "{:.0f} tokens behind that prompt")
    if budget.time is not None:
        say(f"in {budget.time:g} s", prediction.time_tokens, "{:.0f} tokens behind that prompt")
    return rows


def _slower(streaming: Streaming, resident: int, weights: int) -> str:
    text = (
        f"weights: at most {format_bytes(resident)} of {format_bytes(weights)} in memory at a time, "
        f"{format_bytes(streaming.bytes)} read anew per token"
    )
    if streaming.cached_s is None or streaming.disk_s is None:
        return text
    cached, disk = f"{1e3 * streaming.cached_s:.1f} ms", f"{1e3 * streaming.disk_s:.0f} ms"
    if streaming.from_disk:
        return (
            f"{text}, which adds {disk} to each:\nthe system has no room to keep their file in memory (measured here)"
        )
    return (
        f"{text}, which adds {cached} to each\nwhile the system keeps their file in its page cache, {disk} if it does "
        "not (both measured here)"
    )


def _weights(made: Plan) -> str:
    if made.bytes.streamed:
        return "of a mapped file, at a time"
    return "repacked in memory" if made.config.repack else "mapped from a file"
