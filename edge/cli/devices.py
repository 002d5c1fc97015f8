"""`edge devices`: what this device is, what it grants and what it can measure; the devices known by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import print_json, table

devices = typer.Typer(help="This device, its sensors, and the devices known by name.")


@devices.callback(invoke_without_command=True)
def here(context: typer.Context, json: o.Json = False) -> None:
    """Without a command: this device as measured: processor, cores, instruction sets, caches and memory."""
    if context.invoked_subcommand is not None:
        return
    from edge.devices.host import probe_host

    host = probe_host()
    if json:
        print_json({"host": asdict(host)})
        return
    rows = [
        ["system", f"{host.system} ({host.machine})"],
        ["processor", host.processor],
        ["cores", f"{host.physical_cores} physical, {host.logical_cores} logical, {host.usable_cores} used by default"],
        ["instruction sets", " ".join(host.instruction_sets) or "none of note"],
        ["caches", ", ".join(f"{name} {format_bytes(size)}" for name, size in host.caches.items()) or "unknown"],
        ["memory", format_bytes(host.memory)],
        ["memory limit", f"{format_bytes(host.limit.bytes)} ({host.limit.source})"],
    ]
    print(table(["host", "measured"], rows, left=2))


@devices.command("list")
def known(json: o.Json = False) -> None:
    """The devices known by name, for which edge compile makes code."""
    from edge.devices.profiles import find_profile, profile_names

    profiles = [find_profile(name) for name in profile_names()]
    if json:
        print_json({"devices": [asdict(profile) for profile in profiles]})
        return
    rows = [[each.name, each.description, each.isa or "the best it has"] for each in profiles]
    print(table(["device", "what it is", "compiled for"], rows, left=3))


@devices.command()
def show(
    name: Annotated[str, typer.Argument(metavar="DEVICE", help="A name of edge devices list.")], json: o.Json = False
) -> None:
    """What is known of a device, and where that stands."""
    from edge.devices.profiles import find_profile

    profile = find_profile(name)
    if json:
        print_json(asdict(profile))
        return
    power = profile.power
    core = f"{power.core_watts:g} W" if power and power.core_watts else "unknown"
    traffic = f"{power.dram_pj_per_byte:g} pJ per byte" if power and power.dram_pj_per_byte else "unknown"
    rows = [
        ["what it is", profile.description],
        ["machine", profile.machine],
        ["compiled for", f"{profile.isa or 'the best it has'}{f', {profile.cpu}' if profile.cpu else ''}"],
        ["cores", str(profile.cores or "unknown")],
        ["memory", format_bytes(profile.memory) if profile.memory else "unknown, or models differ"],
        ["a busy core", core],
        ["memory traffic", traffic],
        *(["source", source] for source in profile.sources),
    ]
    print(table([profile.name, ""], rows, left=2))


@devices.command()
def sensors(json: o.Json = False) -> None:
    """What tells joules and temperatures here, and why the rest does not. The first that works is used."""
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
