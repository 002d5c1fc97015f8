"""Dataclasses whose methods are made when they are first used.

The standard library compiles six methods of each class while a module is imported, 0.3 ms in all; a run imports nearly
two hundred such classes, makes instances of half of them, and compares a few.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

_MADE = ("__init__", "__match_args__", "__dataclass_fields__", "__dataclass_params__")
_COMPARING = ("__repr__", "__eq__", "__hash__")
_lock = threading.RLock()  # a class may need its bases

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(kind: type | None = None, /, **options: bool) -> Any:
        """`dataclasses.dataclass`, applied to the class when a name that it makes is first looked up."""
        if kind is None:
            return lambda decorated: dataclass(decorated, **options)
        if options.get("slots"):  # which would be another class
            return dataclasses.dataclass(kind, **options)
        for name in (*_MADE, *_COMPARING):
            if name not in vars(kind):
                setattr(kind, name, _Unmade(kind, name, options))
        return kind


class _Unmade:
    """A name of a class that `dataclasses` has not made yet."""

    def __init__(self, kind: type, name: str, options: dict[str, bool]) -> None:
        self._kind, self._name, self._options = kind, name, options

    def __get__(self, instance: object, owner: type) -> Any:
        with _lock:
            if vars(self._kind).get(self._name) is self:  # no other thread was here
                (_make if self._name in _MADE else _make_comparing)(self._kind, self._options)
        if self._name not in vars(self._kind):  # an option leaves it to the base
            return getattr(super(self._kind, owner if instance is None else instance), self._name)
        found = vars(self._kind)[self._name]
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _make(kind: type, options: dict[str, bool]) -> None:
    _remove(kind, _MADE)
    dataclasses.dataclass(kind, **{**options, "repr": False, "eq": False})


def _make_comparing(kind: type, options: dict[str, bool]) -> None:
    """From a class with the same fields: these methods work for instances of any class."""
    wanted = [name for name in _COMPARING if isinstance(vars(kind).get(name), _Unmade)]
    fields = [
        (each.name, each.type, dataclasses.field(repr=each.repr, hash=each.hash, compare=each.compare))
        for each in dataclasses.fields(kind)
    ]
    hashed = options.get("frozen", False) and options.get("eq", True)
    asked: dict[str, Any] = {"unsafe_hash": hashed, **{name: options.get(name, True) for name in ("repr", "eq")}}
    namespace = {"__doc__": kind.__doc__ or "-"}  # else it would be made, of a signature
    twin = dataclasses.make_dataclass(kind.__name__, fields, init=False, namespace=namespace, **asked)
    _remove(kind, _COMPARING)
    for name in wanted:
        if name in vars(twin):
            setattr(kind, name, vars(twin)[name])


def _remove(kind: type, names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(vars(kind).get(name), _Unmade):
            delattr(kind, name)
