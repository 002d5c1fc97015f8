"""Dataclasses from JSON, every value checked: what a file or another process says is not trusted."""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge.devices.regular import read_regular
from edge.errors import InputError
from edge.profiling.profile import KIND, SCHEMA, Profile

T = TypeVar("T")

_MOST_BYTES = 64 << 20  # a profile of an hour has less than a tenth of it


def read_profile(path: Path) -> Profile:
    """Raises InputError for a file that is no profile, or one of another schema."""
    try:
        text = read_regular(path, _MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise InputError(f"{path}: too long for a profile of edge")
        data = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: no JSON: give files that edge profile -o FILE.json wrote") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{path}: no profile: give files that edge profile -o FILE.json wrote")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise InputError(f"{path}: a profile of schema {str(data.get('schema'))[:20]}, this edge reads {SCHEMA}")
    try:
        profile = build(Profile, data)
        if not profile.engines:
            raise ValueError("engines: none")
        return profile
    except ValueError as error:
        raise InputError(f"{path}: a damaged profile ({error})") from None


def build(kind: type[T], data: object, where: str = "") -> T:
    """`data`, values of JSON, as a `kind`: a dataclass or what its fields may be. Names that it does not know are left
    out: newer versions may add some. Raises ValueError, which says where."""
    return cast(T, _build(kind, data, where))


def _build(kind: Any, data: object, where: str) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, Union):  # only `X | None`
        (other,) = [each for each in arguments if each is not type(None)]
        return None if data is None else _build(other, data, where)
    if origin is Literal:
        return _checked(data, data in arguments, where)
    if is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if origin is list:
        items = cast("list[object]", _checked(data, isinstance(data, list), where))
        return [_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items)]
    if origin is tuple:
        items = cast("list[object]", _checked(data, isinstance(data, list | tuple), where))
        _checked(items, len(items) == len(arguments), where)
        return tuple(_build(each, item, where) for each, item in zip(arguments, items, strict=True))
    if origin is dict:
        pairs = cast("dict[str, object]", _checked(data, isinstance(data, dict), where))
        return {key: _build(arguments[1], value, f"{where}.{key}") for key, value in pairs.items()}
    if kind is float:
        right = isinstance(data, int | float) and not isinstance(data, bool) and _finite(data)
        return float(cast(float, _checked(data, right, where)))
    return _checked(data, type(data) is kind, where)


def _build_dataclass(kind: Any, data: object, where: str) -> object:
    values = cast("dict[str, object]", _checked(data, isinstance(data, dict), where or kind.__name__))
    built = {}
    for each in fields(kind):
        inner = f"{where}.{each.name}".lstrip(".")
        if each.name in values:
            built[each.name] = _build(_hints(kind)[each.name], values[each.name], inner)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{inner} is missing")
    return kind(**built)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _checked(data: object, right: bool, where: str) -> object:
    if not right:
        raise ValueError(f"{where} is of the wrong kind")
    return data
