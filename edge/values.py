"""Dataclasses from values of JSON, every value checked: neither files nor other processes are trusted."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(kind: type[T], data: object, where: str = "") -> T:
    """`data` as a `kind`: a dataclass, or a type that a field of one may have. Unknown names are ignored, since newer
    versions may add some. Raises ValueError, which says where."""
    return cast(T, _parse(kind, data, where))


def _parse(kind: Any, data: object, where: str) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, Union):  # only `X | None`
        (other,) = [each for each in arguments if each is not type(None)]
        return None if data is None else _parse(other, data, where)
    if origin is Literal:
        return _checked(data, data in arguments, where)
    if is_dataclass(kind):
        return _parse_dataclass(kind, data, where)
    if origin is list:
        items = cast("list[object]", _checked(data, isinstance(data, list), where))
        return [_parse(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items)]
    if origin is tuple:
        items = cast("list[object]", _checked(data, isinstance(data, list | tuple), where))
        _checked(items, len(items) == len(arguments), where)
        return tuple(_parse(each, item, where) for each, item in zip(arguments, items, strict=True))
    if origin is dict:
        pairs = cast("dict[str, object]", _checked(data, isinstance(data, dict), where))
        return {key: _parse(arguments[1], value, f"{where}.{key}") for key, value in pairs.items()}
    if kind is float:
        right = isinstance(data, int | float) and not isinstance(data, bool) and _is_finite(data)
        return float(cast(float, _checked(data, right, where)))
    return _checked(data, type(data) is kind, where)


def _parse_dataclass(kind: Any, data: object, where: str) -> object:
    values = cast("dict[str, object]", _checked(data, isinstance(data, dict), where or kind.__name__))
    parsed = {}
    for each in fields(kind):
        inner = f"{where}.{each.name}".lstrip(".")
        if each.name in values:
            parsed[each.name] = _parse(_hints(kind)[each.name], values[each.name], inner)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{inner} is missing")
    return kind(**parsed)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _checked(data: object, right: bool, where: str) -> object:
    if not right:
        raise ValueError(f"{where} is of the wrong kind")
    return data
