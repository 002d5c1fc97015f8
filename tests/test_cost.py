"""The allowances of tests: each folder has one, and what is above it is named."""

from __future__ import annotations

from pathlib import Path

from cost import above, allowed


def test_every_folder_has_an_allowance() -> None:
    here = Path(__file__).parent
    paths = (path.relative_to(here.parent).parts for path in here.rglob("test_*.py"))
    folders = {parts[1] if len(parts) > 2 else parts[0] for parts in paths}
    assert folders == allowed()[0].keys()


def test_costs_above_allowances_are_named() -> None:
    seconds, most = allowed()
    assert above({"kv": (seconds["kv"], most)}) == []
    said = above({"kv": (seconds["kv"] + 1, most + 1)})
    assert [line.partition(",")[0] for line in said] == [
        f"tests/kv took {seconds['kv'] + 1} s of CPU", f"{most + 1} compilations",
    ]  # fmt: skip
