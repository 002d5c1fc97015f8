"""`edge devices`: what this device is and what it grants."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import print_json, table


def devices(
    known: Annotated[bool, o.flag("--list", help="List the devices that edge compile knows.")] = False,
    json: o.Json = False,
) -> None:
    """Show this device: processor, cores, instruction sets, caches and memory, as measured."""
    if known:
        _list(json)
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


def _list(json: bool) -> None:
    from edge.devices.profiles import find_profile, profile_names

    profiles = [find_profile(name) for name in profile_names()]
    if json:
        print_json({"devices": [asdict(profile) for profile in profiles]})
        return
    rows = [[each.name, each.description, each.isa or "the best it has"] for each in profiles]
    print(table(["device", "what it is", "compiled for"], rows, left=3))
