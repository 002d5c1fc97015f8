"""Drafts whatever they cost, for tests of what they change."""

from __future__ import annotations

from typing import Any

import pytest

from edge.run.drafting import ahead
from edge.run.drafting.ahead import Ahead


def always_drafting(count: int = 99) -> Any:
    """A fixture: the model drafts `count` tokens where as many may be verified, and nothing is copied."""

    @pytest.fixture
    def always(monkeypatch: pytest.MonkeyPatch) -> None:
        def length(_self: Ahead, most: int, _given: int, place: int, _each: float) -> tuple[int, float]:
            return (min(most, count), 2.0) if place == ahead._MODEL else (0, 1.0)

        monkeypatch.setattr(Ahead, "_length", length)

    return always
