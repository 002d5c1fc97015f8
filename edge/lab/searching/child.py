"""The process of a trial, which bounds its memory and isolates its crashes."""

from __future__ import annotations

from typing import Any

from edge.devices.child import Say, serve
from edge.errors import BudgetError
from edge.lab.searching.trials import answer


def _answer(request: Any, say: Say) -> object:
    try:
        return answer(request)
    except MemoryError:
        raise BudgetError("out of memory") from None


if __name__ == "__main__":
    serve(_answer)
