"""Amounts with units, stop strings, and exit codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.budget import format_bytes, parse_bytes, parse_celsius, parse_joules, parse_seconds, parse_watts
from edge.errors import EdgeError, InputError
from edge.run.sampling.stop_strings import StopStrings

# Budgets


@pytest.mark.parametrize(("parse", "text", "amount"), [
    *((parse_bytes, text, count) for text, count in (
        ("256MiB", 256 << 20), ("256 mib", 256 << 20), ("  1.5GiB ", 3 << 29), ("300MB", 300_000_000),
        ("512M", 512 << 20), ("1g", 1 << 30), ("64k", 64 << 10), ("64kB", 64_000), ("2TiB", 2 << 40), ("1tb", 10**12),
        ("100B", 100), ("70000", 70_000), (70_000, 70_000), (".5KiB", 512), ("1.KiB", 1024), ("1.9B", 1),
    )),
    *((parse_seconds, text, seconds) for text, seconds in (
        ("20s", 20), ("1.5m", 90), ("2min", 120), ("2h", 7200), ("500ms", 0.5), (0.25, 0.25), (7, 7), (" 1 H ", 3600),
    )),
    (parse_joules, "30MJ", 30e6), (parse_joules, "30mJ", 0.03), (parse_joules, "30 kj", 30e3),
    (parse_joules, "3.5Wh", 12600), (parse_joules, "2mWh", 7.2), (parse_joules, "2MWh", 7.2e9),
    (parse_watts, "5mW", 0.005), (parse_watts, "5MW", 5e6), (parse_watts, "5w", 5),
])  # fmt: skip
def test_amounts_have_units(parse: Callable[[Any], float], text: Any, amount: float) -> None:
    assert parse(text) == pytest.approx(amount)


@pytest.mark.parametrize("text", [
    "", " ", "MiB", "1 2", "12XB", "-1MiB", "+1", "1,5GiB", "1e9", "0x10", "1..5", ".", "nan", "inf", "\uff11MiB",
    "1\n2",
])  # fmt: skip
def test_invalid_amounts(text: str) -> None:
    with pytest.raises(InputError, match=r"memory .* is not understood: write it like 256MiB"):
        parse_bytes(text)
    with pytest.raises(InputError, match=r"deadline .* is not understood: write it like 20s"):
        parse_seconds(text, "deadline")


@pytest.mark.parametrize("text", ["256", " 256 ", 256, "256."])
def test_small_bytes_without_unit_are_refused(text: str | int) -> None:
    with pytest.raises(InputError, match=r"^--kv-memory 256 .*: did you mean 256MiB\?$"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize(
    ("parse", "example"), [(parse_seconds, "20s"), (parse_joules, "30J"), (parse_watts, "3W"), (parse_celsius, "70C")]
)
def test_text_without_unit_is_refused(parse: Callable[..., float], example: str) -> None:
    """As `--memory 256` has to, so that nobody wonders in which flag a number may stand alone."""
    with pytest.raises(InputError, match=rf"^--flag 30 has no unit: write it like {example}$"):
        parse("30", "--flag")
    assert parse(30, "--flag") == 30


@given(st.text(max_size=12))
def test_any_text_is_amount_or_input_error(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        try:
            amount = parse(text)
        except InputError:
            continue
        assert 0 <= amount < math.inf


@given(st.integers(1, 1 << 45))
def test_formatted_bytes_parse_to_about_same(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.051)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def shown_by(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """What is shown of pieces of text up to a stop, and whether there was one."""
    machine, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += machine.feed(piece)
        if machine.met:
            break
    return shown + machine.rest(), machine.met


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(at)]


def no_stop_in_another(stops: list[str]) -> bool:
    return not any(one != other and one in other for one in stops for other in stops)


@given(stops=STOPS.filter(no_stop_in_another), text=st.text("abc", max_size=30), places=st.lists(st.integers(0, 30)))
def test_stop_strings_in_any_split(stops: list[str], text: str, places: list[int]) -> None:
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    expected = (text, False) if first is None else (text[:first], True)
    assert shown_by(stops, cut(text, places)) == expected
    assert shown_by(stops, list(text)) == expected


@given(stops=STOPS, text=st.text("abc", max_size=30))
def test_nothing_of_stop_string_is_shown(stops: list[str], text: str) -> None:
    machine, shown = StopStrings(stops), ""
    for done, char in enumerate(text, start=1):
        shown += machine.feed(char)
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if machine.met:
            assert machine.rest() == ""
            return
        assert done - len(shown) < max(map(len, stops), default=1)  # no more is held than may be needed
    assert shown + machine.rest() == text


def test_every_error_has_exit_code() -> None:
    def kinds(base: type[EdgeError]) -> list[type[EdgeError]]:
        return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]

    ours = [kind for kind in kinds(EdgeError) if kind.__module__ == EdgeError.__module__]
    special = {kind.__name__: kind.exit_code for kind in ours if kind.exit_code != 2}
    assert special == {"BudgetError": 3, "IncompleteError": 4, "OutputError": 74, "ShortMemoryError": 5}
