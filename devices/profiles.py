"""Devices that are known by name, one file each in `profiles/`: what code for them must be compiled for."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from edge.devices.host import probe_host
from edge.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOST = "host"
_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Power:
    """What work costs, for the estimate. core_watts: of a busy core, above idling. idle_watts: of the device, whatever
    it does. dram_pj_per_byte: of a byte read from memory. 0: unknown. profile: whose figures these are."""

    core_watts: float = 0.0
    idle_watts: float = 0.0
    dram_pj_per_byte: float = 0.0
    profile: str = "no profile"


@dataclass(frozen=True)
class Profile:
    """A device. `isa`: a target of the native engine; None: whatever suits this machine best.

    cpu: LLVM's name, by which code is scheduled; None as for isa. cores, memory (bytes): None where models differ or
    nobody says. sources: where these facts stand.
    """

    name: str
    description: str
    machine: str
    isa: str | None
    cpu: str | None
    cores: int | None = None
    memory: int | None = None
    sources: tuple[str, ...] = ()
    power: Power | None = None


def profile_names() -> tuple[str, ...]:
    return (HOST, *sorted(path.stem for path in _FOLDER.glob("*.toml")))


def find_profile(name: str) -> Profile:
    """The device called `name`; "host" is the one that this process runs on. Raises InputError with all names."""
    if name == HOST:
        host = probe_host()
        return Profile(HOST, host.processor, host.machine, None, None, host.physical_cores, host.memory)
    if name not in profile_names():
        raise InputError(f"unknown device {name!r}: choose {', '.join(profile_names())}")
    fields = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    power = Power(**fields["power"], profile=name) if "power" in fields else None
    return Profile(**fields | {"sources": tuple(fields.get("sources", ())), "power": power})


def host_power() -> Power:
    """Of a processor of this kind: nobody has measured this very one."""
    generic = "generic-arm64" if platform.machine() in ("aarch64", "arm64") else "generic-x86"
    return find_profile(generic).power or Power()
