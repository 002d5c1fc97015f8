"""Profiles as TOML files: read with every key and type checked, and written."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from edge.devices.output import new_file
from edge.devices.profile import FIGURE_KINDS, FIGURES, Cluster, DeviceProfile, Figure
from edge.devices.regular import read_regular
from edge.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_BYTES = 1 << 18  # no profile is longer
_TEXTS = ("name", "description", "machine", "isa", "cpu", "system", "gpu", "npu")
_LISTS = ("instruction_sets", "sensors", "sources")


def read_profile(path: Path) -> DeviceProfile:
    """Raises InputError, in one line, for whatever is wrong with the file."""
    try:
        data = read_regular(path, _MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} is too long for a device's profile")
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise InputError(f"{path} is no TOML: {str(error).splitlines()[0]}") from None
    try:
        return _profile(table)
    except _Wrong as wrong:
        raise InputError(f"{path}: {wrong}") from None


def write_profile(profile: DeviceProfile, path: Path, *, private: bool = False) -> None:
    """The whole file appears at once; private: for this user alone. Raises InputError if it cannot be written."""
    with new_file(path, private=private) as temporary:
        temporary.write_text(to_toml(profile), encoding="utf-8")


def to_toml(profile: DeviceProfile) -> str:
    """What read_profile reads back."""
    lines = [f"{name} = {_toml(getattr(profile, name))}" for name in _TEXTS if getattr(profile, name) is not None]
    lines += [f"{name} = {_toml(list(getattr(profile, name)))}" for name in _LISTS if getattr(profile, name)]
    for cluster in profile.clusters:
        lines += ["", "[[clusters]]", *_pairs(cluster)]
    for name, figure in profile.figures.items():
        lines += ["", f"[figures.{name}]", *_pairs(figure)]
    return "\n".join([*lines, ""])


def _pairs(part: Cluster | Figure) -> list[str]:
    values = [(each.name, getattr(part, each.name)) for each in fields(part)]
    return [f"{name} = {_toml(value)}" for name, value in values if value not in (None, "")]


def _toml(value: object) -> str:
    """JSON's strings, numbers and lists are TOML's, but for one character."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


class _Wrong(Exception):  # noqa: N818 - becomes an InputError that names the file
    pass


def is_name(name: str) -> bool:
    """Letters, digits, - and . only: it becomes the name of a file."""
    return name.isascii() and name.replace("-", "").replace(".", "").isalnum()


def _profile(table: dict[str, Any]) -> DeviceProfile:
    _only(table, (*_TEXTS, *_LISTS, "clusters", "figures"), "a profile")
    texts = {name: _text(table[name], name) for name in _TEXTS if name in table}
    for name in ("name", "description", "machine"):
        if name not in texts:
            raise _Wrong(f"{name} is missing")
    if not is_name(texts["name"]):
        raise _Wrong(f"the name {texts['name']!r} may hold letters, digits, - and . only")
    lists = {name: tuple(_text(each, name) for each in _list(table[name], name)) for name in _LISTS if name in table}
    clusters = tuple(_cluster(each) for each in _list(table.get("clusters", []), "clusters"))
    figures = {name: _figure(name, each) for name, each in _table(table.get("figures", {}), "figures").items()}
    return DeviceProfile(**texts, **lists, clusters=clusters, figures=figures)  # type: ignore[arg-type]


def _cluster(value: object) -> Cluster:
    table = _table(value, "a cluster")
    _only(table, [each.name for each in fields(Cluster)], "a cluster")
    cores = _number(table.get("cores"), "cores of a cluster")
    if cores != int(cores) or cores > 4096:
        raise _Wrong(f"a cluster of {cores} cores makes no sense")
    ghz = _number(table["ghz"], "ghz of a cluster") if "ghz" in table else None
    return Cluster(_text(table.get("kind"), "kind of a cluster"), int(cores), _source(table, "a cluster"), ghz)


def _figure(name: str, value: object) -> Figure:
    if name not in FIGURES:
        raise _Wrong(f"unknown figure {name!r}: choose {', '.join(FIGURES)}")
    table = _table(value, f"figures.{name}")
    _only(table, [each.name for each in fields(Figure)], f"figures.{name}")
    kind = _text(table.get("kind"), f"kind of {name}")
    if kind not in FIGURE_KINDS:
        raise _Wrong(f"{name} is of the unknown kind {kind!r}: choose {', '.join(FIGURE_KINDS)}")
    threads = _number(table["threads"], f"threads of {name}") if "threads" in table else None
    return Figure(
        _number(table.get("value"), f"value of {name}"),
        kind,
        _source(table, name),
        _text(table["note"], f"note of {name}") if "note" in table else "",
        None if threads is None else max(1, int(threads)),
    )


def _source(table: dict[str, Any], what: str) -> str:
    if "source" not in table:
        raise _Wrong(f"{what} needs a source: say where the figure stands")
    return _text(table["source"], f"source of {what}")


def _only(table: dict[str, Any], known: Any, what: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise _Wrong(f"{what} has no {unknown[0]!r}: choose {', '.join(known)}")


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{what} must be a table")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{what} must be a list")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 2000 or not value.isprintable():
        raise _Wrong(f"{what} must be a line of text")
    return value


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e18:
        raise _Wrong(f"{what} must be a number greater than 0")
    return value
