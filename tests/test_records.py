"""`edge.records.dataclass`, compared with the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import pytest

from edge.records import _dataclass as ours

THEIRS = dataclasses.dataclass


def define(dataclass: Any) -> dict[str, type[Any]]:
    @dataclass(frozen=True)
    class Empty:
        pass

    @dataclass(frozen=True)
    class Plain:
        first: int
        second: str = "b"
        third: list[int] = dataclasses.field(default_factory=list)
        kind: ClassVar[str] = "plain"

    @dataclass(frozen=True)
    class Derived(Plain):
        second: str = "derived"
        fourth: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class Named:
        later: int = 2
        first: int

    @dataclass(frozen=True)
    class Mixed:
        first: int
        _: dataclasses.KW_ONLY
        second: int

    @dataclass(frozen=True)
    class Checked:
        first: int

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError("negative")

    @dataclass(frozen=True, eq=False)
    class Identity:
        first: int

    @dataclass
    class Mutable:
        first: int
        second: list[int] = dataclasses.field(default_factory=list)

    found = locals()
    return {name: each for name, each in found.items() if isinstance(each, type)}


OURS, ORACLE = define(ours), define(THEIRS)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Empty", (), {}), ("Empty", (1,), {}),
    ("Plain", (), {}), ("Plain", (1,), {}), ("Plain", (1, "c", [2]), {}), ("Plain", (1,), {"third": [3]}),
    ("Plain", (1, 2, 3, 4), {}), ("Plain", (1,), {"fifth": 5}), ("Plain", (1,), {"first": 2}),
    ("Derived", (1,), {}), ("Derived", (1, "x", [], 2.0), {}),
    ("Named", (1,), {}), ("Named", (), {"first": 1}), ("Named", (), {}),
    ("Mixed", (1,), {"second": 2}), ("Mixed", (1, 2), {}),
    ("Checked", (1,), {}), ("Checked", (-1,), {}),
    ("Identity", (1,), {}), ("Mutable", (1,), {}), ("Mutable", (1, [2]), {}),
]  # fmt: skip


def outcome(work: Any) -> object:
    try:
        return work()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(("name", "values", "named"), CALLS)
def test_instances_behave_as_those_of_the_standard_library(
    name: str, values: tuple[Any, ...], named: dict[str, Any]
) -> None:
    def seen(cls: type[Any]) -> list[object]:
        def make() -> Any:
            return cls(*values, **named)

        def change(made: Any) -> object:
            return dataclasses.replace(made, **dict.fromkeys(["first"], 7))

        def assign(made: Any) -> None:
            made.first = 7

        def add(made: Any) -> None:
            made.new = 7

        def delete(made: Any) -> None:
            del made.first

        def copied(made: Any) -> bool:
            return copy.deepcopy(made) == made

        def hashes(made: Any) -> bool:
            return hash(made) == hash(make())

        looks = [
            repr, dataclasses.asdict, dataclasses.fields, lambda made: repr(change(made)), assign, add, delete, copied,
            hashes, lambda made: made == make(), lambda made: made == change(made), lambda made: made == 1,
            lambda made: {**vars(made)}, lambda made: type(made).__match_args__,
        ]  # fmt: skip
        made = outcome(make)
        if isinstance(made, tuple):
            return [made]
        return [repr(outcome(lambda look=look: look(made))) for look in looks]

    assert seen(OURS[name]) == seen(ORACLE[name])


@ours(frozen=True)
class Pickled:
    first: int
    nested: Any = None


def test_instances_are_pickled_and_shown_though_they_contain_themselves() -> None:
    made = Pickled(1, [])
    assert pickle.loads(pickle.dumps(made)) == made
    made.nested.append(made)
    assert repr(made) == "Pickled(first=1, nested=[...])"


@pytest.mark.parametrize("base", [ours, THEIRS])
@pytest.mark.parametrize("derived", [ours, THEIRS])
def test_classes_inherit_from_those_of_the_standard_library_and_it_from_them(base: Any, derived: Any) -> None:
    @base(frozen=True)
    class Base:
        first: int

    @derived(frozen=True)
    class Derived(Base):
        second: int = 2

    made = Derived(1)
    assert (made, hash(made), repr(made).split(".")[-1]) == (
        Derived(1, 2),
        hash(Derived(1)),
        "Derived(first=1, second=2)",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.first = 2
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        derived(type("Thawed", (Base,), {}))
