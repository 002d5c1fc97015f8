"""The table of current models."""

from __future__ import annotations

import re

from edge.model.known import known_models


def test_every_line_of_table_is_well_formed() -> None:
    table = known_models()
    assert {"qwen3:0.6b", "gemma3:270m"} <= set(table)
    for name, each in table.items():
        assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.-]+", name), name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", each.repository), name
        assert each.licence
        assert each.parameters > 1_000_000
