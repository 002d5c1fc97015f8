"""A device profile from a kit's result: every ceiling and speed measured on that device."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import astuple, replace

from edge.devices.host import flags_of, notable
from edge.devices.load import DISTURBED
from edge.devices.profiles import HOST, find_model, find_profile
from edge.devices.profiles.profile import Cluster, DeviceProfile, Figure, FigureKind, Speed, is_name
from edge.errors import InputError
from edge.lab.profiling.kit.result import Result, sustained_of
from edge.lab.profiling.sustained import TAKEN, Sustained

_CACHES = {"L1d": "l1d", "L2": "l2", "L3": "l3"}
_KEPT = ("core_watts", "idle_watts", "dram_pj_per_byte")
_UNMEASURED = (*_KEPT, "throttle_celsius")
_LONG_RUN = ("sustained_s", "sustained_speed", "sustained_joules", "sustained_source")
_LEAST_S = 55.0  # of a long run: heat takes minutes. Not 60, since not all of a requested minute counts


def device_of(result: Result, name: str) -> DeviceProfile:
    """The profile of the device that a kit ran on, called `name`. Figures that a kit cannot measure come from the known
    profile of that model of device, else of the device that the kit was made for. Raises InputError for a name that no
    profile can have, and for results of a page."""
    if not is_name(name) or name == HOST:
        raise InputError(f"{name!r} cannot be a device's name: letters, digits, - and . only, and not {HOST}")
    if result.in_page:
        raise InputError("a page's speeds are those of WebAssembly in its browser: measure the device with a kit")
    kit, ceilings = result.kit, result.ceilings
    source = f"a kit of edge {kit.versions.get('edge', '?')}, {result.date[:10]}"
    if result.others is not None and result.others >= DISTURBED:
        source += f", while other programs took {result.others:.0%} of the cores"
    base = find_model(result.device_name)
    if base is None and kit.device != HOST:
        with suppress(InputError):
            base = find_profile(kit.device)

    def measured(value: float, threads: int | None = None, note: str = "") -> Figure:
        return Figure(round(value), "measured", source, note, threads)

    figures = {"memory": measured(result.memory)} if result.memory > 0 else {}
    figures |= {_CACHES[each]: measured(size) for each, size in result.caches.items() if each in _CACHES and size > 0}
    figures |= {
        "read_bandwidth": measured(ceilings.read, ceilings.threads),
        "read_bandwidth_one_core": measured(ceilings.read_one_core, 1),
        "f32_flops": measured(ceilings.f32, ceilings.threads, "in registers: matrices are slower"),
    }
    if ceilings.int8 is not None:
        figures["int8_ops"] = measured(ceilings.int8, ceilings.threads, "in registers")
    if result.trip is not None and result.trip > 0:
        figures["throttle_celsius"] = measured(result.trip)
    kind: FigureKind = "assumed"
    known = unmeasured(base) if base else {}
    watts = {name: getattr(kit.power, name) for name in _KEPT}
    figures |= {
        name: known.get(name, Figure(value, kind, f"the profile {kit.power.profile}"))
        for name, value in watts.items()
        if value > 0
    }
    figures = known | figures
    return DeviceProfile(
        name=name,
        description=result.device_name,
        machine=result.machine,
        isa=result.isa,
        cpu=base.cpu if base and base.isa == result.isa else None,
        system="android" if result.android else base.system if base else "linux",
        clusters=_clusters(result, source),
        instruction_sets=notable(flags_of(result.cpuinfo)),
        gpu=base.gpu if base else None,
        npu=base.npu if base else None,
        sensors=base.sensors if base else (),
        figures=figures,
        measured_by=source,
        speeds=(_speed(result, source),),
    )


def _clusters(result: Result, source: str) -> tuple[Cluster, ...]:
    """The kinds of cores with the measured figures of each, or the cores worth using if all are alike."""
    kinds = result.ceilings.kinds
    if not kinds or not all(each.capacity or each.mhz or each.hybrid for each in kinds):
        return (Cluster(result.device_name, result.fastest_cores, source),)
    return tuple(
        Cluster(
            each.name, each.cores, source, each.mhz / 1000 or None, each.capacity or None, each.read, each.f32,
            each.int8,
        )
        for each in kinds
    )  # fmt: skip


def with_earlier(made: DeviceProfile, before: DeviceProfile) -> DeviceProfile:
    """The profile `made`, with speeds of other models and settings that an earlier kit measured on the same device, and
    with long runs that were not repeated."""
    if before.measured_by is None or (before.description, before.isa) != (made.description, made.isa):
        return made
    earlier = {_setting(each): each for each in before.speeds}
    now = {_setting(each): _with_long_run(each, earlier.get(_setting(each))) for each in made.speeds}
    return replace(made, speeds=tuple((now | {key: earlier[key] for key in earlier if key not in now}).values()))


def long_run_of(result: Result) -> tuple[Sustained | None, str]:
    """The long run of a result, or None and the reason why it does not represent the device; "" without a long run."""
    run, asked, why = sustained_of(result), result.kit.settings, ""
    if run is None:
        return None, ""
    if run.seconds < _LEAST_S:
        why = f"the long run took {run.seconds:.0f} s: heat takes minutes"
    elif asked.watts:
        why = f"pauses held the long run to {asked.watts:g} W"
    elif run.others >= TAKEN:
        why = f"other programs took up to {run.others:.0%} of the cores in the long run"
    return (None, f"{why}, so it does not count") if why else (run, "")


def _setting(speed: Speed) -> tuple[str, str, int]:
    return speed.model, speed.kv_dtype, speed.threads


def _with_long_run(speed: Speed, earlier: Speed | None) -> Speed:
    if earlier is None or speed.sustained_s is not None:
        return speed
    return replace(speed, **{name: getattr(earlier, name) for name in _LONG_RUN})


def unmeasured(profile: DeviceProfile) -> dict[str, Figure]:
    """The figures of a device that no kit measures."""
    found = profile.figures.items()
    return {name: figure for name, figure in found if name in _UNMEASURED or name.startswith(("npu_", "gpu_"))}


def _speed(result: Result, source: str) -> Speed:
    kit = result.kit
    points = {each.context: each.decode.p50 for each in result.curve}
    middle = kit.prompt + kit.settings.answer // 2
    points[middle] = result.token.p50
    contexts = sorted(points)
    long_run, _ = long_run_of(result)
    return Speed(
        model=kit.key,
        label=kit.model.label,
        kv_dtype=kit.plan.config.kv_dtype,
        threads=result.threads,
        prompt=kit.prompt,
        prompt_s=result.ttft.p50 / kit.prompt,
        contexts=tuple(contexts),
        token_s=tuple(points[each] for each in contexts),
        source=source,
        integers=kit.integers,
        prompt_work=astuple(kit.prefill),
        token_work=astuple(kit.decode),
        token_context=middle,
        sustained_s=long_run.seconds if long_run else None,
        sustained_speed=long_run.ratio if long_run else None,
        sustained_joules=long_run.joules_ratio if long_run and result.energy is not None else None,
        sustained_source=source if long_run else "",
    )
