"""Checked parsing of JSON and TOML data into dataclasses, since files and other processes are not trusted.

The package `msgspec` does this too. It would add 0.6 MB of compiled code, which not every device has a wheel for, and
40 ms to the start, and it cannot refuse unknown names in dataclasses.
"""

from __future__ import annotations

import json
import math
import reprlib
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge.records import dataclass

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A constraint for `Annotated[type, Rule(…)]`: its description, and a test of the value."""

    words: str
    holds: Callable[[Any], bool]


def parse(kind: type[T], data: object, where: str = "", *, strict: bool = False) -> T:
    """Parse JSON or TOML data into a `kind`: a dataclass, or a type that its fields may have.

    strict: refuse names that a dataclass does not have, which newer versions may add. Raises ValueError, which says
    where.
    """
    return cast(T, _parse(kind, data, where, strict))


def brief(data: object) -> str:
    """A value in a message: as JSON has it, cut where it is long. A text by itself is in single quotes."""
    return _BRIEF.repr(data)


class _Brief(reprlib.Repr):
    """Finds a value's method by the name of its type."""

    def repr_NoneType(self, data: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, data: bool, level: int) -> str:
        return str(data).lower()

    def repr_str(self, data: str, level: int) -> str:
        if level == self.maxlevel:
            return super().repr_str(data, level)
        cut = (self.maxstring - 5) // 2
        short = data if len(data) <= self.maxstring - 2 else f"{data[:cut]}...{data[-cut:]}"
        return json.dumps(short, ensure_ascii=False)


_BRIEF = _Brief()


def _parse(kind: Any, data: object, where: str, strict: bool) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin is Annotated:
        return _parse_by_rules(arguments[0], arguments[1:], data, where, strict)
    if origin in (types.UnionType, Union):
        return _parse_union(arguments, data, where, strict)
    if origin is Literal:
        return _checked(data, data in arguments, where, f"one of {', '.join(map(str, arguments))}")
    if is_dataclass(kind):
        return _parse_dataclass(kind, data, where, strict)
    if origin in (list, tuple):
        items = cast("list[object]", _checked(data, isinstance(data, list | tuple), where, "a list"))
        if origin is list or arguments[1:] == (...,):
            parsed = [_parse(arguments[0], item, f"{where}[{index}]", strict) for index, item in enumerate(items)]
            return parsed if origin is list else tuple(parsed)
        _checked(items, len(items) == len(arguments), where, f"a list of {len(arguments)}")
        return tuple(_parse(each, item, where, strict) for each, item in zip(arguments, items, strict=True))
    if origin is dict:
        pairs = cast("dict[str, object]", _checked(data, isinstance(data, dict), where, "a table"))
        for key in pairs:
            _parse(arguments[0], key, f"a name in {where}", strict)
        return {key: _parse(arguments[1], value, f"{where}.{key}", strict) for key, value in pairs.items()}
    if kind is float:
        right = isinstance(data, int | float) and not isinstance(data, bool) and _is_finite(data)
        return float(cast(float, _checked(data, right, where, "a number")))
    return _checked(data, type(data) is kind, where, _WORDS.get(kind, kind.__name__))


def _parse_by_rules(kind: Any, rules: tuple[Rule, ...], data: object, where: str, strict: bool) -> object:
    """Parse a value; one of another type is refused with the first rule's words."""
    try:
        value = _parse(kind, data, where, strict)
    except ValueError:
        raise _WrongError(where, rules[0].words, data) from None
    for rule in rules:
        if not rule.holds(value):
            raise _WrongError(where, rule.words, data)
    return value


def _parse_union(kinds: tuple[Any, ...], data: object, where: str, strict: bool) -> object:
    """Parse as the first type that fits. Raises the error of the type that fits furthest, in the words of all that fit
    as far."""
    if data is None and type(None) in kinds:
        return None
    errors = list[ValueError]()
    for kind in (each for each in kinds if each is not type(None)):
        try:
            return _parse(kind, data, where, strict)
        except ValueError as error:
            errors.append(error)
    wrong = [each for each in errors if isinstance(each, _WrongError)]
    if not isinstance(errors[-1], _WrongError):
        raise errors[-1]
    furthest = max(wrong, key=lambda each: (len(each.where), each.where))
    words = dict.fromkeys(each.words for each in wrong if each.where == furthest.where)
    raise _WrongError(furthest.where, " or ".join(words), furthest.data)


class _WrongError(ValueError):
    """A value that is not what it must be."""

    def __init__(self, where: str, words: str, data: object) -> None:
        super().__init__(f"{where} must be {words}, not {brief(data)}")
        self.where, self.words, self.data = where, words, data


def _parse_dataclass(kind: Any, data: object, where: str, strict: bool) -> object:
    values = cast("dict[str, object]", _checked(data, isinstance(data, dict), where or kind.__name__, "a table"))
    names = [each.name for each in fields(kind)]
    if strict and (unknown := sorted(set(values) - set(names))):
        raise ValueError(f"{where or kind.__name__} has no {unknown[0]!r}: choose {', '.join(names)}")
    parsed = {}
    for each in fields(kind):
        inner = f"{where}.{each.name}".lstrip(".")
        if each.name in values:
            parsed[each.name] = _parse(_hints(kind)[each.name], values[each.name], inner, strict)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{inner} is missing")
    return kind(**parsed)


_WORDS = {str: "text", int: "a whole number", bool: "true or false"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _checked(data: object, right: bool, where: str, words: str) -> object:
    if not right:
        raise _WrongError(where, words, data)
    return data
