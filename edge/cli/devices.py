"""`edge devices`: what this device is and what it grants."""

from __future__ import annotations

from dataclasses import asdict

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import print_json, table


def devices(json: o.Json = False) -> None:
    """Show this device: processor, cores, instruction sets, caches and memory, as measured."""
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
