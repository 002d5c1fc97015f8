"""Read and write device profiles as TOML files, with every key and type checked."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

from edge.devices.output import new_file
from edge.devices.profiles.profile import Cluster, DeviceProfile, Figure, Npu, Speed
from edge.devices.regular import read_bounded
from edge.errors import InputError
from edge.values import parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_BYTES = 1 << 18  # no profile is longer
_TEXTS = ("name", "description", "machine", "isa", "cpu", "system", "gpu", "measured_by")
_LISTS = ("instruction_sets", "sensors", "sources")


def read_profile(path: Path) -> DeviceProfile:
    """Read a profile. Raises a one-line InputError for whatever is wrong with the file."""
    data = read_bounded(path, _MOST_BYTES, "a device's profile")
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise InputError(f"{path} is no TOML: {str(error).splitlines()[0]}") from None
    try:
        return parse(DeviceProfile, table, strict=True)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def write_profile(profile: DeviceProfile, path: Path, *, private: bool = False) -> None:
    """Write a profile atomically. private: readable by this user alone. Raises InputError if it cannot be written."""
    with new_file(path, private=private) as temporary:
        temporary.write_text(to_toml(profile), encoding="utf-8")


def to_toml(profile: DeviceProfile) -> str:
    """The text that `read_profile` reads back."""
    lines = [f"{name} = {_toml(getattr(profile, name))}" for name in _TEXTS if getattr(profile, name) is not None]
    lines += [f"{name} = {_toml(list(getattr(profile, name)))}" for name in _LISTS if getattr(profile, name)]
    if profile.npu is not None:
        lines += ["", "[npu]", *_pairs(profile.npu)]
    for cluster in profile.clusters:
        lines += ["", "[[clusters]]", *_pairs(cluster)]
    for speed in profile.speeds:
        lines += ["", "[[speeds]]", *_pairs(speed)]
    for name, figure in profile.figures.items():
        lines += ["", f"[figures.{name}]", *_pairs(figure)]
    return "\n".join([*lines, ""])


def _pairs(part: Npu | Cluster | Figure | Speed) -> list[str]:
    values = [(each.name, getattr(part, each.name)) for each in fields(part)]
    return [f"{name} = {_toml(value)}" for name, value in values if value not in (None, "", ())]


def _toml(value: object) -> str:
    """A TOML value. JSON's strings, numbers and lists are valid TOML, but for one character."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
