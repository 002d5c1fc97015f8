"""`edge devices`: this device, its sensors and its limits; the devices known by name."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.help import Group
from edge.cli.terminal.show import note, print_json, printable, progress, table

if TYPE_CHECKING:
    from edge.backends.tvm.gpu.hosts import Adapter
    from edge.devices.profiles.npus import SeenNpu
    from edge.devices.profiles.profile import DeviceProfile, Npu, Speed

devices = typer.Typer(cls=Group, help="This device, its sensors, and the devices known by name.")

_Name = Annotated[str, typer.Argument(metavar="DEVICE", help="A name of edge devices list.")]


@devices.callback(invoke_without_command=True)
def here(context: typer.Context, json: o.Json = False) -> None:
    """Show this device: processor, cores, instruction sets, caches, memory, GPUs, NPUs; or run one of the commands."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import replace

    from edge.backends.tvm.gpu.hosts import all_adapters, what_is_missing
    from edge.devices.host import probe_host
    from edge.devices.memory import memory_limit
    from edge.devices.power import memory_root, sensors_root
    from edge.devices.profiles import host_npus
    from edge.devices.profiles.npus import board

    host, model = replace(probe_host(), limit=memory_limit(memory_root())), board(sensors_root())
    gpus, (chosen, no_gpu), npus = all_adapters(), _chosen_gpu(), host_npus(sensors_root())
    providers = _providers()
    if json:
        listed = [_gpu_as_json(each, chosen) for each in gpus]
        drivers = {"gpus": listed, "no_gpu": no_gpu, "missing_gpu_drivers": what_is_missing()}
        engines = {"npus": [asdict(each) for each in npus], "providers": providers}
        print_json({"host": asdict(host), "board": model} | drivers | engines)
        return
    rows = [
        ["system", f"{host.system} ({host.machine})"],
        *([["board", printable(model)]] if model else []),
        ["processor", host.processor],
        ["cores", f"{host.physical_cores} physical, {host.logical_cores} logical, {host.usable_cores} used by default"],
        ["instruction sets", " ".join(host.instruction_sets) or "none of note"],
        ["caches", ", ".join(f"{name} {format_bytes(size)}" for name, size in host.caches.items()) or "unknown"],
        ["memory", format_bytes(host.memory)],
        ["memory limit", f"{format_bytes(host.limit.bytes)} ({host.limit.source})"],
    ]
    print(table(["host", "measured"], rows, left=2))
    if gpus:
        print("\n" + table(["GPU", "name", "driver", "memory", "limits", "features"], [_gpu(each) for each in gpus], 6))
    print("\n" + (f"--backend gpu runs on {chosen.place}; EDGE_GPU chooses another" if chosen else no_gpu or ""))
    if npus:
        seen = [[str(each.npu), printable(each.driver), each.place, _use(each)] for each in npus]
        print("\n" + table(["NPU", "driver", "device", "use"], seen, left=4))
    else:
        print("\nno NPU was found")
    if providers:
        has = {each.npu.provider for each in npus}
        shown = [
            f"{each} (without its NPU: emulated)" if each == "qnn" and each not in has else each for each in providers
        ]
        print(f"--provider may be {', '.join(shown)}")


@devices.command("list")
def known(json: o.Json = False) -> None:
    """List the devices known by name, for which edge plan predicts and edge compile generates code."""
    from edge.devices.profiles import find_profile, profile_names
    from edge.errors import InputError

    profiles, damaged = [], dict[str, str]()
    for name in profile_names():
        try:
            profiles.append(find_profile(name))
        except InputError as error:
            damaged[name] = str(error)
    if json:
        print_json({"devices": [_as_json(profile) for profile in profiles], "damaged": damaged})
        return
    rows = [[each.name, each.description, each.isa or _own_code(each), _gaps(each)] for each in profiles]
    print(table(["device", "what it is", "compiled for", "not predicted"], rows, left=4))
    for said in damaged.values():
        note(f"left out: {said}: correct that file or delete it")


@devices.command()
def show(name: _Name, json: o.Json = False) -> None:
    """Show the figures of a device, and the source of each."""
    from edge.devices.profiles import HOST, find_profile

    profile, sources = find_profile(name), dict[str, int]()
    if json:
        print_json(_as_json(profile))
        return

    def numbered(source: str) -> str:
        return f"[{sources.setdefault(source, len(sources) + 1)}]" if source else ""

    rows = [
        ["what it is", profile.description, ""],
        ["machine", f"{profile.machine}, {profile.system}", ""],
        ["compiled for", (profile.isa or _own_code(profile)) + (f", {profile.cpu}" if profile.cpu else ""), ""],
    ]
    rows += [["measured by", profile.measured_by, ""]] if profile.measured_by else []
    for cluster in profile.clusters:
        clock = f" at {cluster.ghz:g} GHz" if cluster.ghz else ""
        rows.append(["cores", f"{cluster.cores} × {cluster.kind}{clock}", numbered(cluster.source)])
    for what, words in (
        ("instruction sets", " ".join(profile.instruction_sets)),
        ("GPU", profile.gpu),
        ("sensors", ", ".join(profile.sensors)),
    ):
        rows += [[what, words, ""]] if words else []
    if (npu := profile.npu) is not None:
        rows.append(["NPU", _npu(npu), numbered(npu.source) + (f": {npu.note}" if npu.note else "")])
    for each, figure in profile.figures.items():
        note_on_it = f": {figure.note}" if figure.note else ""
        rows.append([_words(each), _value(each, figure.value), f"{figure.kind} {numbered(figure.source)}{note_on_it}"])
    for speed in profile.speeds:
        points = ", ".join(
            f"{1 / each:,.4g} tok/s at {context:,.0f} rows"
            for context, each in zip(speed.contexts, speed.token_s, strict=True)
        )
        setting = f"{speed.label}, {speed.kv_dtype}, {speed.threads} threads"
        said = f"{setting}: prompts {1 / speed.prompt_s:,.4g} tok/s, {points}"
        rows.append(["speed", said, f"measured {numbered(speed.source)}"])
        if speed.sustained_s is not None:
            rows.append(["", _long_run(speed), f"measured {numbered(speed.sustained_source)}"])
    print(table([profile.name, "", "where it stands"], rows, left=3))
    also = [f"also {source}" for source in profile.sources if source not in sources]
    print("", *(f"[{number}] {source}" for source, number in sources.items()), *also, sep="\n")
    if name == HOST and profile.value("read_bandwidth") is None:
        note("\nNothing here was measured yet: edge devices probe")
    if profile.power is None:
        note(f"\nWhat a busy core takes is unknown{_for_the_estimate(profile)}.")


@devices.command()
def probe(
    output: Annotated[
        Path | None, o.flag("-o", "--output", help="Write the profile to this file instead, to be added elsewhere.")
    ] = None,
    name: Annotated[str, o.flag("--name", help="The device's name in that file.")] = "host",
    seconds: Annotated[float, o.flag("--seconds", min=0.1, max=120, help="How long to measure.")] = 8.0,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure this device's memory bandwidth and arithmetic, and its GPU's bandwidth, for later predictions."""
    from dataclasses import replace

    from edge.cli.targets import own_isa
    from edge.devices.integer_products import missing
    from edge.devices.load import others_from_now
    from edge.devices.output import check_writable
    from edge.devices.profiles import HOST, add_profile
    from edge.devices.profiles.file import write_profile
    from edge.devices.profiles.profile import is_name
    from edge.errors import InputError
    from edge.lab.profiling.ceilings import probe_device

    if name != HOST and output is None:
        raise InputError("--name is for profiles of a file: give -o FILE, too; here this device is called host")
    if not is_name(name):
        raise InputError(f"--name may hold letters, digits, - and . only, not {name!r}")
    if output is not None:
        check_writable(output)
    with progress(enabled=not quiet) as shown:
        bar, so_far = shown.step("reading memory, multiplying"), others_from_now(lambda: sum(os.times()[:4]))
        measured, no_gpu = probe_device(seconds, lambda part: bar(part, 1.0))
        measured = replace(measured, name=name)
        others = so_far()
    if output is None:
        output = add_profile(measured)
    else:
        measured = replace(measured, isa=own_isa())  # no other device can ask this processor for it
        write_profile(measured, output)
    if json:
        print_json(_as_json(measured) | {"path": str(output), "others": others, "no_gpu": no_gpu})
        return
    rows = [[_words(each), _value(each, figure.value), figure.source] for each, figure in measured.figures.items()]
    print(table([f"{measured.name}: {measured.description}", "", "measured by"], rows, left=3))
    if measured.value("int8_ops") is None:
        print(f"\nint8 arithmetic is unknown: {missing() or 'ONNX Runtime cannot measure it here'}")
    if no_gpu:
        print(f"\nthe GPU's bandwidth is unknown: {no_gpu}")
    print(f"\nsaved as {output}")
    _note_others(others)


@devices.command()
def add(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] FILE",
            help="A profile, such as edge devices probe -o makes; or a name, and the result.json of a kit.",
        ),
    ],
    json: o.Json = False,
) -> None:
    """Check a profile that was written elsewhere, or make one of a kit's result, and keep it under its name. Results of
    several models on one device go together: each predicts the others."""
    from edge.cli.targets import check_processor
    from edge.devices.profiles import HOST, add_profile, comes_with_edge, own_folder
    from edge.devices.profiles.file import read_profile
    from edge.errors import InputError, several

    if len(words) > 2:
        raise InputError(f"edge devices add takes a FILE, or a NAME and a FILE, not {len(words)} words")
    file = Path(words[-1])
    profile, left_out, others = (read_profile(file), "", None) if len(words) == 1 else _of_result(words[0], file)
    if profile.name == HOST:
        raise InputError(f'{file} is called host, as this device is: give it another name, such as name = "my-phone"')
    check_processor(profile)
    known = " in place of the one there was" if (own_folder() / f"{profile.name}.toml").exists() else ""
    path = add_profile(profile)
    if json:
        more = {"path": str(path), "hides_edges_own": comes_with_edge(profile.name), "left_out": left_out}
        print_json(_as_json(profile) | more | {"others": others})
        return
    figures = several(len(profile.figures), "figure")
    print(f"{profile.name}: {profile.description}, {figures}, saved as {path}{known}")
    if left_out:
        note(f"{left_out}: measure again with --sustained 10m")
    _note_others(others)
    if slow := [each for each in profile.speeds if each.throttles]:
        print("It throttles, so plans and searches rank by the end of long runs (measured):")
        print(*(f"{each.label} with --threads {each.threads}: {_long_run(each)}" for each in slow), sep="\n")
    if comes_with_edge(profile.name):
        print(f"It goes before the {profile.name} that comes with edge: to have that back, delete this file")


def _note_others(others: float | None) -> None:
    from edge.devices.load import DISTURBED

    if others is not None and others >= DISTURBED:
        note(f"Other programs took {others:.0%} of the cores' time, so it can do more: measure again without them.")


def _of_result(name: str, file: Path) -> tuple[DeviceProfile, str, float | None]:
    """The profile; what of the result it leaves out, and why; the share of the cores that other programs took."""
    from edge.devices.profiles import find_profile, own_folder
    from edge.errors import InputError
    from edge.lab.profiling.kit.device import device_of, long_run_of, with_earlier
    from edge.lab.profiling.kit.result import read_result

    result = read_result(file)
    made, (_, left_out) = device_of(result, name), long_run_of(result)
    if (own_folder() / f"{name}.toml").exists():
        with suppress(InputError):  # a damaged one is replaced
            made = with_earlier(made, find_profile(name))
    return made, left_out, result.others


@devices.command()
def diff(first: _Name, second: _Name, json: o.Json = False) -> None:
    """Show two devices side by side, with the ratio of the second's figures to the first's."""
    from edge.devices.profiles import find_profile
    from edge.devices.profiles.profile import FIGURES

    one, other = find_profile(first), find_profile(second)
    pairs = {"cores": (one.cores, other.cores)} | {name: (one.value(name), other.value(name)) for name in FIGURES}
    pairs = {name: pair for name, pair in pairs.items() if pair != (None, None)}
    ratios = {name: b / a if a and b else None for name, (a, b) in pairs.items()}
    if json:
        print_json({"devices": [first, second], "figures": {k: [*pair, ratios[k]] for k, pair in pairs.items()}})
        return
    rows = [
        [_words(name), *(_value(name, value) for value in pair), f"{ratio:.2f}" if (ratio := ratios[name]) else ""]
        for name, pair in pairs.items()
    ]
    print(table(["", first, second, f"{second} / {first}"], rows, left=1))


@devices.command()
def sensors(json: o.Json = False) -> None:
    """List the sensors of joules and temperatures, and why others do not work. The first that works is used."""
    from edge.devices.power import sensors as power_sensors
    from edge.devices.power import sensors_root
    from edge.devices.thermal import zones

    found, hot = power_sensors(), zones(sensors_root())
    if json:
        print_json(
            {"energy": [asdict(each) for each in found], "heat": [{**asdict(z), "path": str(z.path)} for z in hot]}
        )
        return
    print(
        table(["energy", "here", "what it says"], [[s.name, "yes" if s.available else "no", s.about] for s in found], 3)
    )
    rows = [[z.name, f"{z.celsius:.0f} °C", f"slows down at {z.trip:.0f} °C" if z.trip else ""] for z in hot]
    print("\n" + (table(["heat", "now", ""], rows, 3) if hot else "no temperatures in /sys/class/thermal"))


def _chosen_gpu() -> tuple[Adapter | None, str | None]:
    """The GPU that `--backend gpu` runs on, or why there is none."""
    from edge.backends.tvm.gpu.hosts import choose_adapter
    from edge.errors import UnsupportedError

    try:
        return choose_adapter(), None
    except UnsupportedError as error:
        return None, str(error)


def _gpu(adapter: Adapter) -> list[str]:
    limits, own = adapter.limits, "unknown" if adapter.memory is None else f"{format_bytes(adapter.memory)} of its own"
    return [
        adapter.place,
        adapter.name + (", a CPU" if adapter.kind == "cpu" else ""),
        adapter.driver,
        "the main memory" if adapter.unified else own,
        f"{format_bytes(limits.binding)} in a binding, {limits.threads} threads, {format_bytes(limits.shared)} shared",
        " ".join(sorted(adapter.features)),
    ]


def _gpu_as_json(adapter: Adapter, chosen: Adapter | None) -> dict[str, object]:
    """chosen: whether `--backend gpu` runs on it."""
    found = {"place": adapter.place, "chosen": adapter == chosen}
    return found | asdict(adapter) | {"features": sorted(adapter.features)}


def _providers() -> list[str]:
    """The values of --provider that work here."""
    from edge.backends import engine_named
    from edge.errors import MissingExtraError

    try:
        engine_named("onnx").check_installed()
    except MissingExtraError:
        return []
    from edge.backends.onnx.providers import provider_names

    return provider_names()


def _use(seen: SeenNpu) -> str:
    from edge.plan.npu import no_provider

    if why := no_provider(seen.npu):
        return f"none: {why}"
    return f"--provider {seen.npu.provider}" + ("" if seen.allowed else ", but this user may not open the device")


def _npu(npu: Npu) -> str:
    from edge.plan.npu import no_provider

    chip = f", chip {npu.soc}" if npu.soc else ""
    return f"{npu}{chip}: " + (no_provider(npu) or f"--provider {npu.provider}")


def _as_json(profile: DeviceProfile) -> dict[str, object]:
    return asdict(profile) | {"cores": profile.cores, "memory": profile.memory, "not_predicted": profile.gaps}


def _gaps(profile: DeviceProfile) -> str:
    """The figures that edge plan does not predict of a device; of this one, before it is measured."""
    from edge.devices.profiles import HOST

    if profile.name != HOST:
        return ", ".join(profile.gaps)
    gaps = [each for each in profile.gaps if each != "joules"]  # estimated by a class of processors
    return ", ".join(gaps) + (" (edge devices probe measures them)" if gaps else "")


def _long_run(speed: Speed) -> str:
    joules = "" if speed.sustained_joules is None else f", {speed.sustained_joules:.2f} × the joules per token"
    return f"after {(speed.sustained_s or 0) / 60:.0f} min {speed.sustained_speed:.0%} of the speed at first{joules}"


def _own_code(profile: DeviceProfile) -> str:
    """The instruction set that edge compile takes for a profile that names none."""
    from edge.devices.profiles import HOST

    if profile.system not in ("linux", "android"):
        return "edge export only: edge compile is for Linux and Android"
    return "the best that this processor has" if profile.name == HOST else "nothing: its profile says no isa"


def _for_the_estimate(profile: DeviceProfile) -> str:
    from edge.devices.profiles import HOST, host_power

    if profile.name == HOST:
        return f": joules are estimated from the profile of {host_power().profile}"
    return f": joules {'of its NPU alone can' if profile.value('npu_watts') else 'cannot'} be estimated"


_LABELS = {
    "l1d": "L1d cache", "l2": "L2 cache", "l3": "L3 cache", "f32_flops": "float32 arithmetic",
    "int8_ops": "int8 arithmetic", "npu_int8_ops": "NPU, int8 arithmetic",
    "npu_int4_ops": "NPU, int4 arithmetic", "npu_f16_flops": "NPU, float16 arithmetic", "npu_watts": "NPU at work",
    "npu_read_bandwidth": "reading memory, NPU", "npu_context": "NPU, one context",
    "gpu_read_bandwidth": "reading memory, GPU", "bus_bandwidth": "memory bus, in theory",
    "read_bandwidth": "reading memory", "read_bandwidth_one_core": "reading memory, one core",
    "throttle_celsius": "slows itself down at", "core_watts": "a busy core", "idle_watts": "idle, the whole device",
    "dram_pj_per_byte": "memory traffic",
}  # fmt: skip


def _words(name: str) -> str:
    return _LABELS.get(name, name)


def _value(name: str, value: float | None) -> str:
    from edge.devices.profiles.profile import FIGURES

    if value is None:
        return "unknown"
    unit = FIGURES.get(name, "")
    if unit == "bytes":
        return format_bytes(value)
    if unit.endswith("/s"):
        return f"{value / 1e9:.3g} G{unit}" if value < 1e12 else f"{value / 1e12:.3g} T{unit}"
    return f"{value:g} {unit}".strip()
