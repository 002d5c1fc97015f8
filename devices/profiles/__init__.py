"""Device profiles by name: those that come with edge, in this folder, and the user's own, which take precedence.

The user's lie in EDGE_DEVICES, or in the system's folder for settings. `edge devices probe` writes `host.toml` there,
with its measurements of this device.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edge.devices.host import processor
from edge.devices.kernel import read_text
from edge.devices.platform import system_folder
from edge.devices.private import distrust, make_private_folder
from edge.devices.profiles.file import read_profile, write_profile
from edge.devices.profiles.npus import SeenNpu, chips, seen_npus
from edge.devices.profiles.profile import Cluster, DeviceProfile, Figure, Npu, Power
from edge.errors import InputError, did_you_mean

HOST = "host"
_FOLDER = Path(__file__).parent
_SYSTEM_SAYS = "the operating system"

_log = logging.getLogger("edge")


def own_folder() -> Path:
    """The folder of the user's profiles; it need not exist. Raises InputError if EDGE_DEVICES names no folder."""
    stated = os.environ.get("EDGE_DEVICES")
    folder = os.path.abspath(os.path.expanduser(stated or Path(system_folder("config")) / "devices"))
    try:
        os.listdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if stated:  # an unreadable default folder is ignored: the user has not chosen it
            raise InputError(f"EDGE_DEVICES: {stated} cannot be read ({error.strerror})") from None
    return Path(folder)


def profile_names() -> tuple[str, ...]:
    """The names of all profiles, `host` first."""
    return (HOST, *sorted((_names(_FOLDER) | _names(own_folder())) - {HOST}))


def comes_with_edge(name: str) -> bool:
    """Whether edge ships a profile of this name."""
    return name in _names(_FOLDER)


def find_profile(name: str) -> DeviceProfile:
    """Find a device's profile by name. "host" is this device, with the figures measured here.

    Raises InputError for an unknown name, listing the known ones, and for a damaged profile of the user's.
    """
    if name == HOST:
        return _probed_host() or describe_host()
    for folder in (own_folder(), _FOLDER):
        if name in _names(folder):
            return _read(name, folder)
    known = profile_names()
    advice = did_you_mean(name, known, 1) or f"choose {', '.join(known)}"
    raise InputError(f"unknown device {name!r}: {advice}")


def find_model(model: str) -> DeviceProfile | None:
    """The shipped profile for a name in the device tree, or for Android's maker and model; None if there is none."""
    from fnmatch import fnmatchcase

    def names(own: str) -> bool:
        return fnmatchcase(model, own) or fnmatchcase(model, f"* {own}")

    return next((each for each in _shipped() if any(map(names, each.models))), None) if model else None


def add_profile(profile: DeviceProfile) -> Path:
    """Save a profile among the user's own. Raises InputError if it cannot be written."""
    path = own_folder() / f"{profile.name}.toml"
    try:
        make_private_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None
    write_profile(profile, path, private=True)
    return path


def describe_host() -> DeviceProfile:
    """A profile of this device from what the system tells, without measurements."""
    from edge.devices.host import probe_host

    host = probe_host()
    sizes = {"memory": host.memory} | {
        name: host.caches[level] for name, level in (("l1d", "L1d"), ("l2", "L2"), ("l3", "L3")) if level in host.caches
    }
    npu = next((seen.npu for seen in host_npus()), None)
    return DeviceProfile(
        name=HOST,
        description=processor().name,
        machine=host.machine,
        system=host.system.partition(" ")[0].lower(),
        clusters=(Cluster(host.processor, host.physical_cores, _SYSTEM_SAYS),),
        instruction_sets=host.instruction_sets,
        npu=npu,
        figures={name: Figure(size, "measured", _SYSTEM_SAYS) for name, size in sizes.items()} | _npu_figures(npu),
    )


def host_npus(root: Path = Path("/")) -> list[SeenNpu]:
    """The NPUs of this device, completed with the vendor's figures if a shipped profile has the same chip."""
    found = seen_npus(root)
    alike = _with_chip(chips(root)) if found else None
    if alike is None or alike.npu is None:
        return found
    known = replace(alike.npu, note="")  # the note is for boards whose chip is unknown
    return [replace(each, npu=known) if _is_kind(each.npu, known) else each for each in found]


def _npu_figures(npu: Npu | None) -> dict[str, Figure]:
    """NPU figures of a device with the same chip; watts are left out, since they hold for that whole device."""
    alike = None if npu is None or npu.chip is None else _with_chip([npu.chip])
    found = {} if alike is None else alike.figures
    return {name: found[name] for name in found if name.startswith("npu_") and name != "npu_watts"}


def _with_chip(names: list[str]) -> DeviceProfile | None:
    """The shipped profile whose NPU belongs to one of these chips, or None."""
    return next((each for each in _shipped() if each.npu and each.npu.chip in names), None) if names else None


def _is_kind(one: Npu, other: Npu) -> bool:
    return (one.vendor, one.name) == (other.vendor, other.name)


def host_power(root: Path = Path("/")) -> Power:
    """This host's power figures: from the user's profile, that of its board, or assumed for this kind of processor."""
    probed = _probed_host()
    if probed and probed.power:
        return probed.power
    board = find_model(read_text(root / "proc/device-tree/model").strip("\0"))
    if board and board.power:
        return board.power
    generic = "generic-arm64" if platform.machine() in ("aarch64", "arm64") else "generic-x86"
    return read_profile(_FOLDER / f"{generic}.toml").power or Power()


def _probed_host() -> DeviceProfile | None:
    """The profile that was probed on this host. None if there is none, if it is another machine's (settings travel), or
    if it is damaged, which is logged: no run depends on it."""
    if HOST not in _names(own_folder()):
        return None
    try:
        profile = _read(HOST, own_folder())
    except InputError as error:
        _say_once(f"{error}. It is not used: correct that file, or delete it and run edge devices probe")
        return None
    return profile if profile.description == processor().name else None


@lru_cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)


def _shipped() -> Iterator[DeviceProfile]:
    return (read_profile(_FOLDER / f"{name}.toml") for name in sorted(_names(_FOLDER)))


def _names(folder: Path) -> set[str]:
    try:
        return {name[: -len(".toml")] for name in os.listdir(folder) if name.endswith(".toml")}
    except OSError:
        return set()


def _read(name: str, folder: Path) -> DeviceProfile:
    """Read a profile. Its name must be its file's, so that no device is taken for another. Raises InputError."""
    path = folder / f"{name}.toml"
    with suppress(OSError):  # which read_profile explains
        if folder != _FOLDER and (why := distrust(path.stat())):
            raise InputError(f"{path} is not used, because {why}: add it again with edge devices add")
    profile = read_profile(path)
    if profile.name != name:
        raise InputError(f"{path} says that it is {profile.name}: name the file {profile.name}.toml")
    return profile
