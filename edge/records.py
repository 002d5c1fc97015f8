"""Dataclasses whose methods are compiled when they are first called.

The standard library compiles up to six methods for each dataclass where its module is imported, which took a quarter of
the start of `edge run`: most classes are never compared or printed in a run, and many have no instance.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

_SHAPES: Any = [dataclasses.make_dataclass("_", [], frozen=frozen) for frozen in (False, True)]
_PARAMS = [each.__dataclass_params__ for each in _SHAPES]  # by frozen


def _dataclass(cls: type[Any] | None = None, /, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    """A replacement for `dataclasses.dataclass` that defines the same classes faster.

    Fields may have a default, a `default_factory` or `kw_only`; none is an `InitVar`.
    Raises TypeError for other settings of `field`.
    """
    if cls is None:
        return lambda cls: _dataclass(cls, frozen=frozen, eq=eq, kw_only=kw_only)
    made: Any = cls
    for base in made.__mro__[1:]:
        known = getattr(base, "__dataclass_params__", None)
        if known is not None and known.frozen != frozen:
            one, other = ("frozen", "a non-frozen") if frozen else ("non-frozen", "a frozen")
            raise TypeError(f"cannot inherit {one} dataclass from {other} one")
    made.__doc__ = made.__doc__ or made.__name__  # the standard library's is the signature, which takes long
    made.__dataclass_params__, made.__dataclass_fields__ = _PARAMS[frozen], _collect(made, kw_only)
    by_position = tuple(each.name for each in made.__dataclass_fields__.values() if not each.kw_only)
    methods = {"__init__": _first_init(made), "__repr__": _represent, "__match_args__": by_position}
    if frozen:
        methods |= {"__setattr__": _set, "__delattr__": _delete}
    if eq:
        values = attrgetter("__class__", *made.__dataclass_fields__)  # of a single name it would not return a tuple
        methods |= {"__eq__": _equality(values), "__hash__": (lambda self: hash(values(self))) if frozen else None}
    for name, method in methods.items():
        if name not in vars(made) or (name == "__hash__" and vars(made)[name] is None):  # None: it has an __eq__
            setattr(made, name, method)
    return made


def _collect(cls: Any, kw_only: bool) -> dict[str, Any]:
    """The fields of a class by name, those of its bases first, as the standard library's functions read them."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        found |= getattr(base, "__dataclass_fields__", {})
    for name, kind in inspect.get_annotations(cls).items():
        if kind is dataclasses.KW_ONLY or str(kind).endswith("KW_ONLY"):
            kw_only = True
        elif not str(kind).removeprefix("typing.").startswith("ClassVar"):
            given = getattr(cls, name, dataclasses.MISSING)
            field: Any = given if isinstance(given, dataclasses.Field) else dataclasses.field(default=given)
            if not (field.init and field.repr and field.compare and field.hash is None):
                raise TypeError(f"{name}: fields have no init, repr, compare or hash of their own here")
            if field.default.__class__.__hash__ is None:
                raise ValueError(f"mutable default {type(field.default)} for field {name} is not allowed")
            if field.kw_only is dataclasses.MISSING:
                field.kw_only = kw_only
            field.name, field.type, field._field_type = name, kind, dataclasses._FIELD  # type: ignore[attr-defined]
            found[name] = field
            if field.default is not dataclasses.MISSING:
                setattr(cls, name, field.default)
            elif field is given:
                delattr(cls, name)
    _check_order(found.values())
    return found


def _check_order(found: Iterable[Any]) -> None:
    """Raise TypeError for a positional field without a default that follows one with a default."""
    before = ""
    for field in found:
        if field.kw_only:
            continue
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
            before = field.name
        elif before:
            raise TypeError(f"field {field.name!r} without a default follows {before!r}, which has one")


if TYPE_CHECKING:  # type checkers know this decorator
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass


def _first_init(cls: type[Any]) -> Any:
    def init(self: Any, *values: Any, **named: Any) -> None:
        setattr(cls, "__init__", _compile_init(cls))  # noqa: B010
        cls.__init__(self, *values, **named)

    return init


def _compile_init(cls: type[Any]) -> Any:
    missing: Any = dataclasses.MISSING
    scope: dict[str, Any] = {"_missing": missing}
    parameters: tuple[list[str], list[str]] = ["self"], ["*"]  # by position, by keyword alone
    defaults: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    frozen, body = cls.__dataclass_params__.frozen, ["_fields = self.__dict__"]
    for field in dataclasses.fields(cls):
        name = value = field.name
        by_keyword = field.kw_only is True
        if field.default_factory is not missing:
            scope[f"_make_{name}"] = field.default_factory
            value = f"_make_{name}() if {name} is _missing else {name}"
        optional = value != name or field.default is not missing
        if optional:
            defaults[by_keyword][name] = field.default
        parameters[by_keyword].append(name + "=0" * optional)  # a constant takes less time to compile
        body.append(f"_fields[{name!r}] = {value}" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    listed = ", ".join(parameters[0] + parameters[1][len(parameters[1]) == 1 :])
    exec(f"def __init__({listed}): {'; '.join(body)}", scope)
    made: Any = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__defaults__, made.__kwdefaults__ = tuple(defaults[0].values()), defaults[1]
    return made


def _equality(values: Any) -> Any:
    def equal(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


@recursive_repr()
def _represent(self: Any) -> str:
    values = [f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__]
    return f"{type(self).__qualname__}({', '.join(values)})"


def _set(self: Any, name: str, value: object) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_frozen(instance: Any, name: str) -> bool:
    """Whether an attribute is frozen: all are in a dataclass, but only the fields are in its plain subclasses."""
    return name in instance.__dataclass_fields__ or "__dataclass_fields__" in vars(type(instance))
