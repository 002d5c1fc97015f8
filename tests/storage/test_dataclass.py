"""Dataclasses made on first use behave as those of the standard library, which are the oracle."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from edge import dataclass as lazily


def classes(made_by: Any, **options: Any) -> tuple[Any, Any]:
    """The same class and a class below it, by the standard library or by edge."""

    @made_by(**options)
    class Point:
        """A place."""

        x: int
        y: float = 2.0
        tags: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")

    @made_by(**options)
    class Named(Point):
        name: str = "origin"

        def __repr__(self) -> str:
            return f"<{self.name}>"

    return Point, Named


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


USES: list[Callable[[Any, Any], Any]] = [
    lambda point, named: repr(point(1)).rpartition(".")[2],
    lambda point, named: repr(named(1)),
    lambda point, named: (point(1) == point(1, 2.0, ["a"]), point(1) == point(3), point(1) == named(1), point(1) == 1),
    lambda point, named: {point(1): "found"}.get(point(1)),
    lambda point, named: len({named(1), named(1), named(1, name="b")}),
    lambda point, named: setattr(point(1), "x", 2),
    lambda point, named: delattr(named(1), "name"),
    lambda point, named: point(-1),
    lambda point, named: point(),
    lambda point, named: (point.__match_args__, named.__match_args__),
    lambda point, named: str(inspect.signature(named)),
    lambda point, named: [(each.name, each.default) for each in dataclasses.fields(named)],
    lambda point, named: dataclasses.asdict(dataclasses.replace(named(1), x=5)),
    lambda point, named: (dataclasses.is_dataclass(named), point.y),
    lambda point, named: type("Plain", (named,), {})(4).x,
    lambda point, named: super(named, named(1, 2.0)).__eq__(named(1, 2.0)),
    lambda point, named: point.__hash__ is None,
    lambda point, named: point.__doc__,
]
OPTIONS: list[Any] = [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "eq": False}, {"repr": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("use", USES)
def test_a_first_use_is_as_the_standard_library_has_it(use: Callable[[Any, Any], Any], options: Any) -> None:
    def found(made_by: Any) -> Any:
        point, named = classes(made_by, **options)
        if options.get("repr") is False and use is USES[0]:
            return "<" in repr(point(1))  # object's, with an address
        return outcome(lambda: use(point, named))

    assert found(lazily.dataclass) == found(dataclasses.dataclass)


@lazily.dataclass(frozen=True)
class Sent:
    x: int


def test_unpickled_before_its_class_is_made() -> None:
    sent = pickle.loads(b"\x80\x04c" + __name__.encode() + b"\nSent\n)\x81}\x8c\x01xK\x05sb.")
    assert sent == Sent(5)
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_threads_make_a_class_once() -> None:
    for _ in range(50):
        point, _ = classes(lazily.dataclass, frozen=True)
        barrier, found = threading.Barrier(4), list[Any]()

        def use(point: Any = point, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait()
            found.append((point(1), hash(point(1))))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(set(found)) == 1
        assert len(found) == 4
